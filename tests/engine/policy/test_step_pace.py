"""A crowd's share of a step: as long as steps may be, by what steps have taken."""

import pytest

from engine.policy.step_pace import FEWEST_TOKENS, STRETCH, TARGET_S, StepPace


def settle(
    pace: StepPace, step_s: float, token_s: float, num_decodes: int = 10
) -> tuple[int, float]:
    """Steps of prompts as large as they may be, of a device with a fixed part: the last one."""
    tokens, last_s = 0, 0.0
    for _ in range(60):
        tokens = pace.crowd_tokens(num_decodes, 1000)
        last_s = step_s + token_s * (tokens + num_decodes)
        pace.observe(last_s, tokens + num_decodes, tokens)
    return tokens, last_s


def test_before_anything_is_known_a_step_is_whole() -> None:
    assert StepPace().crowd_tokens(10, 1000) == 1000


@pytest.mark.parametrize(("step_s", "token_s"), [(0.0, 1e-4), (0.005, 1e-4), (0.015, 2e-5)])
def test_a_step_lasts_as_long_as_it_should(step_s: float, token_s: float) -> None:
    _, last_s = settle(StepPace(), step_s, token_s)
    assert last_s == pytest.approx(TARGET_S, rel=0.05)


def test_beside_slow_decodes_a_step_may_be_longer_than_they_are() -> None:
    pace = StepPace()
    pace.observe(0.08, 10, 0)
    _, last_s = settle(pace, 0.0, 5e-4)
    assert last_s == pytest.approx(STRETCH * 0.08, rel=0.05)


def test_a_crowd_goes_on_however_slow_the_device_is() -> None:
    tokens, _ = settle(StepPace(), 0.0, 1.0)
    assert tokens == FEWEST_TOKENS


def test_steps_that_were_nearly_empty_tell_nothing() -> None:
    pace = StepPace()
    before, _ = settle(pace, 0.0, 1e-4)
    for _ in range(50):
        pace.observe(0.01, 12, 2)  # dear for what is in it: all of it is the fixed part
    assert pace.crowd_tokens(10, 1000) == before


@pytest.mark.parametrize("bad_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_of_no_time_tells_nothing(bad_s: float) -> None:
    """A device whose clock stands once must not end its worker."""
    pace = StepPace()
    pace.observe(bad_s, 100, 90)
    pace.observe(bad_s, 10, 0)
    assert pace.crowd_tokens(10, 1000) == 1000
    before, _ = settle(pace, 0.0, 1e-4)
    pace.observe(bad_s, before + 10, before)
    assert pace.crowd_tokens(10, 1000) == before
