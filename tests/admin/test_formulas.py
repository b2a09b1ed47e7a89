"""Names that a spreadsheet would run, in the pages' files: text in CSV, untouched elsewhere."""

import csv
import io
import json
from dataclasses import replace

import pytest

from registry import api_keys, ledger, tenants
from registry.session import appending
from tests.admin.site import Site, Visitor
from tests.admin.test_usage_and_prices import POSTING

STARTS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
NAMES = [f"{start}cmd|'/c calc'!A1,\"x\" {number}" for number, start in enumerate(STARTS)]
NUMBERS = frozenset("0123456789.-")


@pytest.fixture(scope="module")
def ann(site: Site) -> Visitor:
    site.add_model("tiny")
    now_at = site.control.clock()
    rows = []
    with site.control.writing() as session:
        for number, name in enumerate(NAMES):
            tenant = tenants.create_tenant(session, name, now_at=now_at)
            key, _ = api_keys.create_key(session, tenant.id, name, now_at=now_at)
            row = replace(POSTING, request_id=f"r{number}", posted_at=now_at)
            rows.append(replace(row, tenant_id=tenant.id, key_id=key.id))
        rows.append(
            replace(rows[0], request_id="c1", corrects="r0", outcome="correction", cost_nanos=-5)
        )
    with appending(site.control.engine, "test") as session:
        ledger.insert_postings(session, rows)
    return site.visitor("ann")


@pytest.mark.parametrize("form", ["csv", "focus"])
def test_no_cell_begins_as_a_formula(ann: Visitor, form: str) -> None:
    text = ann.get(f"/usage/export?format={form}").text
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert len(rows) >= len(NAMES)
    for row in rows:
        for column, cell in row.items():
            assert not cell.startswith(STARTS) or set(cell) <= NUMBERS, (column, cell)
    column = "tenant_name" if form == "csv" else "BillingAccountName"
    assert {row[column] for row in rows} >= {"'" + name for name in NAMES}


def test_a_negative_amount_stays_a_number(ann: Visitor) -> None:
    rows = csv.DictReader(io.StringIO(ann.get("/usage/export?format=csv").text, newline=""))
    (row,) = [row for row in rows if row["request_id"] == "c1"]
    assert (row["cost_nanos"], row["cost"]) == ("-5", "-0.000000005")


def test_programs_get_names_as_they_are(ann: Visitor) -> None:
    lines = ann.get("/usage/export?format=jsonl").text.splitlines()
    assert {json.loads(line)["tenant_name"] for line in lines} == set(NAMES)
