"""When prices begin."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from admin.context.operator_context import OperatorContext
from admin.context.optimistic_lock import ChangedMeanwhile
from admin.operations import prices as service_prices
from registry.accounts import tenants
from registry.errors import InvalidValue, NotFound
from registry.models import catalog
from registry.models.catalog import PackFacts
from registry.money import plans
from registry.money.plans import PlanDiscount
from registry.money.prices import PriceRecord
from registry.session import make_engine, writing
from tests.migrated import migrated

NOW = 1_000_000.0
FACTS = PackFacts("rev1", "rev1", "llama", "float32", 4096, 512, 1000)


@pytest.fixture
def now() -> list[float]:
    """The clock."""
    return [NOW]


@pytest.fixture
def context(tmp_path: Path, now: list[float]) -> Iterator[OperatorContext]:
    url = f"sqlite:///{tmp_path / 'polyhost.db'}"
    migrated(url)
    engine = make_engine(url)
    with writing(engine, "test") as session:
        model = catalog.add_model(session, "tiny", "/m", now_at=0.0)
        catalog.finish(session, model.registration, FACTS, now_at=0.0)
        plans.create_plan(session, PlanDiscount("gold", 0.0, 0), now_at=0.0)
        tenants.create_tenant(session, "acme", now_at=0.0)
    yield OperatorContext(engine, tmp_path, "test", lambda: now[0])
    engine.dispose()


CHANGES: list[Callable[[OperatorContext], float]] = [
    lambda context: service_prices.set_price(context, PriceRecord("tiny", 0.0, 5)).valid_from,
    lambda context: service_prices.create_plan(context, "silver", 100).valid_from,
    lambda context: service_prices.set_plan_discount(context, "gold", 100).valid_from,
    lambda context: service_prices.set_plan_price(context, "gold", "tiny", None).valid_from,
    lambda context: service_prices.set_terms(context, "acme", "gold").valid_from,
]


@pytest.mark.parametrize("change", CHANGES)
def test_the_notice_counts_from_when_it_is_written(
    context: OperatorContext, now: list[float], change: Callable[[OperatorContext], float]
) -> None:
    """Whoever waits for other writers must not set a price that began while it waited."""
    began: list[float] = []
    waiting = threading.Thread(target=lambda: began.append(change(context)))
    with writing(context.engine, "test"):
        waiting.start()
        time.sleep(0.1)
        now[0] += 4.0
    waiting.join()
    notice_s = service_prices.NOTICE_POLLS * context.settings.key_cache_poll_s
    assert began == [NOW + 4.0 + notice_s]


@pytest.mark.parametrize("valid_from", [NOW - 1, NOW + 1.9, 1e12, math.inf, math.nan])
def test_dates_that_cannot_be_are_refused(context: OperatorContext, valid_from: float) -> None:
    with pytest.raises(InvalidValue, match="the date must be"):
        service_prices.set_price(context, PriceRecord("tiny", 0.0, 5), valid_from)
    assert service_prices.list_prices(context) == []


def test_a_price_is_withdrawn_as_long_as_no_gateway_can_go_by_it(
    context: OperatorContext, now: list[float]
) -> None:
    first = service_prices.set_price(context, PriceRecord("tiny", 0.0, 100))
    later = service_prices.set_price(context, PriceRecord("tiny", 0.0, 200), NOW + 1000)
    seen = service_prices.prices_mark([first])
    with pytest.raises(ChangedMeanwhile):
        service_prices.withdraw_price(context, "tiny", later.valid_from, seen)
    for at, said in ((later.valid_from - 0.1, "in a few seconds"), (later.valid_from, "in effect")):
        now[0] = at
        with pytest.raises(InvalidValue, match=said):
            service_prices.withdraw_price(context, "tiny", later.valid_from)
        assert len(service_prices.list_prices(context, "tiny")) == 2
    now[0] = NOW + 10
    with pytest.raises(NotFound):
        service_prices.withdraw_price(context, "tiny", later.valid_from + 1)
    assert service_prices.withdraw_price(context, "tiny", later.valid_from) == later
    assert service_prices.list_prices(context, "tiny") == [first]
