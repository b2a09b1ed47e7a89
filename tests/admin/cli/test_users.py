"""`polyhost users` and `polyhost audit`, and the user `admin` at a server's start."""

import json
from pathlib import Path
from typing import Any

import pytest

from admin.context.operator_context import open_context
from admin.operations.policy import sign_in_guard
from admin.operations.users import ensure_admin
from gateway.settings.settings import Settings
from registry.accounts import user_sessions, users
from tests.admin.cli.conftest import Run
from tests.migrated import migrated

SECRET = "correct horse"

pytestmark = pytest.mark.usefixtures("quick_passwords")


def listed(run: Run, *arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


def test_users_come_change_and_go(run: Run) -> None:
    run("tenants", "add", "acme")
    run("users", "add", "ann", "--role", "owner", typed=SECRET + "\n")
    run("users", "add", "bob", "--role", "viewer", "--tenant", "acme", typed=SECRET + "\n")
    run("users", "set", "bob", "--role", "admin", "--tenant", "acme", "--disable")
    table = run("users", "list")
    assert "ann   owner" in table
    assert "bob   admin of acme  disabled" in table
    run("users", "set", "bob", "--enable")
    run("users", "set", "bob", "--role", "none", "--tenant", "acme")
    ann, bob = listed(run, "users", "list")
    assert ann["roles"] == {"": "owner"}
    assert (bob["roles"], bob["disabled"]) == ({}, False)
    assert "changed the password of bob" in run("users", "passwd", "bob", typed="battery staple\n")
    run("users", "rm", "bob")
    assert [user["name"] for user in listed(run, "users", "list")] == ["ann"]
    actions = [entry["action"] for entry in listed(run, "audit", "list", "--target", "bob")]
    assert actions == [
        *("user.remove", "user.password", "user.role", "user.enable", "user.disable"),
        *("user.role", "user.create"),
    ]
    log = run("audit", "list", "--limit", "1000")
    assert SECRET not in log
    assert "disabled false -> true" in log


def test_who_is_locked_out_is_let_in_again_without_a_server(run: Run, data_dir: Path) -> None:
    run("users", "add", "ann", "--role", "owner", typed=SECRET + "\n")
    with open_context(Settings(data_dir=str(data_dir)), "tests") as context:
        for _ in range(sign_in_guard.ADDRESS.free):
            subjects = sign_in_guard.subjects("ann", "192.0.2.7")
            with context.writing() as session:
                now_at = context.clock()
                user_sessions.count_up(session, subjects, now_at=now_at, forget_s=3600.0)
    assert {lock["kind"] for lock in listed(run, "users", "locks")} == {"pair", "address"}
    assert "192.0.2.7  ann" in run("users", "locks")
    assert "forgot 2 counts" in run("users", "unlock", "ann")
    assert "192.0.2.7  -" in run("users", "locks")
    assert "forgot 1 counts" in run("users", "unlock", "--address", "192.0.2.7")
    assert listed(run, "users", "locks") == []
    assert "forgot 0 counts" in run("users", "unlock", "--all")
    entries = listed(run, "audit", "list", "--action", "user.unlock")
    assert [entry["target"] for entry in entries] == ["*", "192.0.2.7", "ann"]


@pytest.mark.parametrize(
    ("arguments", "typed", "status", "message"),
    [
        (("add", "ann", "--role", "viewer"), SECRET, 1, "already exists"),
        (("add", "bob", "--role", "viewer"), "short", 2, "8 to 256"),
        (("add", "bob", "--role", "viewer", "--tenant", "none"), SECRET, 1, "tenants list"),
        (("set", "ann"), "", 2, "nothing to set"),
        (("unlock", "nobody"), "", 1, "users list"),
        (("set", "ann", "--tenant", "acme", "--disable"), "", 2, "give a role"),
        (("set", "ann", "--disable"), "", 1, "another user an owner first"),
        (("set", "ann", "--role", "none"), "", 1, "another user an owner first"),
        (("rm", "ann"), "", 1, "another user an owner first"),
        (("passwd", "bob"), SECRET, 1, "users list"),
    ],
)
def test_what_cannot_be_says_what_to_do(
    run: Run, arguments: tuple[str, ...], typed: str, status: int, message: str
) -> None:
    run("users", "add", "ann", "--role", "owner", typed=SECRET + "\n")
    told = run("users", *arguments, typed=typed + "\n", status=status)
    assert message in told
    assert told.count("\n") == 1
    assert SECRET not in told


def test_the_audit_log_goes_on_page_by_page(run: Run) -> None:
    for name in ("a", "b", "c"):
        run("tenants", "add", name)
    run("tenants", "set", "b", "--weight", "3")
    first = listed(run, "audit", "list", "--limit", "3")
    rest = listed(run, "audit", "list", "--limit", "3", "--before", str(first[-1]["id"]))
    assert [entry["after"]["name"] for entry in first + rest] == ["b", "c", "b", "a"]
    assert first[0]["before"]["weight"] == 1.0
    assert first[0]["after"]["weight"] == 3.0
    assert "weight 1.0 -> 3.0" in run("audit", "list", "--action", "tenant.update")
    assert listed(run, "audit", "list", "--from", "2100-01-01") == []
    assert "--limit must be" in run("audit", "list", "--limit", "0", status=2)


def test_a_database_that_does_not_answer_is_told_in_one_line_without_its_password(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYHOST_DATABASE_URL", "postgresql://root:hunter2@127.0.0.1:1/polyhost")
    told = run("tenants", "list", status=1)
    assert told.startswith("polyhost: database error: connection failed")
    assert told.count("\n") == 1
    assert "hunter2" not in told


def test_the_admin_is_made_once(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path), admin_password=SECRET)
    migrated(settings.registry_url)
    assert ensure_admin(settings) == "", "a password that was given is not shown"
    assert ensure_admin(Settings(data_dir=str(tmp_path), admin_password="another one")) == ""
    assert ensure_admin(Settings(data_dir=str(tmp_path))) == ""
    with open_context(settings, "test") as context, context.reading() as session:
        admin = users.authenticate(session, "admin", SECRET)
        assert admin is not None
        assert admin.is_owner
        assert users.authenticate(session, "admin", "another one") is None


def test_a_password_is_made_up_where_there_is_nobody(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path))
    migrated(settings.registry_url)
    made = ensure_admin(settings)
    assert len(made) >= 20
    assert ensure_admin(settings) == "", "it is shown once"
    with open_context(settings, "test") as context, context.writing() as session:
        assert users.authenticate(session, "admin", made) is not None
        users.create_user(session, "bob", SECRET, "owner", now_at=context.clock())
        users.remove_user(session, "admin", now_at=context.clock())
    assert ensure_admin(settings) == "", "who was removed on purpose stays away"
