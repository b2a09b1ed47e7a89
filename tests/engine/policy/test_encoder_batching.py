"""Whole inputs, shared out: nobody starves, nobody waits for all of another's."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from engine.policy.encoder_batching import share_inputs

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=12)


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
