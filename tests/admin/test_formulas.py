"""Names that a spreadsheet would run, in the pages' files: text in CSV, untouched elsewhere."""

import csv
import io
import json

import pytest

from tests.admin.ledger_kit import add_owners, post
from tests.admin.site import Site, Visitor

STARTS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
NAMES = [f"{start}cmd|'/c calc'!A1,\"x\" {number}" for number, start in enumerate(STARTS)]
NUMBERS = frozenset("0123456789.-")


@pytest.fixture(scope="module")
def ann(site: Site) -> Visitor:
    site.add_model("tiny")
    now_at = site.operator.clock()
    owners = add_owners(site.operator, *NAMES, key_name="{}")
    rows = [each.posting(f"r{number}", posted_at=now_at) for number, each in enumerate(owners)]
    correction = {"corrects": "r0", "outcome": "correction", "cost_nanos": -5}
    rows.append(owners[0].posting("c1", posted_at=now_at, **correction))
    post(site.operator, rows)
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
