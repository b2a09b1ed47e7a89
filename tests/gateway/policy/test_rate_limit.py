"""The sliding minute: never more than the limit in any 60 s, never a token lost or made up."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.rate_limit import (
    CONCURRENCY_RETRY_S,
    WINDOW_S,
    KeyState,
    Refusal,
    Reservation,
    release,
    reserve,
    settle,
)
from gateway.types import Limits

UNLIMITED = Limits()


def take(state: KeyState, limits: Limits, tokens: int, now_s: float) -> Reservation:
    result = reserve(state, limits, tokens, now_s)
    assert isinstance(result, Reservation), result
    return result


def refuse(state: KeyState, limits: Limits, tokens: int, now_s: float) -> Refusal:
    result = reserve(state, limits, tokens, now_s)
    assert isinstance(result, Refusal), result
    return result


def test_requests_are_limited_and_come_back_after_a_minute() -> None:
    state, limits = KeyState(), Limits(requests_per_minute=2)
    for _ in range(2):
        take(state, limits, 5, 100.0)
    refusal = refuse(state, limits, 5, 110.0)
    assert (refusal.dimension, refusal.limit, refusal.used) == ("requests", 2, 2)
    assert refusal.wait_s is not None
    assert refuse(state, limits, 5, 110.0 + refusal.wait_s - 0.01).wait_s is not None
    take(state, limits, 5, 110.0 + refusal.wait_s)


def test_settling_gives_back_what_was_not_used() -> None:
    state, limits = KeyState(), Limits(tokens_per_minute=100)
    held = take(state, limits, 80, 10.0)
    assert refuse(state, limits, 30, 10.0).dimension == "tokens"
    settle(state, held, 20)
    take(state, limits, 80, 10.0)


def test_more_than_was_reserved_is_debt() -> None:
    state, limits = KeyState(), Limits(tokens_per_minute=100)
    settle(state, take(state, limits, 50, 10.0), 150)
    refusal = refuse(state, limits, 1, 11.0)
    assert refusal.used == 150
    assert refusal.wait_s is not None
    take(state, limits, 100, 11.0 + refusal.wait_s)


def test_a_release_leaves_no_trace() -> None:
    state, limits = KeyState(), Limits(1, 100, 1)
    release(state, take(state, limits, 100, 10.0))
    take(state, limits, 100, 10.0)


def test_a_late_refund_makes_nothing_out_of_nothing() -> None:
    """The bucket's fault: its refund after the refill would be a second helping."""
    state, limits = KeyState(), Limits(tokens_per_minute=100)
    held = take(state, limits, 100, 0.0)
    take(state, limits, 100, 61.0)
    settle(state, held, 0)
    assert refuse(state, limits, 1, 61.0).used == 100


def test_concurrency_counts_what_is_open() -> None:
    state, limits = KeyState(), Limits(max_concurrency=2)
    first = take(state, limits, 1, 0.0)
    take(state, limits, 1, 0.0)
    assert refuse(state, limits, 1, 1.0).wait_s == CONCURRENCY_RETRY_S
    settle(state, first, 1)
    take(state, limits, 1, 1.0)


def test_a_cost_over_the_limit_never_fits() -> None:
    state = KeyState()
    assert refuse(state, Limits(tokens_per_minute=10), 11, 0.0).wait_s is None


def test_the_longest_wait_is_named() -> None:
    state, limits = KeyState(), Limits(requests_per_minute=1, max_concurrency=1)
    take(state, limits, 1, 0.0)
    assert refuse(state, limits, 1, 0.0).dimension == "requests"


def test_a_limit_set_later_finds_the_counts() -> None:
    state = KeyState()
    take(state, UNLIMITED, 70, 0.0)
    assert refuse(state, Limits(tokens_per_minute=100), 40, 1.0).used == 70


def test_figures_for_headers() -> None:
    state, limits = KeyState(), Limits(tokens_per_minute=100)
    take(state, limits, 30, 0.25)
    figures = state.tokens.figures(100, 0.25)
    assert (figures.limit, figures.remaining) == (100, 70)
    assert figures.reset_s == pytest.approx(60.25)
    state.tokens.expire(0.25 + figures.reset_s)
    assert state.tokens.figures(100, 0.25 + figures.reset_s).remaining == 100


@dataclass
class Taken:
    """A reservation as the model of the test knows it."""

    at_s: float
    reservation: Reservation
    tokens: int
    is_open: bool = True


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "settle", "release"]),
        st.integers(0, 120),
        st.floats(0, 45),
        st.integers(0, 1_000_000),
    ),
    max_size=60,
)


@given(STEPS, st.integers(1, 6), st.integers(1, 300), st.integers(1, 4))
def test_never_over_the_limit_and_never_a_wrong_refund(
    steps: list[tuple[str, int, float, int]], rpm: int, tpm: int, concurrency: int
) -> None:
    state, limits = KeyState(), Limits(rpm, tpm, concurrency)
    now_s, taken, released = 1000.0, list[Taken](), list[Taken]()
    for action, tokens, pause_s, pick in steps:
        now_s += pause_s
        still_open = [t for t in taken if t.is_open]
        if action == "reserve":
            result = reserve(state, limits, tokens, now_s)
            if isinstance(result, Reservation):
                taken.append(Taken(now_s, result, tokens))
                recent = [t for t in taken if t.at_s > now_s - WINDOW_S]
                assert len(recent) <= rpm
                assert sum(t.tokens for t in recent) <= tpm
                assert len(still_open) < concurrency
            elif result.wait_s is not None and result.dimension != "concurrency":
                assert 0 < result.wait_s <= WINDOW_S + 1
        elif still_open:
            chosen = still_open[pick % len(still_open)]
            chosen.is_open = False
            if action == "settle":
                used = min(tokens, chosen.tokens)
                settle(state, chosen.reservation, used)
                chosen.tokens = used
            else:
                release(state, chosen.reservation)
                taken.remove(chosen)
                released.append(chosen)
        # What is counted lies between the last 60 s and the last 60.5 s of what was taken.
        state.requests.expire(now_s)
        state.tokens.expire(now_s)
        inner = [t for t in taken if t.at_s > now_s - WINDOW_S]
        outer = [t for t in taken if t.at_s > now_s - WINDOW_S - 0.5]
        assert len(inner) <= state.requests.total <= len(outer)
        assert sum(t.tokens for t in inner) <= state.tokens.total <= sum(t.tokens for t in outer)
        assert state.num_open == sum(t.is_open for t in taken)
        assert len(state.tokens.slots) <= 122


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0, 30)), max_size=30), st.integers(1, 100))
def test_waiting_as_told_is_enough_and_no_more(history: list[tuple[int, float]], cost: int) -> None:
    state, limits = KeyState(), Limits(tokens_per_minute=100)
    now_s = 0.0
    for tokens, pause_s in history:
        now_s += pause_s
        reserve(state, limits, tokens, now_s)
    result = reserve(state, limits, cost, now_s)
    if isinstance(result, Refusal):
        assert result.wait_s is not None
        if result.wait_s > 0.01:
            assert isinstance(reserve(state, limits, cost, now_s + result.wait_s - 0.01), Refusal)
        assert isinstance(reserve(state, limits, cost, now_s + result.wait_s), Reservation)


def test_an_idle_key_can_be_forgotten() -> None:
    state = KeyState()
    held = take(state, UNLIMITED, 1, 0.0)
    assert not state.is_idle(10.0)
    settle(state, held, 1)
    assert not state.is_idle(20.0)
    assert state.is_idle(100.0)


def test_an_open_request_keeps_a_key_busy() -> None:
    state = KeyState()
    take(state, UNLIMITED, 1, 0.0)
    assert not state.is_idle(1000.0)
