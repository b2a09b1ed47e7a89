"""What is remembered of models: rates, what is fetched ahead of need, crashes of workers."""

import math
from collections.abc import Callable

import pytest

from gateway.dispatch.policy.fleet_view import Demand, ModelView, WorkerView
from gateway.dispatch.policy.model_history import (
    FAST_HALF_LIFE_S,
    FIRST_TERM_S,
    KV_RESERVE_SHARE,
    LONGEST_TERM_S,
    MOMENT_S,
    PREFETCH_PAUSE_S,
    SLOW_HALF_LIFE_S,
    Popularity,
    Prefetcher,
    Quarantine,
)

MB = 1 << 20


def asked(model_id: str, num: int, service_s: float = 1.0, now_s: float = 0.0) -> Popularity:
    popularity = Popularity()
    ask(popularity, model_id, num, service_s, now_s)
    return popularity


def ask(
    popularity: Popularity, model_id: str, num: int, service_s: float = 1.0, now_s: float = 0.0
) -> None:
    for _ in range(num):
        popularity.asked(model_id, service_s, now_s)


def hosted(*names: str, mb: int = 10) -> list[Demand]:
    return [Demand(name, 0, 0.0, False, mb * MB) for name in names]


def view(name: str, free_mb: int, **states: str) -> WorkerView:
    models = {m: ModelView(state, 10 * MB, 1.0, True) for m, state in states.items()}
    return WorkerView(name, free_mb * MB, 100 * MB, models, cold_bytes_per_s=MB)


def test_a_burst_is_seen_at_once_and_forgotten_soon() -> None:
    popularity = asked("a", 15)
    rate = popularity.asks_s("a", 0.0)
    assert rate == pytest.approx(15 * math.log(2) / FAST_HALF_LIFE_S)
    assert popularity.asks_s("a", FAST_HALF_LIFE_S) == pytest.approx(rate / 2)
    late_s = 10 * FAST_HALF_LIFE_S  # what is left is the slow rate's
    slow = 15 * math.log(2) / SLOW_HALF_LIFE_S * 2 ** -(late_s / SLOW_HALF_LIFE_S)
    assert popularity.asks_s("a", late_s) == pytest.approx(slow)


def test_a_steady_rate_is_what_it_is() -> None:
    popularity = Popularity()
    for second in range(1000):
        popularity.asked("a", 0.25, float(second))
    assert popularity.asks_s("a", 999.0) == pytest.approx(1.0, rel=0.03)
    assert popularity.service_rate("a", 999.0) == pytest.approx(0.25, rel=0.03)
    assert popularity.asks_s("b", 999.0) == 0.0


def test_models_that_are_gone_are_forgotten() -> None:
    popularity = asked("a", 5)
    ask(popularity, "b", 5)
    popularity.keep_models({"b"})
    assert set(popularity.known()) == {"b"}


def test_the_model_with_most_service_to_come_is_fetched_to_free_pages() -> None:
    popularity = asked("pings", 100, 0.001)
    ask(popularity, "work", 10, 1.0)
    found = Prefetcher().decide(0.0, popularity, hosted("pings", "work"), [view("w", 90)])
    assert [(p.model_id, p.tier) for p in found] == [("work", "device"), ("pings", "host")]


def test_a_reserve_is_left_to_kv_and_a_second_copy_is_not_fetched() -> None:
    popularity = asked("a", 10)
    just = int(100 * KV_RESERVE_SHARE) + 10
    assert Prefetcher().decide(0.0, popularity, hosted("a"), [view("w", just)])[0].tier == "device"
    tight = Prefetcher().decide(0.0, popularity, hosted("a"), [view("w", just - 1)])
    assert [p.tier for p in tight] == ["host"]
    assert not Prefetcher().decide(0.0, popularity, hosted("a"), [view("w", just - 1, a="warm")])
    elsewhere = [view("v", 0, a="resident"), view("w", 90)]
    assert not Prefetcher().decide(0.0, popularity, hosted("a"), elsewhere)
    both = Prefetcher().decide(0.0, popularity, hosted("a"), [view("v", 90), view("w", 90)])
    assert [(p.worker_id, p.tier) for p in both] == [("v", "device")]


def test_nothing_is_fetched_where_something_moves_or_for_who_is_hardly_asked_for() -> None:
    popularity = asked("a", 10)
    assert not Prefetcher().decide(0.0, popularity, hosted("a"), [view("w", 90, b="draining")])
    seldom = asked("a", 10)
    late_s = 8 * SLOW_HALF_LIFE_S
    assert not Prefetcher().decide(late_s, seldom, hosted("a"), [view("w", 90)])


def test_what_a_worker_did_not_take_is_not_asked_for_again_at_once() -> None:
    prefetcher, popularity = Prefetcher(), asked("a", 30)
    workers = [view("w", 90)]
    assert prefetcher.decide(0.0, popularity, hosted("a"), workers)
    assert not prefetcher.decide(PREFETCH_PAUSE_S - 1, popularity, hosted("a"), workers)
    assert prefetcher.decide(PREFETCH_PAUSE_S, popularity, hosted("a"), workers)


KEY = ("m", "r1")


def test_two_deaths_in_a_row_are_a_term_that_ends() -> None:
    quarantine = Quarantine()
    assert quarantine.worker_died([KEY, KEY], "killed", "w", 10.0) == []
    assert quarantine.worker_died([KEY, ("n", "r1")], "killed", "w", 20.0) == ["m"]
    assert quarantine.reason("n", "r1", 20.0) is None
    reason = quarantine.reason(*KEY, 20.0)
    assert reason is not None
    assert "killed" in reason
    assert quarantine.reasons(20.0) == {"m": reason}
    assert quarantine.reason(*KEY, 20.0 + FIRST_TERM_S) is None
    assert quarantine.reasons(20.0 + FIRST_TERM_S) == {}
    assert quarantine.reason("m", "r2", 20.0) is None


def test_one_more_death_after_a_term_is_a_term_twice_as_long_up_to_a_bound() -> None:
    quarantine = Quarantine()
    now_s = 0.0
    quarantine.worker_died([KEY], "", "w", now_s)
    for number in range(12):
        assert quarantine.worker_died([KEY], "", "w", now_s) == ["m"]
        term_s = min(LONGEST_TERM_S, FIRST_TERM_S * 2**number)
        assert quarantine.reason(*KEY, now_s + term_s - 1) is not None
        now_s += term_s
        assert quarantine.reason(*KEY, now_s) is None


def test_work_that_ended_between_two_deaths_clears_the_first() -> None:
    quarantine = Quarantine()
    quarantine.worker_died([KEY], "", "w", 0.0)
    quarantine.served(*KEY)
    assert quarantine.worker_died([KEY], "", "w", 1.0) == []


def test_requests_that_were_still_running_add_no_second_term() -> None:
    quarantine = Quarantine()
    quarantine.worker_died([KEY], "", "w", 0.0)
    assert quarantine.worker_died([KEY], "", "w", 1.0) == ["m"]
    assert quarantine.worker_died([KEY], "", "w", 2.0) == []


def test_an_operator_or_a_new_revision_ends_it_at_once() -> None:
    ends: list[Callable[[Quarantine], object]] = [
        lambda q: q.clear("m"),
        lambda q: q.keep([("m", "r2")]),
    ]
    for end in ends:
        quarantine = Quarantine()
        quarantine.worker_died([KEY], "", "w", 0.0)
        quarantine.worker_died([KEY], "", "w", 0.0)
        end(quarantine)
        assert quarantine.reason(*KEY, 0.0) is None
        assert quarantine.worker_died([KEY], "", "w", 0.0) == []


def test_two_workers_of_one_machine_that_die_together_are_one_strike() -> None:
    quarantine = Quarantine()
    quarantine.worker_died([KEY], "killed", "one/0", 10.0)
    assert quarantine.worker_died([KEY], "killed", "one/1", 10.0 + MOMENT_S / 2) == []
    assert quarantine.worker_died([KEY], "killed", "two/0", 11.0) == ["m"]


@pytest.mark.parametrize(
    ("worker_id", "later_s"), [("one/1", MOMENT_S), ("one/0", 0.1), ("other/1", 0.1)]
)
def test_others_are_strikes_of_their_own(worker_id: str, later_s: float) -> None:
    """Later on that machine, the same worker once more, another machine."""
    quarantine = Quarantine()
    quarantine.worker_died([KEY], "killed", "one/0", 10.0)
    assert quarantine.worker_died([KEY], "killed", worker_id, 10.0 + later_s) == ["m"]


def test_a_request_that_kills_one_worker_after_the_other_counts_each_time() -> None:
    quarantine = Quarantine()
    quarantine.worker_died([KEY], "killed", "worker-0", 10.0)
    assert quarantine.worker_died([KEY], "killed", "worker-1", 10.3, again=()) == []
    assert quarantine.worker_died([KEY], "killed", "worker-2", 10.6, again={KEY}) == ["m"]
