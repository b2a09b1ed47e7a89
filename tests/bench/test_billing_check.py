"""The independent recomputation of a bill agrees with the product's, and finds what is wrong."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from admin.context.operator_context import OperatorContext
from admin.operations import invoices as service_invoices
from admin.operations.invoices import month_of
from bench import billing_check
from gateway.settings.settings import Settings
from registry.session import writing
from tests.admin.billing import billing_kit
from tests.admin.billing.billing_kit import NOVEMBER, OCTOBER, Books

MONTHS = ("2025-09", "2025-10")


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    with billing_kit.registry(request, tmp_path) as engine:
        yield engine


@pytest.fixture
def books(engine: Engine) -> Books:
    return billing_kit.fill(engine, 200)


def url_of(engine: Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


def run(engine: Engine, tenant: str, month: str, bill: dict[str, Any], folder: Path) -> int:
    path = folder / "bill.json"
    path.write_text(json.dumps(bill))
    asked = [url_of(engine), "--tenant", tenant, "--month", month, "--bill", str(path)]
    return billing_check.main(asked)


def bills(engine: Engine, folder: Path, tenant: str) -> Iterator[tuple[str, dict[str, Any]]]:
    settings = Settings(invoice_tax_name="VAT", invoice_tax_bp=777)
    context = OperatorContext(engine, folder, "test", lambda: NOVEMBER + 1, settings)
    for month in MONTHS:
        made = service_invoices.create_invoice(context, tenant, month_of(month))
        _, document = service_invoices.get_invoice(context, made.number)
        yield month, json.loads(json.dumps(asdict(document)))


def test_every_bill_agrees_to_the_unit(engine: Engine, books: Books, tmp_path: Path) -> None:
    for tenant in books.tenants:
        for month, bill in bills(engine, tmp_path, tenant):
            assert bill["net_nanos"]
            assert run(engine, tenant, month, bill, tmp_path) == 0


def test_a_unit_too_much_is_found(engine: Engine, books: Books, tmp_path: Path) -> None:
    month, bill = list(bills(engine, tmp_path, "acme"))[1]
    for name in ("net_nanos", "total_nanos"):
        assert run(engine, "acme", month, {**bill, name: bill[name] + 10**7}, tmp_path) == 1
    bill["lines"][0]["amount_nanos"] += 1
    bill["net_nanos"] += 1
    assert run(engine, "acme", month, bill, tmp_path) == 1


def test_a_posting_at_the_wrong_price_is_found(
    engine: Engine, books: Books, tmp_path: Path
) -> None:
    served = next(
        p for p in books.postings if p.tenant_id == books.tenants["plain"] and p.cost_nanos > 9
    )
    dear = replace(
        served,
        request_id="dear",
        posted_at=OCTOBER + 5,
        cost_nanos=served.cost_nanos + 1,
        input_nanos=served.input_nanos + 1,
    )
    billing_kit.post(engine, dear)
    asked = [url_of(engine), "--tenant", "plain", "--month", "2025-10"]
    assert billing_check.main(asked) == 1


def test_another_price_than_then_is_found(engine: Engine, books: Books) -> None:
    with writing(engine, "test") as session:
        session.execute(text("UPDATE prices SET completion_nanos = completion_nanos + 1"))
    asked = [url_of(engine), "--tenant", "plain", "--month", "2025-10"]
    assert billing_check.main(asked) == 1
