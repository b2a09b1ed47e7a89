"""How long a model is not asked after a request that made its files take too much."""

import pytest

from gateway.text.offences import EVERYBODY, FIRST_S, FORGET_S, LONGEST_S, Offences


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_tenant_waits_longer_each_time_and_others_do_not() -> None:
    clock = Clock()
    offences = Offences(clock)
    assert offences.pause("m", "a") == (0.0, "")
    for times in range(12):
        pause_s = min(LONGEST_S, FIRST_S * 2**times)
        assert offences.add("m", "a", "it loops") == pause_s
        assert offences.pause("m", "a") == (pause_s, "it loops")
        assert offences.pause("m", "b")[0] == 0
        assert offences.pause("other", "a")[0] == 0
        clock.now_s += pause_s
        assert offences.pause("m", "a")[0] == 0
    clock.now_s += FORGET_S
    assert offences.add("m", "a", "again") == FIRST_S


def test_three_tenants_show_that_it_is_the_model() -> None:
    clock = Clock()
    offences = Offences(clock)
    offences.add("m", "a", "x")
    offences.add("m", "b", "x")
    assert offences.pause("m", "d")[0] == 0
    offences.add("m", "c", "x")
    assert offences.pause("m", "d") == (FIRST_S, "x")
    assert offences.is_known("m")
    assert not offences.is_known("n")


def test_files_that_cannot_be_read_are_nobodys_fault_but_the_models() -> None:
    offences = Offences(Clock())
    assert offences.add("m", EVERYBODY, "x") == FIRST_S
    assert offences.pause("m", "anybody")[0] == FIRST_S


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.text.offences.MAX_KEPT", 10)
    offences = Offences(Clock())
    for n in range(30):
        offences.add(f"m{n}", "a", "x")
    assert [offences.is_known(f"m{n}") for n in (0, 19, 20, 29)] == [False, False, True, True]
