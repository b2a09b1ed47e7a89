"""Sliding windows: never more than the limit in any of them, never a token lost or made up."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits.policy.rate_limit import (
    CONCURRENCY_RETRY_S,
    DAY_S,
    MINUTE_S,
    SLOTS,
    Count,
    Draw,
    Meter,
    Refusal,
    Taken,
    UsedAmounts,
    release,
    reserve,
    settle,
)


class Counts:
    """Requests, tokens and places of one key, as a store keeps them."""

    def __init__(self, window_s: int = MINUTE_S) -> None:
        self.window_s = window_s
        self.by_meter: dict[Meter, Count] = {
            "requests": Count(window_s),
            "tokens": Count(window_s),
            "concurrency": Count(0),
        }

    def draws(
        self, tokens: int, requests_limit: int = 0, tokens_limit: int = 0, places: int = 0
    ) -> list[Draw]:
        """Those of the limits that are not 0."""
        every = (
            Draw("requests", "requests", self.window_s, requests_limit, 1),
            Draw("tokens", "tokens", self.window_s, tokens_limit, tokens),
            Draw("places", "concurrency", 0, places, 1),
        )
        return [draw for draw in every if draw.limit]

    def reserve(self, draws: Sequence[Draw], now_s: float) -> tuple[Taken, ...] | Refusal:
        return reserve([self.by_meter[draw.meter] for draw in draws], draws, now_s)

    def take(self, draws: Sequence[Draw], now_s: float) -> tuple[Taken, ...]:
        result = self.reserve(draws, now_s)
        assert isinstance(result, tuple), result
        return result

    def refuse(self, draws: Sequence[Draw], now_s: float) -> Refusal:
        result = self.reserve(draws, now_s)
        assert isinstance(result, Refusal), result
        return result

    def settle(self, taken: Sequence[Taken], tokens: int) -> None:
        for one in taken:
            settle(self.by_meter[one.meter], one, UsedAmounts(tokens, 0))

    def release(self, taken: Sequence[Taken]) -> None:
        for one in taken:
            release(self.by_meter[one.meter], one)


@pytest.mark.parametrize("window_s", [MINUTE_S, DAY_S])
def test_requests_are_limited_and_come_back_after_the_window(window_s: int) -> None:
    counts = Counts(window_s)
    draws = counts.draws(5, requests_limit=2)
    for _ in range(2):
        counts.take(draws, 100.0)
    refusal = counts.refuse(draws, 110.0)
    assert (refusal.draw.meter, refusal.draw.limit, refusal.used) == ("requests", 2, 2)
    assert refusal.wait_s is not None
    assert window_s - 10 <= refusal.wait_s <= window_s * (1 + 1 / SLOTS)
    assert counts.refuse(draws, 110.0 + refusal.wait_s - 0.01).wait_s is not None
    counts.take(draws, 110.0 + refusal.wait_s)


def test_settling_gives_back_what_was_not_used() -> None:
    counts = Counts()
    held = counts.take(counts.draws(80, tokens_limit=100), 10.0)
    assert counts.refuse(counts.draws(30, tokens_limit=100), 10.0).draw.meter == "tokens"
    counts.settle(held, 20)
    counts.take(counts.draws(80, tokens_limit=100), 10.0)


def test_more_than_was_reserved_is_debt() -> None:
    counts = Counts()
    counts.settle(counts.take(counts.draws(50, tokens_limit=100), 10.0), 150)
    refusal = counts.refuse(counts.draws(1, tokens_limit=100), 11.0)
    assert refusal.used == 150
    assert refusal.wait_s is not None
    counts.take(counts.draws(100, tokens_limit=100), 11.0 + refusal.wait_s)


def test_a_release_leaves_no_trace() -> None:
    counts = Counts()
    draws = counts.draws(100, 1, 100, 1)
    counts.release(counts.take(draws, 10.0))
    counts.take(draws, 10.0)


def test_a_late_refund_makes_nothing_out_of_nothing() -> None:
    """The bucket's fault: its refund after the refill would be a second helping."""
    counts = Counts()
    held = counts.take(counts.draws(100, tokens_limit=100), 0.0)
    counts.take(counts.draws(100, tokens_limit=100), 61.0)
    counts.settle(held, 0)
    assert counts.refuse(counts.draws(1, tokens_limit=100), 61.0).used == 100


def test_concurrency_counts_what_is_open() -> None:
    counts = Counts()
    draws = counts.draws(1, places=2)
    first = counts.take(draws, 0.0)
    counts.take(draws, 0.0)
    assert counts.refuse(draws, 1.0).wait_s == CONCURRENCY_RETRY_S
    counts.settle(first, 1)
    counts.take(draws, 1.0)


def test_a_cost_over_the_limit_never_fits() -> None:
    counts = Counts()
    assert counts.refuse(counts.draws(11, tokens_limit=10), 0.0).wait_s is None


def test_what_takes_nothing_passes_a_limit_that_was_lowered() -> None:
    counts = Counts()
    counts.take(counts.draws(70, tokens_limit=1000), 0.0)
    counts.take(counts.draws(0, tokens_limit=50), 1.0)


def test_the_longest_wait_is_named() -> None:
    counts = Counts()
    draws = counts.draws(1, requests_limit=1, places=1)
    counts.take(draws, 0.0)
    assert counts.refuse(draws, 0.0).draw.meter == "requests"


def test_a_limit_that_is_lowered_finds_the_counts() -> None:
    counts = Counts()
    counts.take(counts.draws(70, tokens_limit=1000), 0.0)
    assert counts.refuse(counts.draws(40, tokens_limit=100), 1.0).used == 70


@pytest.mark.parametrize(
    ("meter", "used"), [("input_tokens", 3), ("output_tokens", 4), ("tokens", 7), ("requests", 1)]
)
def test_each_meter_keeps_what_it_counts(meter: Meter, used: int) -> None:
    count = Count(MINUTE_S)
    draw = Draw("n", meter, MINUTE_S, 100, UsedAmounts(10, 20).of(meter))
    taken = reserve([count], [draw], 0.0)
    assert isinstance(taken, tuple)
    settle(count, taken[0], UsedAmounts(3, 4))
    assert count.total == used


def test_figures_for_headers() -> None:
    count = Count(MINUTE_S)
    draw = Draw("n", "tokens", MINUTE_S, 100, 30)
    count.take(draw, 0.25)
    figures = count.figures(draw, 0.25)
    assert (figures.limit, figures.remaining) == (100, 70)
    assert figures.reset_s == pytest.approx(60.25)
    count.expire(0.25 + figures.reset_s)
    assert count.figures(draw, 0.25 + figures.reset_s).remaining == 100


@dataclass
class Held:
    """A reservation as the model of the test knows it."""

    at_s: float
    taken: tuple[Taken, ...]
    tokens: int
    is_open: bool = True


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "settle", "release"]),
        st.integers(0, 120),
        st.floats(0, 0.75),
        st.integers(0, 1_000_000),
    ),
    max_size=60,
)


@given(
    STEPS,
    st.integers(1, 6),
    st.integers(1, 300),
    st.integers(1, 4),
    st.sampled_from([MINUTE_S, DAY_S]),
)
def test_never_over_the_limit_and_never_a_wrong_refund(
    steps: list[tuple[str, int, float, int]],
    max_requests: int,
    max_tokens: int,
    places: int,
    window_s: int,
) -> None:
    counts, slot_s = Counts(window_s), window_s / SLOTS
    requests, in_tokens = counts.by_meter["requests"], counts.by_meter["tokens"]
    now_s, held = 1000.0, list[Held]()
    for action, tokens, pause, pick in steps:
        now_s += pause * window_s
        still_open = [h for h in held if h.is_open]
        if action == "reserve":
            result = counts.reserve(counts.draws(tokens, max_requests, max_tokens, places), now_s)
            if isinstance(result, tuple):
                held.append(Held(now_s, result, tokens))
                recent = [h for h in held if h.at_s > now_s - window_s]
                assert len(recent) <= max_requests
                assert sum(h.tokens for h in recent) <= max_tokens
                assert len(still_open) < places
            elif result.wait_s is not None and result.draw.meter != "concurrency":
                assert 0 < result.wait_s <= window_s + 2 * slot_s
        elif still_open:
            chosen = still_open[pick % len(still_open)]
            chosen.is_open = False
            if action == "settle":
                chosen.tokens = min(tokens, chosen.tokens)
                counts.settle(chosen.taken, chosen.tokens)
            else:
                counts.release(chosen.taken)
                held.remove(chosen)
        # What is counted lies between the last window and the last window and a slot.
        requests.expire(now_s)
        in_tokens.expire(now_s)
        inner = [h for h in held if h.at_s > now_s - window_s]
        outer = [h for h in held if h.at_s > now_s - window_s - slot_s]
        assert len(inner) <= requests.total <= len(outer)
        assert sum(h.tokens for h in inner) <= in_tokens.total <= sum(h.tokens for h in outer)
        assert counts.by_meter["concurrency"].total == sum(h.is_open for h in held)
        assert len(in_tokens.slots) <= SLOTS + 2


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0, 30)), max_size=30), st.integers(1, 100))
def test_waiting_as_told_is_enough_and_no_more(history: list[tuple[int, float]], cost: int) -> None:
    counts = Counts()
    now_s = 0.0
    for tokens, pause_s in history:
        now_s += pause_s
        counts.reserve(counts.draws(tokens, tokens_limit=100), now_s)
    draws = counts.draws(cost, tokens_limit=100)
    result = counts.reserve(draws, now_s)
    if isinstance(result, Refusal):
        assert result.wait_s is not None
        if result.wait_s > 0.01:
            counts.refuse(draws, now_s + result.wait_s - 0.01)
        counts.take(draws, now_s + result.wait_s)


def test_an_idle_count_can_be_forgotten() -> None:
    count, places = Count(MINUTE_S), Count(0)
    draws = [Draw("n", "tokens", MINUTE_S, 9, 1), Draw("p", "concurrency", 0, 9, 1)]
    taken = reserve([count, places], draws, 0.0)
    assert isinstance(taken, tuple)
    assert not count.is_idle(20.0)
    assert count.is_idle(100.0)
    assert not places.is_idle(1000.0)
    settle(places, taken[1], UsedAmounts(1, 0))
    assert places.is_idle(1000.0)
