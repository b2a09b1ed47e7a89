"""Users: roles, passwords, the last owner, sessions."""

from collections.abc import Callable

import pytest
from argon2 import PasswordHasher, extract_parameters
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from registry import audit
from registry.accounts import tenants, user_sessions, users
from registry.accounts.users import INSTALLATION
from registry.errors import AlreadyExists, IllegalTransition, InvalidValue, NotFound
from registry.schema import metadata
from registry.session import reading, writing

NOW = 1_000_000.0
SECRET = "correct horse"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests that cost little; `test_digests_are_slow` looks at the real ones."""
    quick = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    monkeypatch.setattr(users, "PasswordHasher", lambda: quick)


@pytest.fixture
def owned(engine: Engine) -> Engine:
    """An owner `ann` and the tenants `acme` and `crowd`."""
    with writing(engine, "test") as session:
        users.create_user(session, "ann", SECRET, "owner", now_at=NOW)
        tenants.create_tenant(session, "acme", now_at=NOW)
        tenants.create_tenant(session, "crowd", now_at=NOW)
    return engine


def test_digests_are_slow_and_salted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    stored = users.hash_password(SECRET)
    assert stored != users.hash_password(SECRET)
    parameters = extract_parameters(stored)
    assert parameters.memory_cost >= 64 * 1024
    assert parameters == extract_parameters(users.NOBODY)
    assert users.verify_password(stored, SECRET)
    assert not users.verify_password(stored, SECRET + "x")
    assert not users.verify_password(users.NOBODY, SECRET)
    assert not users.verify_password("", SECRET)


@pytest.mark.parametrize("password", ["", "short12", "x" * 257])
def test_passwords_have_bounds(password: str) -> None:
    with pytest.raises(InvalidValue, match="8 to 256"):
        users.hash_password(password)


def test_half_a_surrogate_pair_is_no_password(owned: Engine) -> None:
    with pytest.raises(InvalidValue, match="UTF-8"):
        users.hash_password("correct \ud800 horse")
    with reading(owned) as session:
        assert users.authenticate(session, "ann", "correct \ud800 horse") is None
        assert users.authenticate(session, "bob", "\udcff") is None


def test_who_knows_the_password_is_let_in(owned: Engine) -> None:
    with reading(owned) as session:
        user = users.authenticate(session, "ann", SECRET)
        assert user is not None
        assert user.is_owner
        assert user.roles == {INSTALLATION: "owner"}
        assert users.authenticate(session, "ann", SECRET + " ") is None
        assert users.authenticate(session, "bob", SECRET) is None


def test_nothing_secret_is_stored_or_audited(owned: Engine) -> None:
    with writing(owned, "test") as session:
        user = users.set_password(session, "ann", "another secret", now_at=NOW + 1)
        token = user_sessions.begin(session, user.id, 60, now_at=NOW)
    with reading(owned) as session:
        rows = [session.execute(select(table)).all() for table in metadata.tables.values()]
        entries = repr(audit.latest(session))
        [digest] = session.scalars(select(users.User.password_digest))
    assert SECRET not in repr(rows)
    assert "another secret" not in repr(rows)
    assert token not in repr(rows)
    assert digest not in entries
    assert "argon2" not in entries


def test_roles_come_and_go(owned: Engine) -> None:
    with writing(owned, "test") as session:
        bob = users.create_user(session, "bob", SECRET, "viewer", "acme", now_at=NOW)
        [acme] = bob.roles
        assert bob.tenant_names == {acme: "acme"}
        bob = users.set_role(session, "bob", "admin", "acme", now_at=NOW)
        bob = users.set_role(session, "bob", "viewer", now_at=NOW)
        assert bob.roles == {INSTALLATION: "viewer", acme: "admin"}
        bob = users.set_role(session, "bob", None, acme, now_at=NOW)
        assert bob.roles == {INSTALLATION: "viewer"}
        changes = [entry for entry in audit.latest(session) if entry.target == "bob"]
    assert [entry.action for entry in changes] == [*["user.role"] * 3, "user.create"]
    assert changes[1].before is not None
    assert changes[1].after is not None
    assert changes[1].before["roles"] == {acme: "admin"}
    assert changes[1].after["roles"] == {"*": "viewer", acme: "admin"}


def test_what_makes_no_sense_is_refused(owned: Engine) -> None:
    refusals = (
        (AlreadyExists, "ann", "viewer", ""),
        (InvalidValue, "bob", "king", ""),
        (InvalidValue, " bob", "viewer", ""),
        (NotFound, "bob", "viewer", "none"),
    )
    for error, name, role, tenant in refusals:
        with pytest.raises(error), writing(owned, "test") as session:
            users.create_user(session, name, SECRET, role, tenant, now_at=NOW)
    with reading(owned) as session:
        assert [user.name for user in users.list_users(session)] == ["ann"]
        with pytest.raises(NotFound, match="users list"):
            users.get_user(session, "bob")


def test_the_first_user_is_an_owner(engine: Engine) -> None:
    with pytest.raises(IllegalTransition, match="owner"), writing(engine, "test") as session:
        users.create_user(session, "bob", SECRET, "admin", now_at=NOW)


def test_the_last_owner_stays(owned: Engine) -> None:
    with writing(owned, "test") as session:
        users.create_user(session, "bob", SECRET, "owner", "acme", now_at=NOW)
    ways: tuple[Callable[[Session], object], ...] = (
        lambda session: users.remove_user(session, "ann", now_at=NOW),
        lambda session: users.set_disabled(session, "ann", True, now_at=NOW),
        lambda session: users.set_role(session, "ann", "admin", now_at=NOW),
        lambda session: users.set_role(session, "ann", None, now_at=NOW),
    )
    for way in ways:
        with pytest.raises(IllegalTransition, match="'ann'"), writing(owned, "test") as session:
            way(session)
    with writing(owned, "test") as session:
        users.set_role(session, "bob", "owner", now_at=NOW)
        users.remove_user(session, "ann", now_at=NOW)
        assert [user.name for user in users.list_users(session)] == ["bob"]
        assert audit.latest(session, 1)[0].before is not None


def test_sessions_end(owned: Engine) -> None:
    with writing(owned, "test") as session:
        bob = users.create_user(session, "bob", SECRET, "viewer", now_at=NOW)
        tokens = [user_sessions.begin(session, bob.id, 60, now_at=NOW) for _ in range(2)]
        first, second = tokens
        assert user_sessions.user_of(session, first, now_at=NOW + 59) == bob
        assert user_sessions.user_of(session, first, now_at=NOW + 60) is None
        assert user_sessions.user_of(session, first + "x", now_at=NOW) is None
        user_sessions.revoke(session, first, now_at=NOW + 1)
        assert user_sessions.user_of(session, first, now_at=NOW + 2) is None
        assert user_sessions.user_of(session, second, now_at=NOW + 2) == bob
        users.set_disabled(session, "bob", True, now_at=NOW + 3)
        assert user_sessions.user_of(session, second, now_at=NOW + 4) is None
        users.set_disabled(session, "bob", False, now_at=NOW + 5)
        users.set_password(session, "bob", "another secret", now_at=NOW + 6)
        assert user_sessions.user_of(session, second, now_at=NOW + 7) is None
        third = user_sessions.begin(session, bob.id, 60, now_at=NOW + 8)
        assert user_sessions.user_of(session, third, now_at=NOW + 9) is not None
        users.remove_user(session, "bob", now_at=NOW + 9)
    with reading(owned) as session:
        assert user_sessions.user_of(session, third, now_at=NOW + 10) is None


def test_old_sessions_are_cleared(owned: Engine) -> None:
    with writing(owned, "test") as session:
        ann = users.get_user(session, "ann")
        for at in (0, 10, 100):
            user_sessions.begin(session, ann.id, 60, now_at=NOW + at)
        rows = session.scalars(select(user_sessions.UserSession.expires_at)).all()
    assert rows == [NOW + 160]
