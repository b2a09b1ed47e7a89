"""FOCUS exports held to the specification's table of columns, and to the ledger."""

import csv
import io
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from admin.billing import focus
from admin.context.operator_context import OperatorContext
from admin.operations import usage as service_usage
from gateway.settings.settings import Settings
from registry.money.exports import Scope
from registry.session import make_engine
from tests.admin.billing import billing_kit
from tests.admin.billing.billing_kit import CHANGE, OCTOBER, Books
from tests.migrated import migrated

TABLE = json.loads(focus.COLUMNS_PATH.read_text())
Rows = list[dict[str, str]]
# The 21 that version 1.2 makes mandatory, once more: a table that lost one must not pass.
MANDATORY = {
    *("BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency"),
    *("BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory", "ChargeClass"),
    *("ChargeDescription", "ChargePeriodEnd", "ChargePeriodStart", "ContractedCost"),
    *("EffectiveCost", "InvoiceIssuerName", "ListCost", "PricingQuantity", "PricingUnit"),
    *("ProviderName", "PublisherName", "ServiceCategory", "ServiceName"),
}
FORMATS = {
    "numeric": re.compile(r"-?\d+(\.\d+)?(E-?\d+)?"),
    "datetime": re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"),
    "currency": re.compile(r"[A-Z]{3}"),
    "unit": re.compile(r"Tokens|Seconds"),
}


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorContext]:
    folder = tmp_path_factory.mktemp("focus")
    url = f"sqlite:///{folder / 'polyhost.db'}"
    migrated(url)
    engine = make_engine(url)
    settings = Settings(currency="EUR", invoice_issuer="=Häuser, Hosting & Co")
    yield OperatorContext(engine, folder, "test", settings=settings)
    engine.dispose()


@pytest.fixture(scope="module")
def books(context: OperatorContext) -> Books:
    return billing_kit.fill(context.engine)


@pytest.fixture(scope="module")
def rows(context: OperatorContext, books: Books) -> Rows:
    order = service_usage.order_export(context, "focus", Scope(0.0, 2.0**53))
    stream = io.BytesIO()
    service_usage.export_stream(context, order, stream)
    return list(csv.DictReader(io.StringIO(stream.getvalue().decode(), newline="")))


def test_the_table_is_that_of_version_1_2() -> None:
    assert len(TABLE) == 57
    assert {row["column"] for row in TABLE if row["level"] == "Mandatory"} == MANDATORY
    left_out = {row["column"] for row in TABLE if row["left_out"]}
    assert not left_out & MANDATORY
    assert set(focus.columns()) == {row["column"] for row in TABLE} - left_out | {"x_Model"}


@pytest.mark.parametrize("column", [row for row in TABLE if not row["left_out"]], ids=str)
def test_every_value_is_one_that_its_column_takes(rows: Rows, column: dict[str, Any]) -> None:
    values = [row[column["column"]] for row in rows]
    if not column["nullable"]:
        assert all(values)
    told = {value for value in values if value}
    if "allowed" in column:
        assert told <= set(column["allowed"])
    if column["format"] in FORMATS:
        assert all(FORMATS[column["format"]].fullmatch(value) for value in told)
    if column["type"] == "JSON":
        assert all(key.startswith("x_") for value in told for key in json.loads(value))


def test_nulls_are_where_the_specification_wants_them(rows: Rows) -> None:
    for row in rows:
        is_usage = row["ChargeCategory"] == "Usage"
        for name in ("PricingQuantity", "PricingUnit", "ListUnitPrice", "ContractedUnitPrice"):
            assert bool(row[name]) == is_usage
        for name in ("ConsumedQuantity", "ConsumedUnit", "SkuId", "SkuPriceId", "PricingCategory"):
            assert bool(row[name]) == is_usage
        assert bool(row["SubAccountId"]) == bool(row["SubAccountType"])


def test_prices_times_quantities_are_costs_exactly(rows: Rows) -> None:
    for row in rows:
        if row["ChargeCategory"] == "Usage":
            quantity = Fraction(row["PricingQuantity"])
            assert Fraction(row["ListUnitPrice"]) * quantity == Fraction(row["ListCost"])
            agreed = Fraction(row["ContractedUnitPrice"]) * quantity
            assert agreed == Fraction(row["ContractedCost"])
            # Each posting's bill was rounded down: to the client goes less than a nano-unit each.
            lost = agreed - Fraction(row["BilledCost"])
            assert -Fraction(billing_kit.NUM, 10**9) < lost < Fraction(billing_kit.NUM, 10**9)
        else:
            assert row["ContractedCost"] == row["BilledCost"] == row["EffectiveCost"]


def test_billed_costs_are_the_ledgers(rows: Rows, books: Books) -> None:
    assert sum(Decimal(row["BilledCost"]).scaleb(9) for row in rows) == books.total
    billed = defaultdict[str, Decimal](Decimal)
    for row in rows:
        billed[row["SubAccountId"]] += Decimal(row["EffectiveCost"])
    for key in books.keys.values():
        paid = sum(posting.cost_nanos for posting in books.postings if posting.key_id == key)
        assert billed[key].scaleb(9) == paid


def test_units_are_tokens_by_meter_and_all_are_there(rows: Rows, books: Books) -> None:
    tokens = defaultdict[str, int](int)
    for row in rows:
        if row["PricingUnit"] == "Tokens":
            tokens[row["SkuMeter"]] += int(row["ConsumedQuantity"])
    served = [p for p in books.postings if p.outcome in ("finished", "disconnected")]
    hits = [p for p in books.postings if p.outcome == "cache_hit"]
    assert tokens == {
        "Input Tokens": sum(p.prompt_tokens - p.cached_tokens for p in served),
        "Cached Input Tokens": sum(p.cached_tokens for p in served)
        + sum(p.prompt_tokens + p.completion_tokens for p in hits),
        "Output Tokens": sum(p.completion_tokens for p in served),
    }


def test_one_row_an_hour_key_model_meter_and_price(rows: Rows) -> None:
    names = ("ChargePeriodStart", "SubAccountId", "SkuId", "ListUnitPrice", "ContractedUnitPrice")
    usage = [row for row in rows if row["ChargeCategory"] == "Usage"]
    assert len({tuple(row[name] for name in names) for row in usage}) == len(usage)
    changed = datetime.fromtimestamp(CHANGE // 3600 * 3600, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    priced = {
        row["ListUnitPrice"]
        for row in usage
        if row["ChargePeriodStart"] == changed and row["SkuId"] == "chat-model/input-tokens"
    }
    assert priced == {"0.00000015", "0.000000101"}
    assert any(row["PricingUnit"] == "Seconds" for row in usage)


def test_billing_periods_are_calendar_months(rows: Rows) -> None:
    periods = {(row["BillingPeriodStart"], row["BillingPeriodEnd"]) for row in rows}
    assert periods == {
        ("2025-09-01T00:00:00Z", "2025-10-01T00:00:00Z"),
        ("2025-10-01T00:00:00Z", "2025-11-01T00:00:00Z"),
    }
    for row in rows:
        began, ended = row["ChargePeriodStart"], row["ChargePeriodEnd"]
        assert row["BillingPeriodStart"] <= began < ended <= row["BillingPeriodEnd"]
        span = datetime.fromisoformat(ended) - datetime.fromisoformat(began)
        assert span.total_seconds() == 3600
    assert focus._month(datetime(2025, 12, 31, 23, tzinfo=UTC).timestamp()) == (
        "2025-12-01T00:00:00Z",
        "2026-01-01T00:00:00Z",
    )


def test_corrections_say_whether_their_month_was_over(rows: Rows) -> None:
    corrected = {
        row["ChargeDescription"]: (row["ChargeClass"], row["BilledCost"], row["ChargePeriodStart"])
        for row in rows
        if row["ChargeCategory"] == "Adjustment"
    }
    assert datetime(2025, 10, 1, tzinfo=UTC).timestamp() == OCTOBER
    assert corrected == {
        "Correction of r-000001": ("Correction", "-0.000000007", "2025-10-01T03:00:00Z"),
        "Correction of r-000399": ("", "0.000000005", "2025-10-01T05:00:00Z"),
    }


def test_no_cell_is_a_formula(rows: Rows) -> None:
    for row in rows:
        for value in row.values():
            assert not value.startswith(("=", "+", "@", "\t"))
            assert not value.startswith("-") or FORMATS["numeric"].fullmatch(value)
    assert rows[0]["ProviderName"] == "'=Häuser, Hosting & Co"


def test_an_empty_ledger_has_a_header(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'polyhost.db'}"
    migrated(url)
    engine = make_engine(url)
    context = OperatorContext(engine, tmp_path, "test")
    stream = io.BytesIO()
    order = service_usage.order_export(context, "focus", Scope(0.0, 2.0**53))
    service_usage.export_stream(context, order, stream)
    engine.dispose()
    assert stream.getvalue().decode().split("\n") == [",".join(focus.columns()), ""]
