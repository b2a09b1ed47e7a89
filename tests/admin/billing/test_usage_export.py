"""Exports on both databases: every posting once, exact sums, the same bytes again, proved files."""

import csv
import fcntl
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from sqlalchemy import Engine

from admin.billing import export_file, export_parquet, export_rows, usage_export
from admin.billing.export_file import PART_SUFFIX, PROOF_SUFFIX
from admin.billing.usage_export import ExportOrder, Format
from admin.context.operator_context import OperatorContext
from admin.operations import usage as service_usage
from registry.errors import Forbidden, InvalidValue, RegistryError
from registry.money import exports
from registry.money.exports import Scope
from tests.admin.billing import billing_kit
from tests.admin.billing.billing_kit import OCTOBER, START, Books

ALL = Scope(0.0, 2.0**53)
TEXT: tuple[Format, ...] = ("csv", "jsonl", "focus")


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    with billing_kit.registry(request, tmp_path_factory.mktemp("usage")) as engine:
        yield engine


@pytest.fixture(scope="module")
def books(engine: Engine) -> Books:
    return billing_kit.fill(engine)


@pytest.fixture
def context(engine: Engine, books: Books, tmp_path: Path) -> OperatorContext:
    return OperatorContext(engine, tmp_path, "test")


def order(context: OperatorContext, form: Format, scope: Scope = ALL) -> ExportOrder:
    return service_usage.order_export(context, form, scope)


def exported(context: OperatorContext, form: Format, scope: Scope = ALL, after: str = "") -> bytes:
    stream = io.BytesIO()
    service_usage.export_stream(context, order(context, form, scope), stream, after)
    return stream.getvalue()


def csv_rows(data: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(data.decode(), newline="")))


def test_csv_and_jsonl_hold_every_posting_once_in_order(
    context: OperatorContext, books: Books
) -> None:
    rows = csv_rows(exported(context, "csv"))
    told = [json.loads(line) for line in exported(context, "jsonl").splitlines()]
    ids = [posting.request_id for posting in books.postings]
    assert [row["request_id"] for row in rows] == [row["request_id"] for row in told] == ids
    assert sum(int(row["cost_nanos"]) for row in rows) == books.total
    assert sum(row["cost_nanos"] for row in told) == books.total
    assert tuple(rows[0]) == tuple(told[0]) == export_rows.COLUMNS
    for posting, row in zip(books.postings, told, strict=True):
        assert all(row[name] == getattr(posting, name) for name in ("posted_at", "corrects"))
    corrected = [row for row in told if row["outcome"] == "correction"]
    assert [(row["corrects"], row["cost"]) for row in corrected] == [
        ("r-000001", "-0.000000007"),
        ("r-000399", "0.000000005"),
    ]


def test_batches_do_not_show(context: OperatorContext, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {form: exported(context, form) for form in TEXT}
    monkeypatch.setattr(exports, "BATCH_ROWS", 7)
    monkeypatch.setattr(usage_export, "FOCUS_ROWS", 3)
    monkeypatch.setattr(usage_export, "MAX_CHANGES", 1)
    assert {form: exported(context, form) for form in TEXT} == whole


def test_scopes_part_the_ledger(context: OperatorContext, books: Books) -> None:
    whole = exported(context, "csv").splitlines()[1:]
    for name in ("tenant", "key", "model"):
        parts: list[bytes] = []
        values = {
            "tenant": list(books.tenants),
            "key": list(books.keys.values()),
            "model": list(billing_kit.MODELS),
        }[name]
        for value in values:
            scope = service_usage.scope_of(context, 0.0, 2.0**53, **{name: value})
            lines = exported(context, "csv", scope).splitlines()[1:]
            assert lines
            parts += lines
        assert sorted(parts) == sorted(whole)
    early = Scope(0.0, OCTOBER + 1.5)
    late = Scope(OCTOBER + 1.5, 2.0**53)
    both = [*exported(context, "csv", early).splitlines()[1:]]
    assert both + exported(context, "csv", late).splitlines()[1:] == whole


def test_a_key_of_another_tenant_is_not_in_scope(context: OperatorContext, books: Books) -> None:
    with pytest.raises(InvalidValue, match="does not belong to the tenant"):
        service_usage.scope_of(context, 0.0, 1.0, "acme", books.keys["plain/0"])
    with pytest.raises(InvalidValue, match="before --to"):
        service_usage.scope_of(context, 1.0, 1.0)


@pytest.mark.parametrize("form", TEXT)
def test_what_comes_later_is_not_in_an_earlier_state(
    context: OperatorContext, engine: Engine, books: Books, form: Format
) -> None:
    before = order(context, form)
    stream = io.BytesIO()
    service_usage.export_stream(context, before, stream)
    late = replace(books.postings[3], request_id=f"late-{form}", cost_nanos=0, input_nanos=0)
    billing_kit.post(engine, replace(late, cached_nanos=0, output_nanos=0, outcome="failed"))
    again = io.BytesIO()
    service_usage.export_stream(context, before, again)
    assert again.getvalue() == stream.getvalue()


@pytest.mark.parametrize("form", TEXT)
def test_an_interrupted_file_goes_on_byte_for_byte(
    context: OperatorContext, tmp_path: Path, form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "BATCH_ROWS", 50)
    monkeypatch.setattr(usage_export, "FOCUS_ROWS", 5)
    asked = order(context, form)
    whole = tmp_path / "whole"
    service_usage.export_file_to(context, asked, whole)
    data = whole.read_bytes()
    head = len(usage_export.header(asked))
    first = data.index(b"\n", head) + 1
    cuts = [
        0,
        head // 2,
        head,
        head + 1,
        first - 1,
        first,
        len(data) // 2,
        len(data) - 1,
        len(data),
    ]
    for cut in (*cuts, len(data)):
        path = tmp_path / f"cut-{cut}"
        (tmp_path / (path.name + PART_SUFFIX)).write_bytes(data[:cut])
        beside = tmp_path / f"{path.name}{PART_SUFFIX}.json"
        beside.write_text(json.dumps(asked.to_json()))
        assert export_file.interrupted_order(path) == asked
        proof = service_usage.export_file_to(context, asked, path)
        assert path.read_bytes() == data, cut
        assert proof == export_file.read_proof(whole)
        assert sorted(p.name for p in tmp_path.glob(f"{path.name}*")) == [
            path.name,
            path.name + PROOF_SUFFIX,
        ]


def test_a_part_of_another_order_is_not_gone_on_with(
    context: OperatorContext, tmp_path: Path
) -> None:
    asked = order(context, "csv")
    path = tmp_path / "usage.csv"
    (tmp_path / "usage.csv.part").write_bytes(b"something else\n")
    other = replace(asked, through_seq=1)
    (tmp_path / "usage.csv.part.json").write_text(json.dumps(other.to_json()))
    service_usage.export_file_to(context, asked, path)
    assert path.read_bytes() == exported(context, "csv")


def test_two_do_not_write_the_same_file(context: OperatorContext, tmp_path: Path) -> None:
    path = tmp_path / "usage.csv"
    asked = order(context, "csv")
    with (tmp_path / "usage.csv.part").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RegistryError, match="another export"):
            service_usage.export_file_to(context, asked, path)
    service_usage.export_file_to(context, asked, path)
    assert path.read_bytes() == exported(context, "csv")


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_token_says_where_to_go_on(context: OperatorContext, form: Format) -> None:
    first = io.BytesIO()
    proof, token = service_usage.export_stream(
        context, order(context, form, Scope(0.0, OCTOBER)), first
    )
    assert proof.num_rows > 10
    assert first.getvalue() + exported(context, form, after=token) == exported(context, form)
    with pytest.raises(InvalidValue, match="cannot continue from"):
        exported(context, form, after="nonsense")


def test_a_token_of_focus_is_an_hour(context: OperatorContext) -> None:
    whole = exported(context, "focus")
    first = exported(context, "focus", Scope(0.0, OCTOBER))
    rest = exported(context, "focus", after=usage_export.hour_token(int(OCTOBER)))
    assert first + rest == whole
    for wrong in ("1.5:r-1", "hour:x"):
        with pytest.raises(InvalidValue, match="cannot continue from"):
            exported(context, "focus", after=wrong)


@pytest.mark.parametrize("form", [*TEXT, "parquet"])
def test_a_file_is_proved_from_the_ledger(
    context: OperatorContext, books: Books, tmp_path: Path, form: Format
) -> None:
    path = tmp_path / "usage"
    made = service_usage.export_file_to(context, order(context, form), path)
    assert made.cost_nanos == books.total
    assert service_usage.verify_export(context, path) == made
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(RegistryError, match="was changed after the export"):
        service_usage.verify_export(context, path)


def test_parquet_holds_what_the_other_formats_do(
    context: OperatorContext, books: Books, tmp_path: Path
) -> None:
    path = tmp_path / "usage.parquet"
    service_usage.export_file_to(context, order(context, "parquet"), path)
    _, parquet = export_parquet.require_pyarrow()
    found = parquet.read_table(path).to_pylist()
    told = [json.loads(line) for line in exported(context, "jsonl").splitlines()]
    assert len(found) == len(told) >= len(books.postings)
    for row, same in zip(found, told, strict=True):
        row["posted_time"] = row["posted_time"].isoformat(timespec="milliseconds")
        row["cost"] = str(row["cost"])
        same["cost"] = str(Decimal(same["cost"]))
        assert row == same


@pytest.mark.parametrize("form", TEXT)
def test_a_forged_file_with_a_proof_to_match_is_found_out(
    context: OperatorContext, tmp_path: Path, form: Format
) -> None:
    """Lines left out, and a proof that knows of it: only the ledger can tell."""
    path = tmp_path / "usage"
    asked = order(context, form)
    service_usage.export_file_to(context, asked, path)
    short = replace(asked, scope=replace(asked.scope, from_at=START + 3600))
    service_usage.export_file_to(context, short, tmp_path / "short")
    forged = export_file.read_proof(tmp_path / "short")
    path.write_bytes((tmp_path / "short").read_bytes())
    told = replace(forged, order=asked).to_json()
    (tmp_path / ("usage" + PROOF_SUFFIX)).write_text(json.dumps(told))
    with pytest.raises(RegistryError, match="differs from the ledger"):
        service_usage.verify_export(context, path)


def test_a_file_without_a_proof_is_not_proved(context: OperatorContext, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a\n")
    with pytest.raises(RegistryError, match=r"x\.csv\.proof\.json is missing"):
        service_usage.verify_export(context, tmp_path / "x.csv")
    whole = order(context, "csv").to_json()
    beside = tmp_path / "x.csv.proof.json"
    wrong: list[object] = [
        {},
        [],
        {**whole, "through_seq": "1"},
        {**whole, "format": "xlsx"},
        {**whole, "scope": {"from_at": None, "to_at": 1.0}},
    ]
    for told in wrong:
        beside.write_text(json.dumps(told))
        with pytest.raises(InvalidValue, match="not a proof"):
            service_usage.verify_export(context, tmp_path / "x.csv")


def test_a_proof_of_a_state_to_come_proves_nothing(
    context: OperatorContext, tmp_path: Path
) -> None:
    asked = replace(order(context, "csv"), through_seq=2**62)
    service_usage.export_file_to(context, asked, tmp_path / "x.csv")
    with pytest.raises(RegistryError, match="not exported from this ledger"):
        service_usage.verify_export(context, tmp_path / "x.csv")


def test_sums_are_those_of_the_postings(context: OperatorContext, books: Books) -> None:
    (all_of_it,) = service_usage.usage_totals(context, ALL, [])
    assert all_of_it["cost_nanos"] == books.total
    by = service_usage.usage_totals(context, ALL, ["tenant", "model"])
    assert len(by) == 6
    acme = [posting for posting in books.postings if posting.tenant_id == books.tenants["acme"]]
    scope = service_usage.scope_of(context, 0.0, 2.0**53, "acme")
    (one,) = service_usage.usage_totals(context, scope, [])
    assert one["cost_nanos"] == sum(posting.cost_nanos for posting in acme)
    assert one["prompt_tokens"] == sum(posting.prompt_tokens for posting in acme)


def test_who_has_a_role_for_one_tenant_gets_that_tenants_alone(
    context: OperatorContext, books: Books, tmp_path: Path
) -> None:
    mine, other = books.tenants["plain"], books.tenants["acme"]
    viewer = replace(context, grants={mine: "viewer"})
    scope = service_usage.scope_of(viewer, 0.0, 2.0**53)
    assert scope.tenant_id == mine
    told = csv_rows(exported(viewer, "csv", scope))
    assert {row["tenant_id"] for row in told} == {mine}
    with pytest.raises(Forbidden):
        service_usage.scope_of(viewer, 0.0, 2.0**53, "acme")
    with pytest.raises(Forbidden):
        service_usage.scope_of(viewer, 0.0, 2.0**53, key=books.keys["acme/0"])
    for forbidden in (ALL, replace(ALL, tenant_id=other)):
        asked = order(context, "csv", forbidden)
        path = tmp_path / f"of-{forbidden.tenant_id}"
        service_usage.export_file_to(context, asked, path)
        with pytest.raises(Forbidden):
            service_usage.export_stream(viewer, asked, io.BytesIO())
        with pytest.raises(Forbidden):
            service_usage.export_file_to(viewer, asked, path)
        with pytest.raises(Forbidden):
            service_usage.verify_export(viewer, path)
        with pytest.raises(Forbidden):
            service_usage.usage_totals(viewer, forbidden, [])
