"""Roles and verbs: a table, held to what it is for."""

import pytest

from admin.context.policy.permissions import (
    EVERYWHERE,
    IN_TENANT,
    INSTALLATION,
    OPERATING_SYSTEM,
    VERBS,
    Verb,
    allowed,
    tenants_allowed,
)
from registry.accounts import users

WRITES: tuple[Verb, ...] = ("tenants.write", "limits.write", "prices.write", "models.write")


def test_every_role_is_in_both_tables() -> None:
    assert set(EVERYWHERE) == set(IN_TENANT) == set(users.ROLES)
    assert users.INSTALLATION == INSTALLATION


@pytest.mark.parametrize("table", [EVERYWHERE, IN_TENANT])
def test_each_role_may_all_that_the_next_may(table: dict[str, frozenset[str]]) -> None:
    assert table["owner"] > table["admin"] > table["viewer"]
    assert table["owner"] <= VERBS
    assert all(verb.endswith(".read") for verb in table["viewer"])


def test_a_role_in_a_tenant_is_less_than_the_same_everywhere() -> None:
    for role, verbs in IN_TENANT.items():
        assert verbs < EVERYWHERE[role]


@pytest.mark.parametrize("verb", WRITES)
def test_a_tenant_never_sets_what_it_is_given(verb: Verb) -> None:
    assert not any(allowed({"ten_1": role}, verb, "ten_1") for role in users.ROLES)


def test_a_role_in_a_tenant_is_for_that_tenant() -> None:
    grants = {"ten_1": "admin", "ten_2": "viewer"}
    assert allowed(grants, "keys.write", "ten_1")
    assert not allowed(grants, "keys.write", "ten_2")
    assert not allowed(grants, "keys.write", "ten_3")
    assert not allowed(grants, "keys.write")
    assert tenants_allowed(grants, "keys.write") == frozenset({"ten_1"})
    assert tenants_allowed(grants, "keys.read") == frozenset({"ten_1", "ten_2"})
    assert tenants_allowed({INSTALLATION: "viewer"}, "keys.read") is None
    assert tenants_allowed({INSTALLATION: "viewer", "ten_1": "admin"}, "keys.write") == frozenset(
        {"ten_1"}
    )


def test_nobody_may_nothing_and_the_operating_system_everything() -> None:
    verb: Verb
    for verb in sorted(VERBS):  # type: ignore[assignment]
        assert not allowed({}, verb)
        assert not allowed({}, verb, "ten_1")
        assert not allowed({"ten_1": "king", INSTALLATION: "king"}, verb, "ten_1")
        assert allowed(OPERATING_SYSTEM, verb)
        assert allowed(OPERATING_SYSTEM, verb, "ten_1")
