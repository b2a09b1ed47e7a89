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

from starlette.responses import RedirectResponse, Response

from admin.oidc.policy.identity import NotTrusted
from admin.oidc.provider import Provider, ProviderAway
from admin.operations import sessions
from admin.operations.sessions import SignInRefused
from admin.web.errors import Refused
from admin.web.headers import PREFIX
from admin.web.request import PageRequest, PageRoute
from admin.web.session import known_cookie, let_in, next_path, sign_in_page
from gateway.settings.oidc_settings import CALLBACK

COOKIE = "polyhost_oidc"
COOKIE_PATH = PREFIX + "/oidc"
VALID_S = 600
MAX_CODE_LEN = 4096
NOT_BEGUN = "This sign-in was not started here or has expired. Start again."
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


def start(request: PageRequest) -> Response:
    """To the provider."""
    provider = _provider(request)
    state, nonce, verifier = (secrets.token_urlsafe(_BYTES) for _ in range(3))
    path = next_path(request.query.get("next", "")[:1024])
    begun = Begun(int(request.now_at), state, nonce, verifier, path)
    try:
        url = provider.authorization_url(state, nonce, begun.challenge)
    except ProviderAway:
        return _refused(request, _away(provider), 503)
    return _set_cookie(request, RedirectResponse(url, 302), begun.text())


def callback(request: PageRequest) -> Response:
    """Back from the provider."""
    provider = _provider(request)
    begun = begun_of(request.cookies.get(COOKIE, ""), request.now_at)
    state = request.query.get("state", "")
    if begun is None or not hmac.compare_digest(state.encode(), begun.state.encode()):
        # The cookie stays: another site sent the browser here, or a second tab began since.
        return sign_in_page(request, NOT_BEGUN, 400)
    error = request.query.get("error", "")
    if error:
        said = error if _ERROR.fullmatch(error) else "no readable reason"
        return _refused(request, f"{provider.name} refused the sign-in: {said}.")
    code = request.query.get("code", "")
    if not code or len(code) > MAX_CODE_LEN:
        return _refused(request, "The provider sent no code. Start again.")
    context = request.context.operator
    try:
        turn = sessions.take_code_turn(context, request.address, known_cookie(request))
    except SignInRefused as refused:
        # The cookie stays: the code is unspent, and may be sent again.
        response = sign_in_page(request, str(refused), 429)
        response.headers["retry-after"] = str(max(1, round(refused.wait_s)))
        return response
    try:
        provider.check_sender(request.query.get("iss"))
        who = provider.identity(code, begun.verifier, begun.nonce)
        agent = request.headers.get("user-agent", "")
        token = sessions.sign_in_as(context, who, state, request.address, agent, turn)
    except ProviderAway:
        sessions.give_back(context, turn)
        return _refused(request, _away(provider), 503)
    except NotTrusted as reason:
        logger.error("sign-in through %s rejected: %s", provider.issuer, reason)
        said = f"The response of {provider.name} could not be verified. The server log says why."
        return _refused(request, said)
    except SignInRefused as refused:
        return _refused(request, str(refused), 403)
    response = let_in(request, request.page("signed_in.html", next=begun.next), token)
    return _set_cookie(request, response, "")


def sign_out(request: PageRequest) -> Response:
    """The provider's own end of session."""
    provider = _provider(request)
    settings = request.context.settings
    here = settings.oidc_redirect_url.removesuffix(CALLBACK) + PREFIX + "/sign-in"
    try:
        url = provider.end_session_url(here) if settings.oidc_sign_out else ""
    except ProviderAway:
        return _refused(request, _away(provider), 503)
    if not url:
        raise Refused(404, "Not found", "Sign-out at the identity provider is not available.")
    return RedirectResponse(url, 302)


def _provider(request: PageRequest) -> Provider:
    found = request.context.provider
    if found is None:
        raise Refused(404, "Not found", "No identity provider is configured (oidc_issuer).")
    return found


def _away(provider: Provider) -> str:
    return f"{provider.name} does not answer. Try again, or sign in with a password."


def _refused(request: PageRequest, said: str, status: int = 400) -> Response:
    """The sign-in page, which says why; this sign-in is over."""
    return _set_cookie(request, sign_in_page(request, said, status), "")


def _set_cookie(request: PageRequest, response: Response, text: str) -> Response:
    """An empty text takes it away. Secure where browsers come by TLS, whoever speaks it."""
    redirect = urlsplit(request.context.settings.oidc_redirect_url)
    secure = request.is_https or redirect.scheme == "https"
    age = VALID_S if text else 0
    response.set_cookie(
        COOKIE, text, age, path=COOKIE_PATH, secure=secure, httponly=True, samesite="lax"
    )
    return response


ROUTES = (
    PageRoute("GET", "/oidc/start", start, open=True, pool="provider"),
    PageRoute("GET", "/oidc/callback", callback, open=True, pool="provider"),
    PageRoute("GET", "/oidc/sign-out", sign_out, open=True, pool="provider"),
)
