"""`polyhost users` and `polyhost audit`, and the user `admin` at a server's start."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from argon2 import PasswordHasher

from gateway.cli.main import main
from gateway.service.control import open_control
from gateway.service.users import ensure_admin
from gateway.settings import Settings
from registry import passwords, users
from registry.session import upgrade

SECRET = "correct horse"

Run = Callable[..., str]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests that cost little."""
    quick = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    monkeypatch.setattr(passwords, "PasswordHasher", lambda: quick)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command that must end with `status`, with what is typed into it; what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POLYHOST_DATABASE_URL", raising=False)

    def run(*arguments: str, typed: str = "", status: int = 0) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        assert main([*arguments, "--data-dir", str(tmp_path / "data")]) == status
        out, err = capsys.readouterr()
        return err if status else out

    return run


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
    assert "bob has another password" in run("users", "passwd", "bob", typed="battery staple\n")
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


@pytest.mark.parametrize(
    ("arguments", "typed", "status", "message"),
    [
        (("add", "ann", "--role", "viewer"), SECRET, 1, "exists already"),
        (("add", "bob", "--role", "viewer"), "short", 2, "8 to 256"),
        (("add", "bob", "--role", "viewer", "--tenant", "none"), SECRET, 1, "tenants list"),
        (("set", "ann"), "", 2, "nothing to set"),
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
    assert told.startswith("polyhost: the database does not answer as it should: connection failed")
    assert told.count("\n") == 1
    assert "hunter2" not in told


def test_the_admin_is_made_once(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path), admin_password=SECRET)
    upgrade(settings.registry_url)
    assert ensure_admin(settings) == "", "a password that was given is not shown"
    assert ensure_admin(Settings(data_dir=str(tmp_path), admin_password="another one")) == ""
    assert ensure_admin(Settings(data_dir=str(tmp_path))) == ""
    with open_control(settings, "test") as control, control.reading() as session:
        admin = users.authenticate(session, "admin", SECRET)
        assert admin is not None
        assert admin.is_owner
        assert users.authenticate(session, "admin", "another one") is None


def test_a_password_is_made_up_where_there_is_nobody(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path))
    upgrade(settings.registry_url)
    made = ensure_admin(settings)
    assert len(made) >= 20
    assert ensure_admin(settings) == "", "it is shown once"
    with open_control(settings, "test") as control, control.writing() as session:
        assert users.authenticate(session, "admin", made) is not None
        users.create_user(session, "bob", SECRET, "owner", now_at=control.clock())
        users.remove_user(session, "admin", now_at=control.clock())
    assert ensure_admin(settings) == "", "who was removed on purpose stays away"
