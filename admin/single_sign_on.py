"""Signing in by an identity provider: to it, back from it, and out there too.

    GET /oidc/start     state, nonce and PKCE verifier into a cookie of ten minutes; to the provider
    GET /oidc/callback  the cookie's state against the address's; a code for an identity, as seldom
                        as passwords are looked at
    GET /oidc/sign-out  to the provider's own end of session, from the page that follows signing out

The cookie is for this way alone, and Lax: the provider sends the browser back from elsewhere. The
session's stays Strict, so the callback answers with a page that goes on by itself: what a browser
asks straight from another site's redirect carries no such cookie.
"""

import base64
import hashlib
import hmac
import logging
import re
import secrets
from dataclasses import dataclass
from urllib.parse import urlsplit

from admin.ask import PREFIX, Ask, PageRoute, Reply
from admin.errors import Refused
from admin.oidc.provider import Provider, ProviderAway
from admin.session import next_path, session_cookie, sign_in_page
from gateway.policy.identity import NotTrusted
from gateway.service import identities, sessions
from gateway.service.sessions import SignInRefused
from gateway.settings_oidc import CALLBACK

COOKIE = "polyhost_oidc"
COOKIE_PATH = PREFIX + "/oidc"
VALID_S = 600
MAX_CODE_LEN = 4096
NOT_BEGUN = "This sign-in was not begun here, or too long ago: begin again."
_BYTES = 32
_SOUND = re.compile(r"[A-Za-z0-9_-]{43}")
_ERROR = re.compile(r"[a-z_]{1,40}")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begun:
    """One sign-in on its way, as the browser's cookie has it."""

    began_at: int
    state: str
    nonce: str
    verifier: str
    next: str

    @property
    def challenge(self) -> str:
        """Of the verifier (RFC 7636, S256)."""
        digest = hashlib.sha256(self.verifier.encode()).digest()
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")

    def text(self) -> str:
        """The cookie's value."""
        path = base64.urlsafe_b64encode(self.next.encode()).decode().rstrip("=")
        return f"{self.began_at}.{self.state}.{self.nonce}.{self.verifier}.{path}"


def begun_of(text: str, now_at: float) -> Begun | None:
    """None where it is none, or too old."""
    parts = text.split(".")
    if len(text) > MAX_CODE_LEN or len(parts) != 5 or not all(map(_SOUND.fullmatch, parts[1:4])):
        return None
    try:
        path = base64.urlsafe_b64decode(parts[4] + "=" * (-len(parts[4]) % 4)).decode()
        began_at = int(parts[0][:12])
    except ValueError:
        return None
    if not -VALID_S < now_at - began_at <= VALID_S:
        return None
    return Begun(began_at, parts[1], parts[2], parts[3], next_path(path))


def start(ask: Ask) -> Reply:
    """To the provider."""
    provider = _provider(ask)
    state, nonce, verifier = (secrets.token_urlsafe(_BYTES) for _ in range(3))
    path = next_path(ask.query.get("next", "")[:1024])
    begun = Begun(int(ask.now_at), state, nonce, verifier, path)
    try:
        url = provider.authorization_url(state, nonce, begun.challenge)
    except ProviderAway:
        return _refused(ask, _away(provider), 503)
    return Reply(b"", 302, headers=[("location", url), ("set-cookie", _cookie(ask, begun.text()))])


def callback(ask: Ask) -> Reply:
    """Back from the provider."""
    provider = _provider(ask)
    begun = begun_of(ask.incoming.cookies.get(COOKIE, ""), ask.now_at)
    state = ask.query.get("state", "")
    if begun is None or not hmac.compare_digest(state.encode(), begun.state.encode()):
        # The cookie stays: another site sent the browser here, or a second tab began since.
        return sign_in_page(ask, NOT_BEGUN, 400, [])
    error = ask.query.get("error", "")
    if error:
        said = error if _ERROR.fullmatch(error) else "no reason that can be shown"
        return _refused(ask, f"{provider.name} has refused it: {said}.")
    code = ask.query.get("code", "")
    if not code or len(code) > MAX_CODE_LEN:
        return _refused(ask, "The provider sent no code: begin again.")
    incoming, control = ask.incoming, ask.desk.control
    try:
        turn = identities.take_turn(control, incoming.address)
    except SignInRefused as refused:
        # The cookie stays: the code is unspent, and may be sent again.
        waiting = ("retry-after", str(max(1, round(refused.wait_s))))
        return sign_in_page(ask, str(refused), 429, [waiting])
    try:
        provider.check_sender(ask.query.get("iss"))
        who = provider.identity(code, begun.verifier, begun.nonce)
        agent = incoming.headers.get("user-agent", "")
        token = identities.sign_in_as(control, who, state, incoming.address, agent, turn)
    except ProviderAway:
        identities.give_back(control, turn)
        return _refused(ask, _away(provider), 503)
    except NotTrusted as reason:
        logger.error("sign-in by %s is not believed: %s", provider.issuer, reason)
        said = f"What {provider.name} sent is not believed: the log says why."
        return _refused(ask, said)
    except SignInRefused as refused:
        return _refused(ask, str(refused), 403)
    if ask.token:  # whoever had this browser before is out
        sessions.sign_out(control, ask.token)
    headers = [
        ("set-cookie", session_cookie(token, incoming.is_https)),
        ("set-cookie", _cookie(ask, "")),
    ]
    return ask.page("signed_in.html", headers=headers, next=begun.next)


def sign_out(ask: Ask) -> Reply:
    """The provider's own end of session."""
    provider = _provider(ask)
    settings = ask.desk.settings
    here = settings.oidc_redirect_url.removesuffix(CALLBACK) + PREFIX + "/sign-in"
    try:
        url = provider.end_session_url(here) if settings.oidc_sign_out else ""
    except ProviderAway:
        return _refused(ask, _away(provider), 503)
    if not url:
        raise Refused(404, "Not here", "The provider has no sign-out that this server knows of.")
    return Reply(b"", 302, headers=[("location", url)])


def _provider(ask: Ask) -> Provider:
    found = ask.desk.provider
    if found is None:
        raise Refused(404, "Not here", "No identity provider is set: oidc_issuer.")
    return found


def _away(provider: Provider) -> str:
    return f"{provider.name} does not answer: try again, or sign in with a password."


def _refused(ask: Ask, said: str, status: int = 400) -> Reply:
    """The sign-in page, which says why; this sign-in is over."""
    return sign_in_page(ask, said, status, [("set-cookie", _cookie(ask, ""))])


def _cookie(ask: Ask, text: str) -> str:
    """Set it; an empty text takes it away. Secure where browsers come by TLS, whoever speaks it."""
    redirect = urlsplit(ask.desk.settings.oidc_redirect_url)
    secure = "; Secure" if ask.incoming.is_https or redirect.scheme == "https" else ""
    age = VALID_S if text else 0
    return f"{COOKIE}={text}; Path={COOKIE_PATH}; HttpOnly; SameSite=Lax; Max-Age={age}{secure}"


ROUTES = (
    PageRoute("GET", "/oidc/start", start, open=True, pool="provider"),
    PageRoute("GET", "/oidc/callback", callback, open=True, pool="provider"),
    PageRoute("GET", "/oidc/sign-out", sign_out, open=True, pool="provider"),
)
