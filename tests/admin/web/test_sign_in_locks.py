"""Strangers who fail from the user's own address, and the ways in that stay open to the user."""

import itertools
from collections.abc import Iterator

import pytest
from argon2 import PasswordHasher

from admin.operations import users as verbs
from admin.operations.policy import sign_in_guard
from admin.web.session import BROWSER_COOKIE, COOKIE
from registry.accounts import user_sessions, users
from registry.accounts.user_sessions import Failures
from registry.errors import NotFound
from tests.admin.site import PASSWORD, Site, Visitor, running_site

HERE, OFFICE = "127.0.0.1", "2001:db8:1:2::/64"
GUESS = "not the password"
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """With digests that cost little."""
    quick = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(users, "PasswordHasher", lambda: quick)
        with running_site(tmp_path_factory.mktemp("locks")) as running:
            yield running


@pytest.fixture
def user(site: Site) -> Iterator[str]:
    """An owner of this test's own; what failed is forgotten at its end."""
    name = f"user-{next(NUMBERS)}"
    site.add_user(name, "owner")
    yield name
    verbs.unlock(site.operator)


def fail(site: Site, num: int, address: str = HERE, name: str = "") -> None:
    """As so many attempts in one name, or in made-up ones."""
    with site.operator.writing() as session:
        for n in range(num):
            subjects = sign_in_guard.subjects(name or f"nobody-{n}", address)
            now_at = site.operator.clock()
            user_sessions.count_up(session, subjects, now_at=now_at, forget_s=3600.0)


def left(site: Site, user: str) -> Visitor:
    """A browser in which that user has signed in and out."""
    visitor = site.visitor(user)
    visitor.post("/sign-out", {})
    assert COOKIE not in visitor.cookies
    return visitor


def test_strangers_at_the_address_do_not_keep_out_a_known_browser(site: Site, user: str) -> None:
    known = left(site, user)
    fail(site, sign_in_guard.ADDRESS.free)
    stranger = site.visitor().sign_in(user)
    assert stranger.status == 429
    assert "Try again in 15 s." in stranger.text
    assert stranger.headers["retry-after"] == "15"
    assert known.sign_in(user, GUESS).status == 401
    assert known.sign_in(user).url.endswith("/overview")
    assert site.visitor().sign_in(user).status == 429, "nobody else is let in by that"


def test_a_known_browser_guesses_as_seldom_as_anybody(site: Site, user: str) -> None:
    known = left(site, user)
    answers = [known.sign_in(user, GUESS).status for _ in range(sign_in_guard.BROWSER.free + 1)]
    assert answers == [401] * sign_in_guard.BROWSER.free + [429]
    assert known.sign_in(user).status == 429
    assert site.visitor().sign_in(user).status == 200, "its failures are its own"


def test_it_is_known_as_one_user_alone(site: Site, user: str) -> None:
    known = left(site, user)
    fail(site, sign_in_guard.ADDRESS.free)
    assert [known.sign_in(name).status for name in ("ann", "nobody")] == [429, 429]


@pytest.mark.parametrize("change", ["another password", "forged", "older than a year"])
def test_what_a_browser_shows_is_checked(
    site: Site, user: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, password = left(site, user), PASSWORD
    if change == "another password":
        password = "a new password"
        site.write(users.set_password, user, password, now_at=site.operator.clock())
    elif change == "forged":
        parts = left(site, "ann").cookies[BROWSER_COOKIE].split(".")
        parts[1] = known.cookies[BROWSER_COOKIE].split(".")[1]
        known.cookies[BROWSER_COOKIE] = ".".join(parts)
    else:
        monkeypatch.setattr("registry.accounts.known_browsers.VALID_S", 0)
    fail(site, sign_in_guard.ADDRESS.free)
    assert known.sign_in(user, password).status == 429


def test_who_changes_the_password_stays_known(site: Site, user: str) -> None:
    visitor, password = site.visitor(user), "a new password"
    fail(site, sign_in_guard.ADDRESS.free)
    given = {"present": PASSWORD, "new": password, "again": password}
    assert "Sign in again" in visitor.post("/account/password", given).text
    assert visitor.sign_in(user, password).url.endswith("/overview")


def test_the_cookie_that_stays_is_no_scripts(site: Site, user: str) -> None:
    visitor, told = site.visitor(), list[str]()
    visitor.keep = lambda headers: told.extend(headers.get_all("set-cookie") or [])  # type: ignore[method-assign]
    visitor.sign_in(user)
    (cookie,) = [line for line in told if line.startswith(BROWSER_COOKIE)]
    for part in ("HttpOnly", "SameSite=lax", "Path=/admin", "Max-Age=31536000"):
        assert part in cookie
    assert user not in cookie


def test_an_owner_unlocks_on_the_page(site: Site, user: str) -> None:
    ann = site.visitor("ann")
    assert "Locked" not in ann.get("/users").text
    fail(site, sign_in_guard.ADDRESS.free)
    assert site.visitor().sign_in(user).status == 429
    page = ann.get("/users")
    assert f"All users at <strong>{HERE}</strong>: 30 failures" in page.text
    assert "nobody-" not in page.text, "made-up names are nobody's to unlock"
    assert f"{HERE} can try to sign in again." in ann.post("/user/unlock", {"address": HERE}).text
    assert site.visitor().sign_in(user).status == 200
    fail(site, sign_in_guard.PAIR.free, HERE, user)
    assert site.visitor().sign_in(user).status == 429
    assert f"<strong>{user}</strong> from {HERE}: 5 failures" in ann.get("/users").text
    assert f"{user} can try" in ann.post("/user/unlock", {"name": user}).text
    assert site.visitor().sign_in(user).status == 200
    fail(site, sign_in_guard.ADDRESS.free)
    assert "Everybody can try" in ann.post("/user/unlock", {}).text
    assert site.visitor().sign_in(user).status == 200


def test_unlocking_reaches_what_was_named_and_nothing_else(site: Site, user: str) -> None:
    fail(site, 30, OFFICE, user)
    fail(site, 30, HERE, "ann")
    ours = [*sign_in_guard.subjects(user, OFFICE), *sign_in_guard.code_subjects(OFFICE)]
    site.write(user_sessions.count_up, ours[3:], now_at=site.operator.clock(), forget_s=3600.0)

    def num_failed(subjects: list[str]) -> list[int]:
        return [row.num_failed for row in site.read(user_sessions.failures, subjects)]

    listed = verbs.list_sign_in_locks(site.operator)
    assert {(lock.kind, lock.address, lock.name) for lock in listed} == {
        *(("pair", OFFICE, user), ("address", OFFICE, "")),
        *(("pair", HERE, "ann"), ("address", HERE, "")),
    }
    assert all(0 < lock.wait_s <= 900 for lock in listed)
    assert verbs.unlock(site.operator, user) == 2
    assert num_failed(ours) == [0, 30, 0, 1]
    assert verbs.unlock(site.operator, address="2001:db8:1:2:aaaa::7") == 2
    assert num_failed(ours) == [0, 0, 0, 0]
    assert num_failed([*sign_in_guard.subjects("ann", HERE)]) == [30, 30, 30]
    with pytest.raises(NotFound, match="nobody"):
        verbs.unlock(site.operator, "nobody")


def test_what_was_forgotten_is_not_below_zero_when_an_attempt_ends(site: Site, user: str) -> None:
    subjects = sign_in_guard.subjects(user, HERE)
    now_at = site.operator.clock()
    turn = site.write(user_sessions.count_up, subjects, now_at=now_at, forget_s=3600.0)
    verbs.unlock(site.operator, user)
    site.write(user_sessions.take_back, turn)
    assert site.read(user_sessions.failures, subjects) == [Failures()] * 3
