"""`polyhost prices`, `plans` and `invoices` from arguments to exit status."""

import json
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from admin.cli.prices import parse_percent, percent
from admin.operations import invoices as service_invoices
from registry.models import catalog
from registry.models.catalog import PackFacts
from registry.money import exports
from registry.money.exports import Scope
from registry.money.ledger import Posting
from registry.session import make_engine, reading, writing
from tests.admin.billing import billing_kit
from tests.admin.billing.billing_kit import NOVEMBER
from tests.admin.cli.conftest import Run

FACTS = PackFacts("rev1", "rev1", "llama", "float32", 4096, 512, 1000)


@pytest.fixture(autouse=True)
def _filled(run: Run, data_dir: Path) -> None:
    """Tenants and postings, and the model `chat-model` in the catalog."""
    run("db", "upgrade")
    engine = make_engine(f"sqlite:///{data_dir / 'polyhost.db'}")
    billing_kit.fill(engine, 60)
    with writing(engine, "test") as session:
        model = catalog.add_model(session, "chat-model", "/m", now_at=0.0)
        catalog.finish(session, model.registration, FACTS, now_at=0.0)
    engine.dispose()


def as_json(told: str) -> Any:
    return json.loads(told)


def test_a_scheduled_price_is_withdrawn(run: Run) -> None:
    price = ("--prompt", "1", "--completion", "2")
    run("prices", "set", "chat-model", *price, "--from", "2150-01-01")
    run("prices", "withdraw", "chat-model", "--from", "2150-01-01")
    told = as_json(run("prices", "show", "chat-model", "--json"))
    assert [one["valid_from"] for one in told if one["valid_from"] > 5e9] == []
    gone = ("prices", "withdraw", "chat-model", "--from", "2150-01-01")
    assert "no price from that time on" in run(*gone, status=1)


def test_what_is_scheduled_of_a_plan_is_withdrawn(run: Run) -> None:
    at = ("--from", "2150-01-01")
    run("tenants", "add", "agreed")
    run("plans", "create", "gold", "--discount", "5")
    run("plans", "discount", "gold", "10", *at)
    run("plans", "price", "gold", "chat-model", "--end", *at)
    run("plans", "assign", "agreed", "gold", *at)
    run("plans", "withdraw", "gold", *at)
    run("plans", "withdraw", "gold", "chat-model", *at)
    run("plans", "unassign", "agreed", *at)
    (gold,) = [plan for plan in as_json(run("plans", "list", "--json")) if plan["name"] == "gold"]
    assert [one["discount_bp"] for one in gold["discounts"]] == [500]
    assert gold["prices"] == []
    assert as_json(run("plans", "terms", "agreed", "--json")) == []
    assert "nothing begins at that time" in run("plans", "unassign", "agreed", *at, status=1)


def test_a_price_has_six_parts_and_begins_when_gateways_know(run: Run) -> None:
    earliest_at = time.time() + 2
    seconds = ("--service-second", "0.0005", "--load-second", "1")
    told = run("prices", "set", "chat-model", "--prompt", "1", "--completion", "2", *seconds)
    assert "0.0005" in told
    price = as_json(run("prices", "show", "chat-model", "--json"))[-1]
    assert price["valid_from"] >= earliest_at
    del price["valid_from"]
    assert price == {
        "model": "chat-model",
        "prompt_nanos": 1000,
        "cached_nanos": 1000,
        "completion_nanos": 2000,
        "embedding_nanos": 1000,
        "service_second_nanos": 500_000,
        "load_second_nanos": 10**9,
    }
    early = ("--from", "2020-01-01")
    set_price = ("prices", "set", "chat-model", "--prompt", "1", "--completion", "2")
    assert "the date must be at least" in run(*set_price, *early, status=2)
    later = ("--from", "2100-01-01", "--cached", "0.5", "--embedding", "0.25")
    assert "2100-01-01 00:00:00" in run(*set_price, *later)


def test_a_plan_from_its_making_to_its_end(run: Run) -> None:
    run("plans", "create", "gold", "--discount", "12.5")
    assert "no plan" in run("plans", "create", "none", status=2)
    assert "already exists" in run("plans", "create", "gold", status=1)
    run("plans", "discount", "gold", "20", "--from", "2100-01-01")
    price = ("--prompt", "1", "--completion", "2")
    run("plans", "price", "gold", "chat-model", *price)
    run("plans", "price", "gold", "chat-model", "--end", "--from", "2100-01-01")
    for mistake in ((), ("--end", *price), ("--prompt", "1")):
        assert "--end" in run("plans", "price", "gold", "chat-model", *mistake, status=2)
    run("plans", "assign", "plain", "gold", "--discount", "1")
    run("plans", "assign", "plain", "none", "--from", "2100-01-01")
    (gold,) = [plan for plan in as_json(run("plans", "list", "--json")) if plan["name"] == "gold"]
    assert [one["discount_bp"] for one in gold["discounts"]] == [1250, 2000]
    assert [own["price"] is None for own in gold["prices"]] == [False, True]
    terms = as_json(run("plans", "terms", "plain", "--json"))
    assert [(one["plan"], one["discount_bp"]) for one in terms] == [("gold", 100), ("", 0)]
    assert "12.5 %" in run("plans", "list")
    assert "ended" in run("plans", "list")
    assert "none" in run("plans", "terms")
    assert "plans list" in run("plans", "assign", "plain", "silver", status=1)


@pytest.mark.parametrize("told", ["-1", "100.01", "0.001", "nan", "x", "1e999999999"])
def test_percentages_that_are_none(told: str, run: Run) -> None:
    assert run("plans", "create", "p", "--discount", told, status=2)
    assert (parse_percent("12.34%"), percent(1234), percent(1000)) == (1234, "12.34 %", "10 %")


def test_invoices_are_issued_listed_shown_and_exported(run: Run, tmp_path: Path) -> None:
    def late(nanos: int) -> None:
        """A correction in November of something of `plain`, the last in the order of tenants."""
        engine = make_engine(f"sqlite:///{tmp_path / 'data' / 'polyhost.db'}")
        with reading(engine) as session:
            whose = exports.COLUMNS.index("tenant_name")
            scope = Scope(0.0, NOVEMBER)
            rows = [row for batch in exports.rows(session, scope, 999) for row in batch]
        row = next(row for row in rows if row[whose] == "plain" and row[6] == "finished")
        wrong = Posting(*row[: len(fields(Posting))])
        billing_kit.post(engine, billing_kit.correction(wrong, "corr-9", nanos, NOVEMBER + 5))
        engine.dispose()

    assert "(preview)" in run("invoices", "preview", "--tenant", "acme", "--month", "2025-10")
    run("invoices", "create", "--month", "2025-09", "--tenant", "acme", "--details", "Road 1")
    assert "--all" in run("invoices", "create", "--month", "2025-10", status=2)
    made = as_json(run("invoices", "create", "--month", "2025-10", "--all", "--json"))
    assert [one["number"] for one in made] == ["INV-000002", "INV-000003", "INV-000004"]
    assert run("invoices", "create", "--month", "2025-10", "--all").count("\n") == 1
    # A month in which one of the three was used for: the two others do not keep it from its bill.
    late(3)
    made = as_json(run("invoices", "create", "--month", "2025-11", "--all", "--json"))
    assert [one["number"] for one in made] == ["INV-000005"]
    assert "INV-000001" in run("invoices", "list", "--tenant", "acme")
    assert len(as_json(run("invoices", "list", "--json"))) == 5
    shown = as_json(run("invoices", "show", "INV-000001", "--json"))
    assert shown["customer_details"] == "Road 1"
    assert "2025-09-01 to 2025-09-30" in run("invoices", "show", "INV-000001")
    for form, starts in (("pdf", b"%PDF"), ("html", b"<!doctype html>"), ("json", b"{")):
        path = tmp_path / f"invoice.{form}"
        run("invoices", "export", "INV-000001", "--format", form, "--output", str(path))
        assert path.read_bytes().startswith(starts)
    assert "invoices list" in run("invoices", "show", "INV-9", status=1)
    assert "not a month" in run("invoices", "preview", "--tenant", "acme", "--month", "x", status=2)


def test_months_end_where_the_next_begins() -> None:
    assert service_invoices.month_of("2025-10").ended_at == NOVEMBER
    december = service_invoices.month_of("2025-12")
    assert (december.first_day, december.last_day) == ("2025-12-01", "2025-12-31")
    assert december.ended_at == service_invoices.month_of("2026-01").began_at
