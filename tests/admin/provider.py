"""A small identity provider on loopback: discovery, keys, authorization, tokens, all of it signed.

It does what a sound one does (codes once, PKCE checked, exact redirect) unless a test tells it to
misbehave: `claims` and `headers` go over what a token would say, `forge` replaces the token.
"""

import base64
import hashlib
import json
import secrets
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import RSAKey

from tests.admin.site import Answer, Site, Visitor, running_site, send

CLIENT, SECRET = "polyhost-tests", "a secret / of tests"
REDIRECT = "https://polyhost.example/admin/oidc/callback"
START = "/oidc/start"


@dataclass
class Provider:
    """What it is told to do, and what it was asked."""

    issuer: str = ""
    redirect_url: str = ""
    sends_to: str = ""
    """Where that is really, for tests that learn it late."""
    subject: str = "subject-1"
    keys: list[RSAKey] = field(default_factory=list)
    signs_with: int = 0
    claims: dict[str, Any] = field(default_factory=dict)
    leave_out: frozenset[str] = frozenset()
    forge: Callable[[dict[str, Any]], str] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    codes: dict[str, dict[str, str]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    forms: list[dict[str, str]] = field(default_factory=list)
    down: bool = False
    slow_s: float = 0.0
    codes_again: bool = False
    """Whether a code may be used twice, which no sound provider lets happen."""

    def behave(self) -> None:
        """As a test left it misbehaving, the next one does not find it."""
        self.claims, self.leave_out, self.forge = {}, frozenset(), None
        self.subject, self.down, self.codes_again = "subject-1", False, False

    def rotate(self) -> None:
        """Another key; the one before is gone."""
        self.keys = [RSAKey.generate_key(2048, {"kid": secrets.token_hex(4), "use": "sig"})]
        self.signs_with = 0

    def code(self, asked: dict[str, str]) -> str:
        """Somebody has signed in here."""
        code = secrets.token_urlsafe(16)
        self.codes[code] = asked
        return code

    def token(self, nonce: str) -> str:
        """The ID token."""
        now_at = int(time.time())
        claims = {
            "iss": self.issuer,
            "sub": self.subject,
            "aud": CLIENT,
            "exp": now_at + 300,
            "iat": now_at,
            "nonce": nonce,
            **self.claims,
        }
        claims = {name: value for name, value in claims.items() if name not in self.leave_out}
        if self.forge is not None:
            return self.forge(claims)
        key = self.keys[self.signs_with]
        return jwt.encode({"alg": "RS256", "kid": key.kid}, claims, key)


class _Handler(BaseHTTPRequestHandler):
    server: "_Server"

    def do_GET(self) -> None:
        self._handle(b"")

    def do_POST(self) -> None:
        self._handle(self.rfile.read(int(self.headers["content-length"])))

    def log_message(self, *_: Any) -> None:
        """To nobody."""

    def _handle(self, body: bytes) -> None:
        provider, parts = self.server.provider, urlsplit(self.path)
        provider.asked.append(parts.path)
        time.sleep(provider.slow_s)
        if provider.down:
            self._say({"error": "down"}, 503)
        elif parts.path == "/.well-known/openid-configuration":
            self._say(self._metadata())
        elif parts.path == "/keys":
            self._say({"keys": [key.as_dict(private=False) for key in provider.keys]})
        elif parts.path == "/authorize":
            self._authorize({k: v[0] for k, v in parse_qs(parts.query).items()})
        elif parts.path == "/token":
            self._token(dict(parse_qsl(body.decode())))
        elif parts.path == "/end":
            self._say({"ended": True})
        else:
            self._say({"error": "not here"}, 404)

    def _metadata(self) -> dict[str, Any]:
        issuer = self.server.provider.issuer
        return {
            "issuer": issuer,
            "authorization_endpoint": f"{issuer}/authorize",
            "token_endpoint": f"{issuer}/token",
            "jwks_uri": f"{issuer}/keys",
            "end_session_endpoint": f"{issuer}/end",
            **self.server.provider.metadata,
        }

    def _authorize(self, asked: dict[str, str]) -> None:
        provider = self.server.provider
        sound = (
            asked.get("response_type") == "code"
            and asked.get("client_id") == CLIENT
            and asked.get("redirect_uri") == provider.redirect_url
            and "openid" in asked.get("scope", "")
            and asked.get("code_challenge_method") == "S256"
        )
        if not sound:
            self._say({"error": "invalid_request", "asked": asked}, 400)
            return
        told = {"code": provider.code(asked), "state": asked["state"], "iss": provider.issuer}
        self.send_response(302)
        self.send_header(
            "location", f"{provider.sends_to or provider.redirect_url}?{urlencode(told)}"
        )
        self.end_headers()

    def _token(self, form: dict[str, str]) -> None:
        provider = self.server.provider
        provider.forms.append(form)
        pair = base64.b64encode(f"{CLIENT}:a%20secret%20%2F%20of%20tests".encode()).decode()
        asked = provider.codes.get(form.get("code", ""))
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        again = form.get("code", "") in provider.used and not provider.codes_again
        if self.headers.get("authorization") != f"Basic {pair}":
            self._say({"error": "invalid_client"}, 401)
        elif asked is None or again or asked["code_challenge"] != challenge:
            self._say({"error": "invalid_grant"}, 400)
        elif form.get("redirect_uri") != provider.redirect_url:
            self._say({"error": "invalid_grant", "error_description": "redirect_uri"}, 400)
        else:
            provider.used.add(form["code"])
            self._say({"id_token": provider.token(asked["nonce"]), "token_type": "Bearer"})

    def _say(self, told: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    provider: Provider


@contextmanager
def running_provider(host: str = "127.0.0.1") -> Iterator[Provider]:
    """Until the block ends. Its `redirect_url` is the test's to say."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    provider = server.provider = Provider(f"http://{host}:{server.server_address[1]}")
    provider.rotate()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="provider")
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        thread.join(30)
        server.server_close()


@contextmanager
def running_site_of(folder: Path, provider: Provider, **settings: Any) -> Iterator[Site]:
    """A site that knows the provider; ann is bound to its subject."""
    provider.redirect_url = REDIRECT
    given = {
        "oidc_issuer": provider.issuer,
        "oidc_client_id": CLIENT,
        "oidc_client_secret": SECRET,
        "oidc_redirect_url": REDIRECT,
        "oidc_name": "Acme",
        **settings,
    }
    with running_site(folder, **given) as site:
        provider.sends_to = f"{site.url}/admin/oidc/callback"
        yield site


def through(
    site: Site, path: str = START, visitor: Visitor | None = None
) -> tuple[Visitor, Answer]:
    """To the provider and back."""
    visitor = visitor or site.visitor()
    return visitor, visitor.get(path)


def begin(site: Site) -> Answer:
    """The redirect to the provider itself."""
    return send(urllib.request.Request(site.url + "/admin/oidc/start"))


def callback(site: Site, visitor: Visitor, **query: str) -> Answer:
    """Back from the provider, with whatever."""
    return visitor.get("/oidc/callback?" + urllib.parse.urlencode(query))


def begun(site: Site) -> tuple[Visitor, dict[str, str]]:
    """A browser that has been sent to the provider, and what that was asked."""
    start, visitor = begin(site), site.visitor()
    visitor.keep(start.headers)
    query = urllib.parse.urlsplit(start.headers["location"]).query
    return visitor, dict(urllib.parse.parse_qsl(query))
