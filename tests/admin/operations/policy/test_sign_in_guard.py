"""Who guesses waits longer and longer; who does not never waits."""

import pytest

from admin.operations.policy import sign_in_guard as guard

NONE = (0, 0.0)


def test_the_first_tries_are_free() -> None:
    assert guard.wait_s([(guard.PAIR.free - 1, 100.0), NONE, NONE], 100.0) == 0.0


@pytest.mark.parametrize(("beyond", "wait_s"), [(0, 15.0), (1, 30.0), (2, 60.0), (9, 900.0)])
def test_each_failure_beyond_doubles_the_wait(beyond: int, wait_s: float) -> None:
    assert guard.wait_s([(guard.PAIR.free + beyond, 100.0), NONE, NONE], 100.0) == wait_s
    assert guard.wait_s([(guard.PAIR.free + beyond, 100.0), NONE, NONE], 110.0) == wait_s - 10
    assert guard.wait_s([(guard.PAIR.free + beyond, 100.0), NONE, NONE], 100.0 + wait_s) == 0.0


def test_the_longest_wait_holds_and_a_name_alone_never_locks_out() -> None:
    many = (10_000, 50.0)
    assert guard.wait_s([NONE, many, NONE], 50.0) == guard.ADDRESS.max_s
    assert guard.wait_s([NONE, NONE, many], 50.0) == guard.NAME.max_s == 10.0


def test_rest_forgets() -> None:
    assert guard.wait_s([(1000, 0.0), (1000, 0.0), (1000, 0.0)], guard.FORGET_S) == 0.0


def test_a_clock_that_was_set_back_makes_nobody_wait_longer_than_the_most() -> None:
    assert guard.wait_s([(1000, 500.0), NONE, NONE], 100.0) == guard.PAIR.max_s


def test_codes_of_a_provider_wait_as_an_addresss_passwords_do_and_apart_from_them() -> None:
    for num_failed in (guard.ADDRESS.free - 1, guard.ADDRESS.free, guard.ADDRESS.free + 3, 10_000):
        of_password = guard.wait_s([NONE, (num_failed, 50.0), NONE], 60.0)
        assert guard.wait_s([(num_failed, 50.0)], 60.0, (guard.CODE,)) == of_password
    assert not set(guard.code_subjects("::1")) & set(guard.subjects("ann", "::1"))


def test_subjects_of_different_names_and_addresses_are_different() -> None:
    found = {guard.subjects(name, at) for name in ("a", "b") for at in ("1.2.3.4", "::1")}
    assert len(found) == 4


@pytest.mark.parametrize("address", ["192.0.2.7", "2001:db8:1:2::/64"])
@pytest.mark.parametrize("name", ["ann", "evil/64:ann", "a:b", "be/64:ann", ""])
def test_a_subject_says_whose_it_is_whatever_name_was_typed(address: str, name: str) -> None:
    found = [guard.parts_of(each) for each in guard.subjects(name, address)]
    assert found == [
        (guard.PAIR, address, name),
        (guard.ADDRESS, address, ""),
        (guard.NAME, "", name),
    ]
