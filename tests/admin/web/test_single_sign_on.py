"""Signing in by an identity provider, and everything that a hostile one, or a hostile browser, may
send instead: against a real one on loopback that signs real tokens."""

import base64
import hashlib
import hmac
import json
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import RSAKey

from admin.oidc.provider import Provider as Client
from admin.operations import users
from admin.operations.policy.sign_in_guard import code_subjects
from admin.web.session import COOKIE
from registry import audit
from registry.accounts import user_sessions
from tests.admin.provider import (
    CLIENT,
    REDIRECT,
    START,
    Provider,
    begin,
    begun,
    callback,
    running_provider,
    running_site_of,
    through,
)
from tests.admin.site import Site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, provider: Provider) -> Iterator[Site]:
    with running_site_of(tmp_path_factory.mktemp("site"), provider) as running_one:
        users.bind(running_one.operator, "ann", "subject-1")
        yield running_one


@pytest.fixture(autouse=True)
def _sound(site: Site, provider: Provider) -> Iterator[None]:
    yield
    provider.behave()
    with site.operator.writing() as session:
        user_sessions.forget(session, *code_subjects("127.0.0.1"))


def provider_of(site: Site) -> Client:
    found = site.kit.admin.context.provider
    assert found is not None
    return found


def sessions_of(site: Site) -> int:
    every = site.read(audit.page, audit.AuditFilter(action="session.begin"))
    return len(every)


def test_there_and_back(site: Site, provider: Provider) -> None:
    door = site.visitor().get("/keys?q=x")
    assert "Sign in with Acme" in door.text
    assert 'href="/admin/oidc/start?next=%2Fkeys%3Fq%3Dx"' in door.text
    visitor, back = through(site, "/oidc/start?next=%2Fkeys%3Fq%3Dx")
    assert back.status == 200
    assert 'content="0; url=/admin/keys?q=x"' in back.text
    cookies = back.headers.get_all("set-cookie") or []
    (session,) = [one for one in cookies if one.startswith(COOKIE)]
    assert "HttpOnly;" in session
    assert "SameSite=strict" in session
    (spent,) = [one for one in cookies if one.startswith('polyhost_oidc="";')]
    assert "Max-Age=0" in spent
    assert visitor.get("/account").text.count("ann") > 0
    form = provider.forms[-1]
    assert len(form["code_verifier"]) == 43
    assert "client_secret" not in form, "it is in the header"
    with site.operator.reading() as session_of:
        (entry,) = audit.page(session_of, audit.AuditFilter(action="session.begin"), limit=1)
    assert (entry.actor, entry.after and entry.after["by"]) == ("admin:ann", provider.issuer)
    assert "sign-in" in visitor.post("/sign-out", {}).url
    assert "sign-in" in visitor.get("/account").url


def test_the_way_there_is_tied_to_this_browser(site: Site) -> None:
    first = site.visitor()
    cookie = first.get(START, accept="x").headers  # through, and in
    assert cookie is not None
    request = begin(site)
    line = request.headers["set-cookie"]
    for part in ("HttpOnly", "SameSite=lax", "Path=/admin/oidc", "Max-Age=600", "Secure"):
        assert part in line
    asked = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(request.headers["location"]).query))
    assert asked["code_challenge_method"] == "S256"
    assert asked["redirect_uri"] == REDIRECT
    assert len({asked["state"], asked["nonce"], asked["code_challenge"]}) == 3
    again = begin(site)
    assert asked["state"] not in again.headers["location"], "every time anew"


HOSTILE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("another nonce", {"nonce": "x" * 43}),
    ("no nonce", {"nonce": None}),
    ("another audience", {"aud": "somebody-else"}),
    ("an audience that is like ours", {"aud": CLIENT + "x"}),
    ("among others, for another", {"aud": [CLIENT, "other"], "azp": "other"}),
    ("among others, for nobody", {"aud": [CLIENT, "other"]}),
    ("ours, given to another", {"azp": "other"}),
    ("another issuer", {"iss": "http://127.0.0.1:1"}),
    ("the issuer with a slash", {"iss": "{issuer}/"}),
    ("over", {"exp": -120}),
    ("without an end", {"exp": "soon"}),
    ("without an end at all", {"exp": None}),
    ("in the future", {"iat": 120}),
    ("made long ago", {"iat": -3600}),
    ("not yet", {"nbf": 120}),
    ("NaN", {"exp": float("nan")}),
    ("an end that no clock shows", {"exp": 10**400}),
    ("no subject", {"sub": ""}),
    ("a subject that is no text", {"sub": ["subject-1"]}),
    ("an endless subject", {"sub": "s" * 256}),
    ("another subject", {"sub": "subject-2"}),
)


@pytest.mark.parametrize("claims", [row[1] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_hostile_claims(site: Site, provider: Provider, claims: dict[str, Any]) -> None:
    before, now_at = sessions_of(site), time.time()
    for name, value in claims.items():
        if name in ("exp", "iat", "nbf") and isinstance(value, int):
            provider.claims[name] = int(now_at) + value
        else:
            provider.claims[name] = (
                value.format(issuer=provider.issuer) if isinstance(value, str) else value
            )
    visitor, answer = through(site)
    assert answer.status in (400, 403)
    assert COOKIE not in visitor.cookies
    assert "sign-in" in visitor.get("/account").url
    assert sessions_of(site) == before


def test_clocks_may_differ_a_little(site: Site, provider: Provider) -> None:
    now_at = int(time.time())
    provider.claims = {"iat": now_at + 30, "nbf": now_at + 30, "exp": now_at - 30}
    assert through(site)[1].status == 200
    provider.claims = {"aud": [CLIENT, "other"], "azp": CLIENT}
    assert through(site)[1].status == 200


def _part(told: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(told).encode()).decode().rstrip("=")


def _unsigned(_: Provider, claims: dict[str, Any]) -> str:
    return f"{_part({'alg': 'none'})}.{_part(claims)}."


def _by_public_key(provider: Provider, claims: dict[str, Any]) -> str:
    """The provider's public key as a shared secret (CVE-2015-9235)."""
    secret = provider.keys[0].as_pem(private=False)
    said = f"{_part({'alg': 'HS256', 'kid': provider.keys[0].kid})}.{_part(claims)}"
    digest = hmac.digest(secret, said.encode(), hashlib.sha256)
    return f"{said}.{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


def _by_stranger(provider: Provider, claims: dict[str, Any]) -> str:
    key = RSAKey.generate_key(2048)
    return jwt.encode({"alg": "RS256", "kid": provider.keys[0].kid}, claims, key)


def _brings_its_key(_: Provider, claims: dict[str, Any]) -> str:
    key = RSAKey.generate_key(2048)
    header = {"alg": "RS256", "kid": "mine", "jwk": key.as_dict(private=False)}
    return jwt.encode(header, claims, key)


def _other_algorithm(provider: Provider, claims: dict[str, Any]) -> str:
    key = provider.keys[0]
    return jwt.encode({"alg": "RS512", "kid": key.kid}, claims, key, ["RS512"])


def _changed(provider: Provider, claims: dict[str, Any]) -> str:
    key = provider.keys[0]
    header, _, signature = jwt.encode({"alg": "RS256", "kid": key.kid}, claims, key).split(".")
    return ".".join((header, _part({**claims, "extra": 1}), signature))


def _critical(provider: Provider, claims: dict[str, Any]) -> str:
    key = provider.keys[0]
    parts = jwt.encode({"alg": "RS256", "kid": key.kid}, claims, key).split(".")
    header = _part({"alg": "RS256", "kid": key.kid, "crit": ["x"], "x": 1})
    return ".".join((header, *parts[1:]))


FORGERIES = (_unsigned, _by_public_key, _by_stranger, _brings_its_key, _other_algorithm, _changed,
             _critical)  # fmt: skip


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda one: one.__name__)
def test_forged_tokens(site: Site, provider: Provider, forge: Any) -> None:
    provider.forge = lambda claims: forge(provider, claims)
    visitor, answer = through(site)
    assert answer.status == 400
    assert "could not be verified" in answer.text
    assert COOKIE not in visitor.cookies


@pytest.mark.parametrize(
    "token", ["", "x", "a.b", "a.b.c", "..", "e30.e30.e30", "é.é.é", "x" * 90_000]
)
def test_what_is_no_token(site: Site, provider: Provider, token: str) -> None:
    provider.forge = lambda _: token
    assert through(site)[1].status == 400


def test_a_state_that_is_not_this_browsers(site: Site, provider: Provider) -> None:
    visitor, asked = begun(site)
    _, theirs = begun(site)
    code = provider.code(theirs)
    before = len(provider.forms)
    for state in ("", "x", theirs["state"], asked["state"][:-1], asked["state"] + "é"):
        other, told = begun(site)
        assert callback(site, other, code=code, state=state).status == 400, state
        assert told["state"] != state
    stranger = site.visitor()
    assert callback(site, stranger, code=code, state=theirs["state"]).status == 400
    assert len(provider.forms) == before, "the code goes nowhere"
    assert callback(site, visitor, code=code, state=asked["state"]).status == 400, "not its code"
    assert COOKIE not in visitor.cookies


def test_another_tab_or_site_does_not_end_a_sign_in(site: Site, provider: Provider) -> None:
    visitor, first = begun(site)
    again, second = begun(site)
    visitor.cookies |= again.cookies
    late = callback(site, visitor, code=provider.code(first), state=first["state"])
    assert late.status == 400
    assert "Start again" in late.text
    assert callback(site, visitor, code="x", state="of somebody else").status == 400
    good = callback(site, visitor, code=provider.code(second), state=second["state"])
    assert good.status == 200


def test_a_sign_in_counts_once(site: Site, provider: Provider) -> None:
    provider.codes_again = True
    visitor, asked = begun(site)
    stolen = dict(visitor.cookies)
    code = provider.code(asked)
    assert callback(site, visitor, code=code, state=asked["state"]).status == 200
    assert callback(site, visitor, code=code, state=asked["state"]).status == 400, "cookie is gone"
    thief = site.visitor()
    thief.cookies = stolen
    answer = callback(site, thief, code=code, state=asked["state"])
    assert answer.status == 403
    assert "was already used" in answer.text
    assert COOKIE not in thief.cookies


def test_odd_cookies_and_addresses(site: Site, provider: Provider) -> None:
    visitor, asked = begun(site)
    good = visitor.cookies["polyhost_oidc"]
    began_at, *rest = good.split(".")
    odd = ["", "x", ".".join([str(int(began_at) - 601), *rest]), ".".join(rest), good + ".x",
           ".".join([str(int(began_at) + 9999), *rest]), good[:-2] + "%%", "x" * 9000,
           ".".join(["1e9", *rest])]  # fmt: skip
    for cookie in odd:
        visitor.cookies = {"polyhost_oidc": cookie}
        assert callback(site, visitor, code="x", state=asked["state"]).status in (400, 431), cookie
    visitor, asked = begun(site)
    assert callback(site, visitor, state=asked["state"]).status == 400
    visitor, asked = begun(site)
    assert callback(site, visitor, code="x" * 5000, state=asked["state"]).status == 400
    visitor, asked = begun(site)
    refused = callback(site, visitor, error="access_denied", state=asked["state"])
    assert "Acme refused the sign-in: access_denied" in refused.text
    visitor, asked = begun(site)
    told = callback(site, visitor, error="<script>alert(1)</script>", state=asked["state"])
    assert "alert(1)" not in told.text
    visitor, asked = begun(site)
    code = provider.code(asked)
    mixed = callback(site, visitor, code=code, state=asked["state"], iss="https://evil.example")
    assert mixed.status == 400, "a redirect of another provider"


@pytest.mark.parametrize(
    "path",
    [
        "https://evil.example", "//evil.example", "/\\evil.example", "\\\\evil.example", "/%0a//x",
        "javascript:alert(1)", "/sign-out", "/sign-in", "//", "//[", "/ /x\n", "/x\"><script>",
    ],
)  # fmt: skip
def test_nobody_is_sent_elsewhere(site: Site, path: str) -> None:
    quoted = urllib.parse.quote(path, safe="")
    _, back = through(site, f"/oidc/start?next={quoted}")
    (target,) = [part.partition('"')[0] for part in back.text.split('content="0; url=')[1:]]
    assert target.startswith("/admin/")
    assert not target.startswith("/admin//")
    assert "evil" not in target or target.startswith("/admin/%") or target == "/admin/"
    assert "<script>" not in target
    door = site.visitor().get(f"/sign-in?next={quoted}")
    assert "evil.example" not in door.text.partition('href="/admin/oidc/start')[2].split('"')[0]


def test_keys_are_read_anew_when_they_change(tmp_path: Path) -> None:
    with running_provider() as own, running_site_of(tmp_path, own) as site:
        users.bind(site.operator, "ann", "subject-1")
        assert through(site)[1].status == 200
        assert own.asked.count("/keys") == 1
        assert through(site)[1].status == 200
        assert own.asked.count("/keys") == 1, "kept"
        provider = provider_of(site)
        old = own.keys[0]
        own.rotate()
        provider._now_s = lambda: time.monotonic() + 10
        assert through(site)[1].status == 200
        assert own.asked.count("/keys") == 2
        own.forge = lambda claims: jwt.encode({"alg": "RS256", "kid": old.kid}, claims, old)
        assert through(site)[1].status == 400, "a key that was taken back"
        assert through(site)[1].status == 400
        assert own.asked.count("/keys") == 2, "strangers' keys do not make us ask all the time"
        own.forge = None
        provider._now_s = lambda: time.monotonic() + 4000
        assert through(site)[1].status == 200
        assert own.asked.count("/keys") == 3
        assert own.asked.count("/.well-known/openid-configuration") == 2


def test_the_provider_is_away(tmp_path: Path) -> None:
    with running_provider() as own, running_site_of(tmp_path, own, oidc_timeout_s=0.3) as site:
        users.bind(site.operator, "ann", "subject-1")
        own.down = True
        for _ in range(3):
            answer = site.visitor().get(START)
            assert answer.status == 503
            assert "Acme does not answer" in answer.text
        assert len(own.asked) == 1, "it is left alone for a moment"
        assert site.visitor("ann").get("/account").status == 200, "by password"
        own.down, own.slow_s = False, 1.0
        provider_of(site)._now_s = lambda: time.monotonic() + 10
        assert site.visitor().get(START).status == 503, "too slow"
        own.slow_s = 0.0
        provider_of(site)._now_s = lambda: time.monotonic() + 20
        visitor, asked = begun(site)
        own.down = True
        gone = callback(site, visitor, code=own.code(asked), state=asked["state"])
        assert gone.status == 503


@pytest.mark.parametrize(
    "metadata",
    [
        {"issuer": "http://127.0.0.1:1"},
        {"authorization_endpoint": "http://evil.example/authorize"},
        {"token_endpoint": "ftp://127.0.0.1/token"},
        {"token_endpoint": None},
        {"jwks_uri": "https://"},
        {"jwks_uri": "http://[::1"},
        {"end_session_endpoint": "javascript:alert(1)"},
    ],
)
def test_discovery_that_cannot_be_meant(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, metadata: dict[str, Any]
) -> None:
    with running_provider() as own, running_site_of(tmp_path, own) as site:
        own.metadata = metadata
        assert site.visitor().get(START).status == 503
    assert "identity provider" in caplog.text


def test_a_provider_that_names_itself_in_redirects_must(tmp_path: Path) -> None:
    with running_provider() as own, running_site_of(tmp_path, own) as site:
        users.bind(site.operator, "ann", "subject-1")
        own.metadata = {"authorization_response_iss_parameter_supported": True}
        visitor, asked = begun(site)
        assert callback(site, visitor, code=own.code(asked), state=asked["state"]).status == 400
        assert through(site)[1].status == 200
