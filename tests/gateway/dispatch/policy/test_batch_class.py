"""Class batch: when its time runs out, and where its load pays."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch.policy.batch_class import (
    LOAD_SHARE,
    WAIT_WORTH,
    Window,
    is_pressed,
    load_pays,
    worker_for,
)
from gateway.dispatch.policy.fleet_view import Demand, ModelView, WorkerView, nobody_asks
from registry.accounts.tenants import BATCH_FACTOR

SHARE = 0.25
TIMES = st.floats(0.0, 1e5)


def test_a_waiting_second_is_worth_the_weight_of_the_class() -> None:
    assert WAIT_WORTH == BATCH_FACTOR


@given(began_s=TIMES, length_s=st.floats(1.0, 1e5), now_s=TIMES, left_s=TIMES, more_s=TIMES)
def test_pressure_never_falls_as_time_passes_or_work_is_added(
    began_s: float, length_s: float, now_s: float, left_s: float, more_s: float
) -> None:
    window = Window(began_s, began_s + length_s)
    if is_pressed(window, now_s, left_s):
        assert is_pressed(window, now_s + more_s, left_s)
        assert is_pressed(window, now_s, left_s + more_s)
    assert is_pressed(window, window.ends_s, 0.0)


def test_pressure_begins_where_the_end_falls_into_the_last_fifth() -> None:
    day = Window(100.0, 100.0 + 86_400.0)
    assert not is_pressed(day, 100.0, 0.0)
    assert not is_pressed(day, 100.0 + 0.79 * 86_400.0, 0.0)
    assert is_pressed(day, 100.0 + 0.80 * 86_400.0, 1.0)
    assert is_pressed(day, 100.0, 0.81 * 86_400.0)  # so much is left


def demand(waited_s: float = 0.0, backlog_s: float = 0.0, oldest_s: float = 0.0) -> Demand:
    """`n`, 60 bytes."""
    return Demand("n", 1, backlog_s, False, 60, oldest_s, waited_s)


def worker(name: str = "w", free_bytes: int = 0, **models: ModelView) -> WorkerView:
    """100 bytes; a load of what is cold takes as many seconds as it has tens of bytes."""
    return WorkerView(name, free_bytes, 100, models, cold_bytes_per_s=10.0)


def test_a_load_pays_by_the_work_behind_it_or_by_what_has_been_waited() -> None:
    assert not load_pays(demand(19.9 * 6, 4.9 * 6), 6.0)
    assert load_pays(demand(0.0, 6.0 / LOAD_SHARE), 6.0)
    assert load_pays(demand(6.0 / WAIT_WORTH, 0.0), 6.0)


IDLE = ModelView("resident", 60, 6.0, idle=True, held_bytes=60)
PAID = demand(1e4, 1e4)


@pytest.mark.parametrize(
    ("view", "wanted", "asks_s", "found"),
    [
        (worker(free_bytes=60), (), 0.0, True),
        (worker(m=IDLE), (), 0.0, True),
        (worker(m=IDLE), ("m",), 0.0, False),  # somebody waits for it
        (worker(m=IDLE._replace(idle=False)), (), 0.0, False),  # it runs something
        (worker(m=IDLE), (), 0.1, False),  # it is asked for too often
        (worker(m=IDLE._replace(pinned=True)), (), 0.0, False),
        (worker(free_bytes=60, o=ModelView("loading", 9, 1.0, idle=False)), (), 0.0, False),
        (replace(worker(free_bytes=60), kv_short=True), (), 0.0, False),
    ],
)
def test_nothing_in_demand_leaves_for_it(
    view: WorkerView, wanted: tuple[str, ...], asks_s: float, found: bool
) -> None:
    rate = nobody_asks if not asks_s else lambda model_id, /: asks_s
    assert (worker_for(PAID, [view], wanted, rate, SHARE, 1e5) is not None) == found
    assert worker_for(demand(), [view], wanted, rate, SHARE, 1e5) is None  # nothing pays


def test_models_of_the_class_take_turns_of_twenty_times_both_loads() -> None:
    view = worker(m=IDLE._replace(runs_batch=True))
    until_s = (6.0 + 6.0) / WAIT_WORTH
    assert worker_for(PAID, [view], (), nobody_asks, SHARE, until_s - 1.0) is None
    assert worker_for(PAID, [view], (), nobody_asks, SHARE, until_s + 1.0) is view


def test_the_best_place() -> None:
    warm = worker("a", 70, n=ModelView("warm", 60, 1.0, idle=False))
    views = [worker("b", 60), worker("c", 90), worker("d", 0, m=IDLE), warm]
    assert worker_for(PAID, views, (), nobody_asks, SHARE, 0.0) is warm
    assert worker_for(PAID, views[:3], (), nobody_asks, SHARE, 0.0) is views[1]
