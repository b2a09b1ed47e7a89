"""When prices begin."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.service import prices as service_prices
from gateway.service.control import Control
from registry import catalog, plans, tenants
from registry.catalog import PackFacts
from registry.errors import InvalidValue
from registry.plans import PlanDiscount
from registry.prices import PriceRecord
from registry.session import make_engine, upgrade, writing

NOW = 1_000_000.0
FACTS = PackFacts("rev1", "rev1", "llama", "float32", 4096, 512, 1000)


@pytest.fixture
def now() -> list[float]:
    """The clock."""
    return [NOW]


@pytest.fixture
def control(tmp_path: Path, now: list[float]) -> Iterator[Control]:
    url = f"sqlite:///{tmp_path / 'polyhost.db'}"
    upgrade(url)
    engine = make_engine(url)
    with writing(engine, "test") as session:
        model = catalog.add_model(session, "tiny", "/m", now_at=0.0)
        catalog.finish(session, model.registration, FACTS, now_at=0.0)
        plans.create_plan(session, PlanDiscount("gold", 0.0, 0), now_at=0.0)
        tenants.create_tenant(session, "acme", now_at=0.0)
    yield Control(engine, tmp_path, "test", lambda: now[0])
    engine.dispose()


CHANGES: list[Callable[[Control], float]] = [
    lambda control: service_prices.set_price(control, PriceRecord("tiny", 0.0, 5)).valid_from,
    lambda control: service_prices.create_plan(control, "silver", 100).valid_from,
    lambda control: service_prices.set_plan_discount(control, "gold", 100).valid_from,
    lambda control: service_prices.set_plan_price(control, "gold", "tiny", None).valid_from,
    lambda control: service_prices.set_terms(control, "acme", "gold").valid_from,
]


@pytest.mark.parametrize("change", CHANGES)
def test_the_notice_counts_from_when_it_is_written(
    control: Control, now: list[float], change: Callable[[Control], float]
) -> None:
    """Whoever waits for other writers must not set a price that began while it waited."""
    began: list[float] = []
    waiting = threading.Thread(target=lambda: began.append(change(control)))
    with writing(control.engine, "test"):
        waiting.start()
        time.sleep(0.1)
        now[0] += 4.0
    waiting.join()
    notice_s = service_prices.NOTICE_POLLS * control.settings.key_cache_poll_s
    assert began == [NOW + 4.0 + notice_s]


@pytest.mark.parametrize("valid_from", [NOW - 1, NOW + 1.9, 1e12, math.inf, math.nan])
def test_dates_that_cannot_be_are_refused(control: Control, valid_from: float) -> None:
    with pytest.raises(InvalidValue, match="it must begin"):
        service_prices.set_price(control, PriceRecord("tiny", 0.0, 5), valid_from)
    assert service_prices.list_prices(control) == []
