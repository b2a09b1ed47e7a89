"""Usage, its exports and prices through their pages: the same sums, and who sees what."""

import csv
import io
import json
import queue
import re
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import pytest

from admin.app import MAX_DOWNLOADS
from admin.billing import export_parquet
from admin.web.forms import day_text
from registry import audit
from registry.accounts import tenants
from registry.money import ledger, prices
from registry.session import appending
from tests.admin.ledger_kit import DAY_S, POSTING, add_owners, post
from tests.admin.site import Site, Visitor

HOSTILE = "<script>alert('x')</script>\"'&"


@pytest.fixture(scope="module", autouse=True)
def _used(site: Site) -> None:
    """Postings of two tenants over three days, the last of them not in roll-ups yet."""
    site.add_model("tiny")
    now_at = site.operator.clock()
    owners = add_owners(site.operator, "acme", "other", HOSTILE)
    rows = [
        owners[n % 3].posting(
            f"r{n}",
            model=("tiny", "large")[n % 2],
            cost_nanos=1001 + n,
            posted_at=now_at - (n % 3) * DAY_S,
        )
        for n in range(60)
    ]
    post(site.operator, rows, 50)
    site.add_user("vera", "viewer")
    site.add_user("tom", "owner", "acme")


@pytest.fixture(scope="module")
def visitors(site: Site) -> dict[str, Visitor]:
    """Everybody, signed in once."""
    return {name: site.visitor(name) for name in ("ann", "vera", "tom")}


def costs(page: str) -> list[int]:
    """Of the table's rows, the sum last."""
    return [int(one) for one in re.findall(r'data-nanos="(-?\d+)"', page)]


@pytest.mark.parametrize("by", ["model", "tenant", "key", "day", "hour"])
@pytest.mark.parametrize("narrow", ["", "&tenant=acme", "&model=tiny", "&tenant=other&model=large"])
def test_the_page_sums_to_what_its_exports_say(
    visitors: dict[str, Visitor], by: str, narrow: str
) -> None:
    ann = visitors["ann"]
    page = ann.get(f"/usage?by={by}{narrow}").text
    *rows, total = costs(page)
    assert sum(rows) == total > 0
    text = ann.get(f"/usage/export?format=csv{narrow}").text
    exported = [int(row["cost_nanos"]) for row in csv.DictReader(io.StringIO(text))]
    assert sum(exported) == total
    assert f"{len(exported)} rows now" in page
    lines = ann.get(f"/usage/export?format=jsonl{narrow}").text.splitlines()
    assert sum(json.loads(line)["cost_nanos"] for line in lines) == total


def test_parquet_and_focus_come_as_files(site: Site, visitors: dict[str, Visitor]) -> None:
    ann = visitors["ann"]
    total = costs(ann.get("/usage").text)[-1]
    answer = ann.get("/usage/export?format=parquet")
    assert "attachment" in answer.headers["content-disposition"]
    _, parquet = export_parquet.require_pyarrow()
    table = parquet.read_table(io.BytesIO(answer.body))
    assert sum(table["cost_nanos"].to_pylist()) == total
    assert not list(site.operator.data_dir.glob("export-*"))
    answer = ann.get("/usage/export?format=focus")
    assert answer.text.startswith("BilledCost,")
    assert ann.get("/usage/export?format=exe").status == 404


def test_downloads_at_a_time_are_bounded_and_give_their_place_back(
    visitors: dict[str, Visitor], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(MAX_DOWNLOADS + 1):
        assert visitors["ann"].get("/usage/export?format=csv").status == 200
    monkeypatch.setattr("admin.app.MAX_DOWNLOADS", 0)
    full = visitors["ann"].get("/usage/export?format=csv")
    assert full.status == 503
    assert full.headers["retry-after"] == "10"


def test_who_leaves_a_download_half_way_keeps_neither_its_place_nor_the_event_loop(
    site: Site, visitors: dict[str, Visitor], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed_in: queue.Queue[str] = queue.Queue()

    def endless(*_: object) -> Iterator[bytes]:
        try:
            while True:
                yield b"x" * 65_536
        finally:
            closed_in.put(threading.current_thread().name)

    ann = visitors["ann"]
    monkeypatch.setattr("admin.pages.usage.verbs.export_chunks", endless)
    cookies = "; ".join(f"{name}={value}" for name, value in ann.cookies.items())
    for _ in range(MAX_DOWNLOADS + 2):
        path = site.url + "/admin/usage/export?format=csv"
        asked = urllib.request.Request(path, headers={"cookie": cookies})
        with urllib.request.urlopen(asked, timeout=30) as answer:
            assert answer.read(10) == b"x" * 10
        name = closed_in.get(timeout=30)
        assert name not in ("site", "MainThread"), "the event loop's thread"
    monkeypatch.undo()
    assert ann.get("/usage/export?format=csv").status == 200


def test_a_tenants_user_sees_that_tenants_usage_alone(visitors: dict[str, Visitor]) -> None:
    ann, tom = visitors["ann"], visitors["tom"]
    for path in ("/usage?by=tenant", "/usage?by=key", "/usage"):
        page = tom.get(path).text
        assert "other" not in page
        assert costs(page)[-1] == costs(ann.get("/usage?tenant=acme").text)[-1]
    exported = tom.get("/usage/export?format=csv").text
    assert exported == ann.get("/usage/export?format=csv&tenant=acme").text
    for path in ("/usage?tenant=other", "/usage/export?format=csv&tenant=other"):
        assert tom.get(path).status == 403, path
    assert visitors["vera"].get("/usage").status == 200


def test_odd_addresses_and_names_do_no_harm(visitors: dict[str, Visitor]) -> None:
    ann = visitors["ann"]
    spans = ("from=x&to=9999-99-99", "from=2150-01-01&to=1970-01-01", "to=0001-01-01")
    odd = ("by=;drop", "by=hour&from=1970-01-01", "model=%00%3Cscript%3E", "from=1970-01-01")
    for query in (*spans, *odd):
        answer = ann.get(f"/usage?{query}")
        assert answer.status == 200, query
        assert "<script>" not in answer.text
    page = ann.get("/usage?by=tenant").text
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert "There is no key none." in ann.get("/usage?key=none").text


def test_a_price_is_previewed_then_set_and_dated(site: Site, visitors: dict[str, Visitor]) -> None:
    ann = visitors["ann"]
    fields = {
        "prompt_nanos": "0.5", "cached_nanos": "0.05", "completion_nanos": "1.5",
        "embedding_nanos": "0", "service_second_nanos": "0.001", "load_second_nanos": "0",
        "from": "2150-01-01",
    }  # fmt: skip
    before = site.read(audit.latest, 1)
    shown = ann.post("/price/preview/tiny", fields)
    assert "With the new price" in shown.text
    assert site.read(audit.latest, 1) == before, "a preview sets nothing"
    assert "The price was set" in ann.post("/price/set/tiny", fields).text
    (price,) = site.read(prices.list_prices, "tiny")
    assert (price.prompt_nanos, price.cached_nanos, price.completion_nanos) == (500, 50, 1500)
    assert price.service_second_nanos == 1_000_000
    page = ann.get("/prices/tiny").text
    assert "2150-01-01 00:00:00" in page
    assert "scheduled" in page
    for wrong in ({"prompt_nanos": "-1"}, {"prompt_nanos": "0.0001"}, {"from": "1999-01-01"},
                  {"completion_nanos": ""}, {"load_second_nanos": "x"}):  # fmt: skip
        assert ann.post("/price/set/tiny", fields | wrong).status == 422, wrong
        assert ann.post("/price/preview/tiny", fields | wrong).status == 422, wrong
    for who in ("vera", "tom"):
        assert visitors[who].post("/price/set/tiny", fields).status == 403
        assert visitors[who].post("/price/preview/tiny", fields).status == 403
        assert "New price" not in visitors[who].get("/prices/tiny").text
    assert ann.post("/price/set/tiny", fields, csrf="00" * 64).status == 403
    assert ann.get("/prices/nothing").status == 404
    assert "tiny" in ann.get("/prices?q=tin").text


def test_an_invoice_is_previewed_issued_and_had_as_a_file(
    site: Site, visitors: dict[str, Visitor]
) -> None:
    ann, now_at = visitors["ann"], site.operator.clock()
    month = day_text(now_at)[:7]
    fields = {"tenant": "acme", "month": month}
    page = ann.post("/invoice/preview", fields).text
    assert 'Model">Total' in page
    refused = ann.post("/invoice/issue", fields)
    assert refused.status == 422
    assert "the month ends on" in refused.text
    old = replace(POSTING, request_id="old", tenant_id=tenant_id(site, "acme"), posted_at=86_400.0)
    with appending(site.operator.engine, "test") as session:
        ledger.insert_postings(session, [old])
    issued = ann.post("/invoice/issue", {"tenant": "acme", "month": "1970-01", "details": HOSTILE})
    assert "was issued" in issued.text
    number = re.findall(r"<strong>([^<]+)</strong></td><td data-label=\"Tenant\">", issued.text)[0]
    assert ann.get(f"/invoices/{number}/pdf").body.startswith(b"%PDF")
    told = json.loads(ann.get(f"/invoices/{number}/json").body)
    assert told["net_nanos"] == POSTING.cost_nanos
    assert "<script>alert" not in ann.get(f"/invoices/{number}/html").text
    assert ann.get(f"/invoices/{number}/exe").status == 404
    assert ann.post("/invoice/preview", {"tenant": "acme", "month": "soon"}).status == 422
    assert ann.post("/invoice/preview", {"tenant": "nobody", "month": month}).status == 422
    tom, vera = visitors["tom"], visitors["vera"]
    assert number in tom.get("/invoices").text
    assert tom.post("/invoice/preview", {"tenant": "other", "month": month}).status == 403
    for who in (tom, vera):
        assert who.post("/invoice/issue", fields).status == 403
    assert ann.post("/invoice/issue", fields, csrf="00" * 64).status == 403


def tenant_id(site: Site, name: str) -> str:
    return site.read(tenants.get_tenant, name).id


def test_what_is_named_wrongly_is_said_at_its_field(visitors: dict[str, Visitor]) -> None:
    ann = visitors["ann"]
    page = ann.get("/usage?tenant=nobody&key=none").text
    assert "There is no tenant nobody." in page
    assert "There is no key none." in page
    assert re.search(r'name="tenant" value="nobody"[^>]* aria-invalid="true"', page)
    assert "<h1>Usage and costs</h1>" in page
    turned = ann.get("/usage?from=2026-03-02&to=2026-03-01").text
    assert "The first day is after the last day" in turned
    assert re.search(r'<datalist id="u-tenant">.*<option value="acme">', turned)
    assert "Enter a day such as" in ann.get("/usage?from=soon").text


def test_lines_are_sorted_and_keys_are_called_with_their_tenants(
    visitors: dict[str, Visitor],
) -> None:
    page = visitors["ann"].get("/usage?by=key&sort=name&from=2000-01-01").text
    names = re.findall(r'<td data-label="Key">\s*<a [^>]*><span[^>]*></span>([^<]*)</a>', page)
    assert names == sorted(names, key=str.lower)
    assert all(" of " in name for name in names)
    assert 'aria-sort="ascending"' in page
    down = visitors["ann"].get("/usage?by=key&sort=-name&from=2000-01-01").text
    assert 'aria-sort="descending"' in down
