"""Names of choices, and what they used together."""

import math

import pytest

from engine.protocol import Usage
from gateway.pricing.policy.pricing import micros
from gateway.workers.choices import MOST_S, base_id, choice_id, summed_usage


def test_the_prompt_counts_once_and_everything_else_adds_up() -> None:
    first = Usage(10, 0, 3, 0.5, 0.25, 0.125, 1.0)
    second = Usage(10, 8, 4, 1.0, 0.5, 0.25, 2.0)
    assert summed_usage([first, second]) == Usage(10, 0, 7, 1.5, 0.75, 0.375, 3.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, 1e305])
def test_what_is_no_time_counts_for_nothing_and_spoils_no_other_choice(bad: float) -> None:
    good = Usage(10, 0, 3, 0.5, 0.25, 0.125, 1.0)
    joint = summed_usage([good, Usage(10, 0, 3, bad, bad, bad, bad)])
    assert (joint.service_s, joint.device_s, joint.prefill_s, joint.load_s) == (0.5, 0.25, 0.125, 1)
    alone = summed_usage([Usage(10, 0, 3, bad, bad, bad, bad)])
    assert micros(alone.service_s) == micros(alone.load_s) == 0


def test_the_longest_time_that_counts_has_a_price() -> None:
    assert micros(summed_usage([Usage(1, 0, 1, MOST_S)]).service_s) == MOST_S * 1e6


def test_a_name_goes_back_to_its_request() -> None:
    assert choice_id("id", 0, 1) == "id"
    assert base_id(choice_id("id", 3, 4)) == base_id("id") == "id"
