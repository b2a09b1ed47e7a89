"""The pure decisions of continuous batching."""

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.policy.batching import (
    FEWEST_TOKENS,
    STRETCH,
    TARGET_S,
    Holding,
    ModelWork,
    Share,
    StepPace,
    arena_share,
    choose_model,
    choose_victim,
    lift,
    may_start,
    share_inputs,
    share_of,
    split_budget,
    split_time,
)

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=12)
FREE_FOR_ALL = Share(math.inf, contended=False)


def test_smallest_tag_runs_next_but_not_before_the_minimum_run() -> None:
    work = [ModelWork("a", 5.0), ModelWork("b", 1.0)]
    assert choose_model(work, "a", 2, 4) == "a"
    assert choose_model(work, "a", 4, 4) == "b"
    assert choose_model(work[1:], "a", 2, 4) == "b"
    assert choose_model([], "a", 2, 4) is None


def test_idle_models_earn_no_credit() -> None:
    assert lift(1.0, [4.0, 9.0]) == 4.0
    assert lift(6.0, [4.0]) == 6.0
    assert lift(1.0, []) == 1.0


@given(st.lists(st.integers(1, 600), max_size=40), st.integers(1, 512))
def test_budget_is_kept_and_decodes_come_first(uncomputed: list[int], budget: int) -> None:
    granted = split_budget(uncomputed, budget)
    assert sum(granted) == min(budget, sum(uncomputed))
    assert all(0 <= g <= u for g, u in zip(granted, uncomputed, strict=True))
    decodes = sum(1 for u in uncomputed if u == 1)
    served = sum(g for g, u in zip(granted, uncomputed, strict=True) if u == 1)
    assert served == min(decodes, budget)


@given(
    st.floats(1e-6, 10.0),
    st.lists(st.tuples(st.integers(1, 512), st.integers(1, 8192)), min_size=1, max_size=64),
)
def test_charges_add_up_to_the_step(step_s: float, rows: list[tuple[int, int]]) -> None:
    shares = split_time(step_s, rows)
    assert math.isclose(sum(shares), step_s, rel_tol=1e-9)
    assert all(share > 0 for share in shares)


def test_a_turn_is_cut_short_for_a_first_token_of_who_has_had_no_more() -> None:
    def chosen(urgent: bool, tag: float) -> str | None:
        work = [ModelWork("runs", 5.0), ModelWork("waits", tag, urgent)]
        return choose_model(work, "runs", 1, 4)

    assert chosen(urgent=True, tag=5.0 - 1e-9) == "waits"
    assert chosen(urgent=False, tag=1.0) == "runs"
    assert chosen(urgent=True, tag=6.0) == "runs"


def test_prompts_of_a_smaller_rank_come_first_and_decodes_before_all() -> None:
    assert split_budget([40, 1, 30, 20], 60, [9, 9, 1, 1]) == [9, 1, 30, 20]
    assert split_budget([40, 1, 30, 20], 60) == [40, 1, 19, 0]


def test_memory_is_charged_by_positions_and_a_window_keeps_no_more_than_it() -> None:
    assert arena_share([(0.5, float("inf"))], 40, 100) == pytest.approx(0.2)
    assert arena_share([(0.5, float("inf")), (0.25, 16.0)], 40, 100) == pytest.approx(0.24)
    assert arena_share([], 40, 100) == 0.0


def test_prompts_of_heavy_tenants_take_what_others_leave_of_a_step() -> None:
    ranks, tokens = [9, 9, 1, 9], [400, 1, 30, 400]
    assert split_budget(tokens, 600, ranks, 5.0, 100) == [70, 1, 30, 0]
    assert split_budget(tokens, 600, ranks) == [400, 1, 30, 169]
    assert split_budget([400, 1, 300, 400], 600, ranks, 5.0, 100) == [25, 1, 300, 0]
    assert split_budget([400, 1, 598, 400], 600, ranks, 5.0, 100) == [1, 1, 598, 0]


@given(
    st.lists(st.tuples(st.integers(1, 600), st.integers(1, 9)), max_size=40),
    st.integers(1, 512),
    st.integers(1, 512),
)
def test_heavy_tenants_take_no_more_than_they_may_and_never_nothing(
    rows: list[tuple[int, int]], budget: int, heavy_tokens: int
) -> None:
    uncomputed, ranks = [n for n, _ in rows], [rank for _, rank in rows]
    granted = split_budget(uncomputed, budget, ranks, 5.0, heavy_tokens)
    assert sum(granted) <= budget
    assert all(0 <= g <= u for g, u in zip(granted, uncomputed, strict=True))
    heavy = [g for g, u, rank in zip(granted, uncomputed, ranks, strict=True) if u > 1 and rank > 4]
    assert sum(heavy) <= heavy_tokens
    if heavy and sum(granted) < budget:
        assert sum(heavy) > 0


def run_to_end(requests: list[list[int]], max_tokens: int) -> list[int]:
    """Steps until each has ended; checks every step."""
    ends = [list(accumulate(lengths)) for lengths in requests]
    done, ended = [0] * len(requests), [0] * len(requests)
    step = 0
    while alive := [i for i in range(len(requests)) if done[i] < ends[i][-1]]:
        step += 1
        granted = share_inputs([(ends[i], done[i]) for i in alive], max_tokens)
        assert granted[0] > 0, "the oldest does not get on"
        assert sum(granted) <= max_tokens or granted == [granted[0]] + [0] * (len(alive) - 1)
        for i, tokens in zip(alive, granted, strict=True):
            done[i] += tokens
            assert done[i] == 0 or done[i] in ends[i], "an input was cut"
            if done[i] == ends[i][-1]:
                ended[i] = step
    return ended


@given(st.lists(LENGTHS, min_size=1, max_size=8), st.integers(1, 200))
def test_every_request_ends(requests: list[list[int]], max_tokens: int) -> None:
    assert all(run_to_end(requests, max_tokens))


@given(st.lists(LENGTHS, min_size=1, max_size=8), st.integers(60, 200))
def test_the_budget_is_used_while_inputs_fit(requests: list[list[int]], max_tokens: int) -> None:
    state = [(list(accumulate(lengths)), 0) for lengths in requests]
    granted = share_inputs(state, max_tokens)
    left = max_tokens - sum(granted)
    for (ends, _), tokens in zip(state, granted, strict=True):
        following = [end for end in ends if end > tokens]
        assert not following or following[0] - tokens > left


def test_a_query_does_not_wait_for_thousands_before_it() -> None:
    large, query = [20] * 2000, [20]
    assert run_to_end([large, query], 512)[1] == 1
    assert run_to_end([large] * 5 + [query], 512)[5] == 1


def test_an_input_longer_than_the_budget_goes_alone() -> None:
    assert share_inputs([([900], 0), ([5, 10], 5)], 512) == [900, 0]
    assert share_inputs([], 512) == []


def test_a_tenant_alone_may_take_everything() -> None:
    share = share_of(100, 0.5, num_tenants=1)
    assert may_start({"a": 90.0}, "a", 50.0, share)


def test_beside_others_a_tenant_stays_within_its_share_but_for_one_request() -> None:
    share = share_of(100, 0.5, num_tenants=2)
    assert may_start({"a": 30.0}, "a", 20.0, share)
    assert not may_start({"a": 30.0}, "a", 21.0, share)
    assert may_start({"b": 30.0}, "a", 99.0, share)  # its first, however large
    assert may_start({"a": 99.0}, "a", 99.0, share_of(100, 1.0, num_tenants=2))


def test_who_is_above_its_share_goes_first_but_never_its_oldest() -> None:
    share = share_of(100, 0.5, num_tenants=2)
    holdings = [Holding("a", 1), Holding("a", 2), Holding("b", 3)]
    assert choose_victim(holdings, {"a": 60.0, "b": 10.0}, share) == 1
    assert choose_victim(holdings, {"a": 40.0, "b": 10.0}, share) == 2
    assert choose_victim(holdings, {}, FREE_FOR_ALL) == 2
    assert choose_victim([Holding("a", 1), Holding("b", 2)], {"a": 90.0, "b": 5.0}, share) == 1
    assert choose_victim([Holding("a", 1)], {"a": 90.0}, share) == 0


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=12),
    st.lists(st.floats(0, 200), min_size=3, max_size=3),
    st.floats(0.05, 1.0),
)
def test_the_oldest_of_all_is_only_chosen_when_it_is_alone(
    tenants: list[str], pages: list[float], part: float
) -> None:
    holdings = [Holding(tenant, order) for order, tenant in enumerate(tenants)]
    held = dict(zip("abc", pages, strict=True))
    chosen = choose_victim(holdings, held, share_of(100, part, len(set(tenants))))
    assert chosen != 0 or len(holdings) == 1


def settle(
    pace: StepPace, step_s: float, token_s: float, num_decodes: int = 10
) -> tuple[int, float]:
    """Steps of prompts as large as they may be, of a device with a fixed part: the last one."""
    tokens, last_s = 0, 0.0
    for _ in range(60):
        tokens = pace.heavy_tokens(num_decodes, 1000)
        last_s = step_s + token_s * (tokens + num_decodes)
        pace.observe(last_s, tokens + num_decodes, tokens)
    return tokens, last_s


def test_before_anything_is_known_a_step_is_whole() -> None:
    assert StepPace().heavy_tokens(10, 1000) == 1000


@pytest.mark.parametrize(("step_s", "token_s"), [(0.0, 1e-4), (0.005, 1e-4), (0.015, 2e-5)])
def test_a_step_lasts_as_long_as_it_should(step_s: float, token_s: float) -> None:
    _, last_s = settle(StepPace(), step_s, token_s)
    assert last_s == pytest.approx(TARGET_S, rel=0.05)


def test_beside_slow_decodes_a_step_may_be_longer_than_they_are() -> None:
    pace = StepPace()
    pace.observe(0.08, 10, 0)
    _, last_s = settle(pace, 0.0, 5e-4)
    assert last_s == pytest.approx(STRETCH * 0.08, rel=0.05)


def test_heavy_tenants_go_on_however_slow_the_device_is() -> None:
    tokens, _ = settle(StepPace(), 0.0, 1.0)
    assert tokens == FEWEST_TOKENS


def test_steps_that_were_nearly_empty_tell_nothing() -> None:
    pace = StepPace()
    before, _ = settle(pace, 0.0, 1e-4)
    for _ in range(50):
        pace.observe(0.01, 12, 2)  # dear for what is in it: all of it is the fixed part
    assert pace.heavy_tokens(10, 1000) == before


@pytest.mark.parametrize("bad_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_of_no_time_tells_nothing(bad_s: float) -> None:
    """A device whose clock stands once must not end its worker."""
    pace = StepPace()
    pace.observe(bad_s, 100, 90)
    pace.observe(bad_s, 10, 0)
    assert pace.heavy_tokens(10, 1000) == 1000
    before, _ = settle(pace, 0.0, 1e-4)
    pace.observe(bad_s, before + 10, before)
    assert pace.heavy_tokens(10, 1000) == before
