"""The pure decisions of continuous batching."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.policy.batching import (
    ModelWork,
    arena_share,
    choose_model,
    lift,
    split_budget,
    split_time,
)


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


def test_prompts_of_a_crowd_take_what_others_leave_of_a_step() -> None:
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
def test_a_crowd_takes_no_more_than_it_may_and_never_nothing(
    rows: list[tuple[int, int]], budget: int, crowd_tokens: int
) -> None:
    uncomputed, ranks = [n for n, _ in rows], [rank for _, rank in rows]
    granted = split_budget(uncomputed, budget, ranks, 5.0, crowd_tokens)
    assert sum(granted) <= budget
    assert all(0 <= g <= u for g, u in zip(granted, uncomputed, strict=True))
    crowd = [g for g, u, rank in zip(granted, uncomputed, ranks, strict=True) if u > 1 and rank > 4]
    assert sum(crowd) <= crowd_tokens
    if crowd and sum(granted) < budget:
        assert sum(crowd) > 0
