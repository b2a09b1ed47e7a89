"""Signing in, staying signed in, and every way of not being: what a stranger may not do."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

from admin.operations import sessions
from admin.operations import users as service_users
from admin.web import csrf
from admin.web.session import COOKIE
from registry.accounts import user_sessions, users
from registry.accounts.users import UserRecord
from tests.admin.site import PASSWORD, Site, running_site


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Site]:
    """A site of one test alone."""
    with running_site(tmp_path) as running:
        yield running


def test_a_page_asks_who_it_is_and_comes_back(site: Site) -> None:
    visitor = site.visitor()
    door = visitor.get("/account?tab=1")
    assert door.url.endswith("/admin/sign-in?next=%2Faccount%3Ftab%3D1")
    inside = visitor.post(
        "/sign-in", {"name": "ann", "password": PASSWORD, "next": "/account?tab=1"}, csrf=""
    )
    assert inside.status == 200
    assert inside.url.endswith("/admin/account?tab=1")
    assert "Owner of the whole installation" in inside.text


@pytest.mark.parametrize(
    "elsewhere", ["//evil.example", "https://evil.example", "/\\evil.example", "\n/x", "/sign-out"]
)
def test_after_signing_in_nobody_is_sent_elsewhere(site: Site, elsewhere: str) -> None:
    fields = {"name": "ann", "password": PASSWORD, "next": elsewhere}
    answer = site.visitor().post("/sign-in", fields, csrf="")
    assert answer.url.startswith(site.url + "/admin/")
    assert "evil" not in answer.url


def test_the_cookie_is_for_these_pages_and_no_script(site: Site) -> None:
    visitor = site.visitor()
    # Without following: the answer to the form itself.
    visitor.keep = lambda headers: told.append(headers.get_all("set-cookie"))  # type: ignore[method-assign]
    told: list[list[str] | None] = []
    visitor.sign_in("ann")
    cookies = [line for lines in told if lines for line in lines if line.startswith(COOKIE)]
    assert cookies
    for part in ("HttpOnly", "SameSite=strict", "Path=/admin"):
        assert part in cookies[0]
    assert "Secure" not in cookies[0]  # this server speaks no TLS
    with site.operator.reading() as session:
        rows = session.query(user_sessions.UserSession).all()
    token = cookies[0].partition("=")[2].partition(";")[0]
    assert len(token) > 40
    assert all(token not in row.digest for row in rows)


def test_a_session_that_was_signed_out_cannot_be_replayed(site: Site) -> None:
    visitor = site.visitor("ann")
    stolen = dict(visitor.cookies)
    assert "sign-in" in visitor.post("/sign-out", {}).url
    assert COOKIE not in visitor.cookies
    visitor.cookies = stolen
    assert "sign-in" in visitor.get("/account").url
    assert "sign-in" in visitor.post("/account/password", {"new": "x"}, csrf="0" * 128).url


def test_another_password_ends_all_sessions(fresh: Site) -> None:
    first, second = fresh.visitor("ann"), fresh.visitor("ann")
    wrong = {"present": "not this one", "new": "another password", "again": "another password"}
    assert "current password is wrong" in first.post("/account/password", wrong).text
    unlike = {**wrong, "present": PASSWORD, "again": "something else"}
    assert "do not match" in first.post("/account/password", unlike).text
    right = {**wrong, "present": PASSWORD}
    assert "Sign in again" in first.post("/account/password", right).text
    assert "sign-in" in first.get("/account").url
    assert "sign-in" in second.get("/account").url
    assert fresh.visitor().sign_in("ann").status == 401
    assert fresh.visitor().sign_in("ann", "another password").status == 200


def test_a_disabled_user_is_out_at_once(fresh: Site) -> None:
    fresh.add_user("bob", "admin")
    bob = fresh.visitor("bob")
    assert bob.get("/account").status == 200
    fresh.write(users.set_disabled, "bob", True, now_at=fresh.operator.clock())
    assert "sign-in" in bob.get("/account").url
    assert fresh.visitor().sign_in("bob").status == 401


def test_who_is_let_in_again_has_to_sign_in_again(fresh: Site) -> None:
    fresh.add_user("bob", "admin")
    bob = fresh.visitor("bob")
    service_users.set_user_disabled(fresh.operator, "bob", True)
    service_users.set_user_disabled(fresh.operator, "bob", False)
    assert "sign-in" in bob.get("/account").url, "a session that has ended does not come back"
    assert fresh.visitor().sign_in("bob").status == 200


def test_a_password_changed_while_the_old_one_is_looked_at_ends_that_session(
    fresh: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    authenticate = users.authenticate

    def changed_meanwhile(session: Session, name: str, password: str) -> UserRecord | None:
        found = authenticate(session, name, password)
        with fresh.operator.writing() as other:
            users.set_password(other, name, "another password", now_at=fresh.operator.clock())
        return found

    monkeypatch.setattr(users, "authenticate", changed_meanwhile)
    token = sessions.sign_in(fresh.operator, "ann", PASSWORD, "203.0.113.9", "")
    assert sessions.who(fresh.operator, token) is None


def test_sessions_end_by_idling_and_by_age(tmp_path: Path) -> None:
    with running_site(tmp_path, admin_session_s=1000.0, admin_idle_s=100.0) as site:
        now_at = site.operator.clock()
        visitor = site.visitor("ann")
        token = visitor.cookies[COOKIE]
        context = site.operator

        def holds(at: float) -> bool:
            with context.reading() as session:
                found = user_sessions.find(session, token, now_at=at, idle_s=100.0)
            return found is not None

        assert holds(now_at + 90)
        assert not holds(now_at + 150)
        with context.writing() as session:
            user_sessions.touch(session, token, now_at=now_at + 950)
        assert holds(now_at + 990)
        assert not holds(now_at + 1002)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_form_from_elsewhere_does_nothing(site: Site, headers: dict[str, str]) -> None:
    visitor = site.visitor("ann")
    answer = visitor.post("/sign-out", {}, **headers)
    assert answer.status == 403
    assert "Nothing was changed" in answer.text
    assert visitor.get("/account").url.endswith("/account")
    assert site.visitor().post("/sign-in", {"name": "ann", "password": PASSWORD}, csrf="",
                               **headers).status == 403  # fmt: skip


def test_a_form_needs_its_own_sessions_token(site: Site) -> None:
    ann, other = site.visitor("ann"), site.visitor("ann")
    for forged in ("", "00" * 64, other.get("/account").csrf, ann.get("/account").csrf[:-2]):
        answer = ann.post("/sign-out", {}, csrf=forged)
        assert answer.status == 403, forged
    first, second = ann.get("/account").csrf, ann.get("/account").csrf
    assert first != second, "the token is masked anew on each page"
    assert csrf.is_token(first, ann.cookies[COOKIE])
    assert "sign-in" in ann.post("/sign-out", {}, csrf=first).url


def test_guessing_is_slowed_down_and_nobody_is_locked_out_by_it(fresh: Site) -> None:
    guesser = fresh.visitor()
    answers = [guesser.sign_in("ann", f"guess number {n}").status for n in range(7)]
    assert answers == [401] * 5 + [429, 429]
    refused = guesser.sign_in("ann")  # the right one, from where the guesses come
    assert refused.status == 429
    assert int(refused.headers["retry-after"]) >= 1
    token = sessions.sign_in(fresh.operator, "ann", PASSWORD, "203.0.113.9", "")
    assert token, "from elsewhere she is let in"
    (ours,) = fresh.read(user_sessions.failures, ["pair:203.0.113.9:ann"])
    assert ours.num_failed == 0


def test_a_name_that_is_none_is_refused_in_the_same_words(site: Site) -> None:
    wrong, unknown = (site.visitor().sign_in(n, "not the password") for n in ("ann", "nobody"))
    said = "Wrong user name or password."
    assert said in wrong.text
    assert said in unknown.text
    assert wrong.status == unknown.status == 401


def test_every_answer_has_the_headers(site: Site) -> None:
    visitor = site.visitor("ann")
    answers = [
        visitor.get("/account"),
        visitor.get("/nothing-here"),
        site.visitor().get("/sign-in"),
        visitor.post("/sign-out", {}, csrf="00"),
        visitor.get("/static/none/app.css"),
        visitor.post("/models", {}, csrf="00"),
    ]
    assert answers[-1].status == 405
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"


def test_static_files_are_named_by_what_is_in_them(site: Site) -> None:
    page = site.visitor().get("/sign-in").text
    version = page.partition("/admin/static/")[2].partition("/")[0]
    answer = site.visitor().get(f"/static/{version}/app.css", accept_encoding="gzip")
    assert answer.headers["content-encoding"] == "gzip"
    assert "immutable" in answer.headers["cache-control"]
    assert site.visitor("ann").get(f"/static/{version}/..%2Fapp.py").status == 404
    assert site.visitor("ann").get("/static/0123456789abcdef/app.css").status == 404


def test_html_in_a_name_is_text(site: Site) -> None:
    name = "<img src=x onerror=alert(1)>"
    answer = site.visitor().post("/sign-in", {"name": name, "password": "x", "next": name}, csrf="")
    assert name not in answer.text
    assert "&lt;img src=x" in answer.text
    page = site.visitor("ann").get("/search?q=" + "%3Cscript%3Ealert(1)%3C/script%3E")
    assert "<script>alert" not in page.text


def test_pages_are_answered_while_the_server_is_told_to_stop(fresh: Site) -> None:
    visitor = fresh.visitor("ann")
    fresh.kit.dispatcher.stopping = True
    stream = visitor.get("/live/models")
    assert stream.status == 200
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert b"event: tick" not in stream.body, "a stream ends with the server"
    assert visitor.get("/models").status == 200


def test_a_page_that_points_its_name_at_this_server_signs_nobody_in(site: Site) -> None:
    """DNS rebinding: Origin and Host agree, and are not ours."""
    port = site.url.rpartition(":")[2]
    rebound = {"host": f"evil.example:{port}", "origin": f"http://evil.example:{port}"}
    visitor = site.visitor()
    answer = visitor.post("/sign-in", {"name": "ann", "password": PASSWORD}, csrf="", **rebound)
    assert answer.status == 421
    assert "allowed_hosts" in answer.text
    assert not visitor.cookies
    assert visitor.get("/sign-in", host=f"evil.example:{port}").status == 421


def test_behind_a_proxy_that_speaks_tls(tmp_path: Path) -> None:
    with running_site(tmp_path, trusted_proxies="127.0.0.1") as site:
        visitor = site.visitor()
        told: list[str] = []
        visitor.keep = lambda headers: told.extend(headers.get_all("set-cookie") or [])  # type: ignore[method-assign]
        fields = {"name": "ann", "password": PASSWORD}
        browser = {"origin": site.url.replace("http:", "https:")}
        assert visitor.post("/sign-in", fields, csrf="", **browser).status == 403, "not told of TLS"
        visitor.post("/sign-in", fields, csrf="", x_forwarded_proto="https", **browser)
        (cookie,) = [line for line in told if line.startswith(COOKIE)]
        assert cookie.endswith("; Secure")
        forged = {"x_forwarded_proto": "https", "origin": site.url}
        assert visitor.post("/sign-in", fields, csrf="", **forged).status == 403
