"""`polyhost usage`: every posting once, exact sums, safe in a spreadsheet, gone on with, proved."""

import csv
import io
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from admin.billing import export_rows
from admin.billing.export_rows import COLUMNS, Row
from admin.cli.main import main
from registry.accounts import api_keys, tenants
from registry.money import exports, ledger
from registry.money.ledger import Posting
from registry.session import make_engine, writing
from tests.migrated import migrated

DAY = 86400.0
START = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
NUM_POSTINGS = 2100
PROOF = "usage.csv.proof.json"

Export = Callable[..., str]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the postings, which no test changes."""
    return tmp_path_factory.mktemp("usage") / "data"


@pytest.fixture(scope="module")
def postings(data_dir: Path) -> list[Posting]:
    """A posting every two minutes from 2026-01-01 on, costing 1, 2, 3 ... nanos and a unit."""
    url = f"sqlite:///{data_dir / 'polyhost.db'}"
    migrated(url)
    engine = make_engine(url)
    with writing(engine, "test") as session:
        tenant = tenants.create_tenant(session, '=HYPERLINK("http://x")', now_at=START)
        key, _ = api_keys.create_key(session, tenant.id, "@sum, with comma", now_at=START)
        first = Posting(
            request_id="chatcmpl-00000",
            tenant_id=tenant.id,
            key_id=key.id,
            model="tiny",
            revision="rev1",
            kind="chat",
            outcome="finished",
            prompt_tokens=10,
            cached_tokens=0,
            completion_tokens=5,
            cost_nanos=1_000_000_000,
            service_s=0.1,
            queue_s=0.0,
            ttft_s=0.05,
            duration_s=0.2,
            posted_at=START,
        )
        made = [
            replace(
                first,
                request_id=f"chatcmpl-{number:05}",
                cost_nanos=first.cost_nanos + number,
                posted_at=START + 120.0 * number,
            )
            for number in range(NUM_POSTINGS)
        ]
        ledger.post_many(session, made)
    engine.dispose()
    return made


@pytest.fixture
def export(
    postings: list[Posting], data_dir: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> Export:
    def export(*arguments: str) -> str:
        command = ["usage", "export", "--data-dir", str(data_dir), *arguments]
        assert main(command) == 0
        return capfdbinary.readouterr().out.decode()

    return export


def test_csv_holds_every_posting_once_and_sums_up(export: Export, postings: list[Posting]) -> None:
    rows = list(csv.DictReader(io.StringIO(export())))
    assert tuple(rows[0]) == COLUMNS
    assert [row["request_id"] for row in rows] == [posting.request_id for posting in postings]
    total = sum(posting.cost_nanos for posting in postings)
    assert sum(int(row["cost_nanos"]) for row in rows) == total
    assert sum(Decimal(row["cost"]) for row in rows) == Decimal(total) / 10**9
    assert rows[1]["posted_time"] == "2026-01-01T00:02:00.000+00:00"


def test_jsonl_holds_the_same(export: Export, postings: list[Posting]) -> None:
    rows = [json.loads(line) for line in export("--format", "jsonl").splitlines()]
    assert len(rows) == NUM_POSTINGS
    assert rows[7]["cost_nanos"] == 1_000_000_007
    assert rows[7]["cost"] == "1.000000007"
    assert rows[7]["tenant_name"] == '=HYPERLINK("http://x")'
    assert tuple(rows[0]) == COLUMNS


def test_names_are_no_formulas_in_csv(export: Export) -> None:
    row = next(csv.DictReader(io.StringIO(export())))
    assert row["tenant_name"] == '\'=HYPERLINK("http://x")'
    assert row["key_name"] == "'@sum, with comma"


def test_consecutive_days_hold_everything_once(export: Export, postings: list[Posting]) -> None:
    days = ["2026-01-01", "2026-01-02", "2026-01-03", "2026-01-04"]
    found: list[str] = []
    for day, next_day in itertools.pairwise(days):
        rows = csv.DictReader(io.StringIO(export("--from", day, "--to", next_day)))
        found += [row["request_id"] for row in rows]
    assert found == [posting.request_id for posting in postings]
    second = list(csv.DictReader(io.StringIO(export("--from", days[1], "--to", days[2]))))
    assert second[0]["posted_at"] == str(START + DAY)
    assert len(second) == 720


def test_a_file_appears_whole_and_an_interrupted_one_is_gone_on_with(
    export: Export, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out" / "usage.csv"
    target.parent.mkdir()
    export("--output", str(target))
    assert target.read_text() == export()
    assert sorted(path.name for path in target.parent.iterdir()) == ["usage.csv", PROOF]
    whole = target.read_bytes()
    target.write_text("before")
    lines = export_rows.csv_lines

    def broken(batch: Sequence[Row]) -> bytes:
        if batch[0][0] != "chatcmpl-00000":
            raise OSError("disk full")
        return lines(batch)

    command = ["usage", "export", "--data-dir", str(data_dir), "--output", str(target)]
    assert main([*command, "--resume"]) == 2
    with monkeypatch.context() as patch:
        patch.setattr(exports, "BATCH_ROWS", 500)
        patch.setattr(export_rows, "csv_lines", broken)
        assert main(command) == 1
    assert target.read_text() == "before"
    assert target.with_name("usage.csv.part").exists()
    assert main([*command, "--resume", "--format", "jsonl"]) == 2
    assert main([*command, "--resume"]) == 0
    assert target.read_bytes() == whole
    assert sorted(path.name for path in target.parent.iterdir()) == ["usage.csv", PROOF]


def test_a_file_is_verified(
    export: Export, data_dir: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    target = tmp_path / "usage.jsonl"
    export("--format", "jsonl", "--output", str(target), "--to", "2026-01-02")
    command = ["usage", "verify", str(target), "--data-dir", str(data_dir)]
    assert main(command) == 0
    assert b"720 rows, 720.000258840 USD" in capfdbinary.readouterr().out
    target.write_text(target.read_text().replace('"cost_nanos":1000000007', '"cost_nanos":1'))
    assert main(command) == 1
    assert b"was changed after the export" in capfdbinary.readouterr().err


def test_without_pyarrow_parquet_says_what_is_missing(
    data_dir: Path,
    postings: list[Posting],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    command = ["usage", "export", "--format", "parquet", "--data-dir", str(data_dir)]
    assert main([*command, "--output", str(tmp_path / "x.parquet")]) == 1
    assert "pip install 'polyhost[export]'" in capsys.readouterr().err


def test_sums_by_name(
    data_dir: Path, postings: list[Posting], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["usage", "show", "--data-dir", str(data_dir), "--json", "--by", "model"]
    assert main(command) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row == {
        "model": "tiny",
        "requests": NUM_POSTINGS,
        "prompt_tokens": 10 * NUM_POSTINGS,
        "cached_tokens": 0,
        "completion_tokens": 5 * NUM_POSTINGS,
        "cost_nanos": sum(posting.cost_nanos for posting in postings),
    }
    assert main([*command, "--by", "model"]) == 0
    assert json.loads(capsys.readouterr().out) == [row]
    assert main([*command[:-3], "--by", "model", "--by", "model"]) == 0
    capsys.readouterr()
    assert main(command[:-3]) == 0
    assert "COST USD" in capsys.readouterr().out


def test_an_empty_span_is_a_mistake_no_postings_are_not(
    export: Export, data_dir: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert export("--from", "2030-01-01").splitlines() == [",".join(COLUMNS)]
    data = ["--data-dir", str(data_dir)]
    assert main(["usage", "export", "--from", "2026-01-02", "--to", "2026-01-02", *data]) == 2
    assert b"--from must be before --to" in capfdbinary.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "--through", "9" * 30],
        ["export", "--through", str(NUM_POSTINGS + 1)],
        ["export", "--through", "-1"],
        ["export", "--after", "nan:x"],
        ["export", "--output", ""],
        ["export", "--output", ".", "--resume"],
        ["export", "--format", "parquet", "--output", "usage.parquet", "--resume"],
        ["export", "--output", "/"],
        ["verify", ""],
    ],
)
def test_what_cannot_be_exported_is_status_2_and_leaves_nothing(
    export: Export,
    data_dir: Path,
    tmp_path: Path,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["usage", *arguments, "--data-dir", str(data_dir)]) == 2
    assert capfdbinary.readouterr().err.count(b"\n") == 1
    assert not list(tmp_path.iterdir())
