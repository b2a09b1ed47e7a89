"""The identity provider as this server sees it: its addresses, its keys, a code for an identity.

    discovery      issuer + /.well-known/openid-configuration, which must name that very issuer keys
    JSON Web Keys, read anew when they are old or a token names one that is not known identity
    a code and its verifier -> ID token -> signature -> claims (admin/oidc/policy/identity.py)

Called in threads; each question to the provider has a deadline and a bound on its answer, follows
no redirect, and goes to https (or loopback) alone. After a failure it is left alone for a moment.
Signatures are joserfc's to check, which is an extra: `pip install 'polyhost[oidc]'`.
"""

import base64
import http.client
import importlib
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

from admin.oidc.policy.identity import Identity, NotTrusted, SignInAttempt, identity_of
from gateway.settings.config import SettingsError
from gateway.settings.oidc_settings import OidcSettings, is_loopback

MAX_ANSWER_BYTES: Final = 1 << 20
REST_S: Final = 5.0
"""After a failure, and between two looks for a key that is not known."""
_PART_BYTES: Final = 1 << 14

logger = logging.getLogger(__name__)


class ProviderAway(Exception):
    """The provider does not answer, or not as one does."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """What discovery said, as far as it is used. `end_session` "": there is none."""

    authorization: str
    token: str
    keys: str
    end_session: str
    names_issuer: bool
    """Whether its redirects say who sent them (RFC 9207)."""
    basic: bool
    """Whether the client proves itself in a header, else in the form."""


@dataclass(slots=True)
class _Kept:
    """What was read, and when; and when reading failed last."""

    value: Any = None
    read_s: float = float("-inf")
    failed_s: float = float("-inf")


def require_joserfc() -> tuple[ModuleType, ModuleType, ModuleType]:
    """joserfc's errors, jwk and jwt. Raises SettingsError where it is not installed."""
    try:
        names = ("joserfc.errors", "joserfc.jwk", "joserfc.jwt")
        errors, jwk, jwt = (importlib.import_module(name) for name in names)
    except ImportError as error:
        raise SettingsError(
            "oidc_issuer needs joserfc, which is not installed: pip install 'polyhost[oidc]'"
        ) from error
    return errors, jwk, jwt


class Provider:
    """One provider, for all threads of a process."""

    def __init__(
        self,
        settings: OidcSettings,
        now_at: Callable[[], float] = time.time,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._errors, self._jwk, self._jwt = require_joserfc()
        self._now_at = now_at
        self._now_s = now_s
        self._lock = threading.Lock()
        self._metadata = _Kept()
        self._keys = _Kept()
        handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
        if is_loopback(urlsplit(settings.oidc_issuer).hostname or ""):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    @property
    def issuer(self) -> str:
        """As its tokens name it."""
        return self._settings.oidc_issuer

    @property
    def name(self) -> str:
        """For people."""
        return self._settings.oidc_name

    def authorization_url(self, state: str, nonce: str, challenge: str) -> str:
        """Where a browser goes to sign in. Raises ProviderAway."""
        at = self.metadata().authorization
        asked = {
            "response_type": "code",
            "client_id": self._settings.oidc_client_id,
            "redirect_uri": self._settings.oidc_redirect_url,
            "scope": self._settings.oidc_scopes,
            "state": state,
            "nonce": nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        return at + ("&" if urlsplit(at).query else "?") + urlencode(asked)

    def end_session_url(self, back: str) -> str:
        """Where a browser goes to sign out there; "": nowhere. Raises ProviderAway."""
        at = self.metadata().end_session
        asked = {"client_id": self._settings.oidc_client_id, "post_logout_redirect_uri": back}
        return at and at + ("&" if urlsplit(at).query else "?") + urlencode(asked)

    def check_sender(self, issuer: str | None) -> None:
        """Raises NotTrusted for a redirect of another provider than the one asked (mix-up)."""
        if issuer is None and not self.metadata().names_issuer:
            return
        if issuer != self.issuer:
            raise NotTrusted(f"the redirect came from {issuer!r}, not from {self.issuer!r}")

    def identity(self, code: str, verifier: str, nonce: str) -> Identity:
        """Whose the code is. Raises ProviderAway, NotTrusted."""
        settings, metadata = self._settings, self.metadata()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": settings.oidc_redirect_url,
            "code_verifier": verifier,
        }
        headers: dict[str, str] = {}
        if settings.oidc_client_secret and metadata.basic:
            pair = (settings.oidc_client_id, settings.oidc_client_secret)
            plain = ":".join(quote(part, safe="") for part in pair)
            headers["authorization"] = "Basic " + base64.b64encode(plain.encode()).decode()
        else:
            form["client_id"] = settings.oidc_client_id
            if settings.oidc_client_secret:
                form["client_secret"] = settings.oidc_client_secret
        answer = self._ask(metadata.token, urlencode(form).encode(), headers)
        token = answer.get("id_token")
        if not isinstance(token, str):
            raise NotTrusted("the provider sent no ID token; add openid to oidc_scopes")
        asked = SignInAttempt(self.issuer, settings.oidc_client_id, nonce, settings.oidc_role_claim)
        claims = self._claims(token)
        return identity_of(claims, asked, self._now_at(), settings.oidc_clock_skew_s)

    def metadata(self) -> Metadata:
        """What discovery says; what it said, where it does not answer now. Raises ProviderAway."""
        found: Metadata = self._fresh(self._metadata, self._discover)
        return found

    def _claims(self, token: str) -> Mapping[str, Any]:
        """Of a token whose signature is the provider's. Raises NotTrusted, ProviderAway."""
        for retry in (False, True):
            keys = self._fresh(self._keys, self._read_keys, anew=retry)
            try:
                found = self._jwt.decode(token, keys, self._settings.signing_algorithms)
            except self._errors.InvalidKeyIdError as error:
                if retry:
                    raise NotTrusted(
                        f"the token was signed with an unknown key: {error}"
                    ) from error
                continue  # the provider may have another key since
            except (self._errors.JoseError, ValueError, TypeError, KeyError) as error:
                accepted = ", ".join(self._settings.signing_algorithms)
                raise NotTrusted(
                    f"the token cannot be verified ({error}); oidc_algorithms allows {accepted}"
                ) from error
            claims: Mapping[str, Any] = found.claims
            return claims
        raise AssertionError

    def _fresh(self, kept: _Kept, read: Callable[[], object], anew: bool = False) -> Any:
        """What was read, read again where it is old; one thread reads, the others wait."""
        with self._lock:
            now_s = self._now_s()
            age_s = now_s - kept.read_s
            if age_s < (REST_S if anew else self._settings.oidc_keys_s):
                return kept.value
            if now_s - kept.failed_s < REST_S:
                if kept.value is None:
                    raise ProviderAway(
                        "the provider did not answer; it will be asked again shortly"
                    )
                return kept.value
            try:
                kept.value = read()
            except ProviderAway as error:
                kept.failed_s = self._now_s()
                logger.error("identity provider %s: %s", self.issuer, error)
                if kept.value is None:
                    raise
            else:
                kept.read_s = now_s
            return kept.value

    def _discover(self) -> Metadata:
        found = self._ask(self.issuer.rstrip("/") + "/.well-known/openid-configuration")
        if found.get("issuer") != self.issuer:
            raise ProviderAway(
                f"its issuer is {found.get('issuer')!r}; set oidc_issuer to exactly this value"
            )
        methods = found.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
        return Metadata(
            authorization=self._address(found, "authorization_endpoint"),
            token=self._address(found, "token_endpoint"),
            keys=self._address(found, "jwks_uri"),
            end_session=self._address(found, "end_session_endpoint")
            if found.get("end_session_endpoint")
            else "",
            names_issuer=found.get("authorization_response_iss_parameter_supported") is True,
            basic="client_secret_basic" in methods,
        )

    def _address(self, found: Mapping[str, Any], name: str) -> str:
        """An address of the provider: https, or loopback where the issuer itself is."""
        text = found.get(name)
        try:
            parts = urlsplit(text if isinstance(text, str) else "")
            host = parts.hostname or ""
        except ValueError:
            host = ""
        local = is_loopback(urlsplit(self.issuer).hostname or "") and is_loopback(host)
        if not isinstance(text, str) or not host or not text.isprintable():
            raise ProviderAway(f"its {name} is not a URL: {text!r}")
        if not (parts.scheme == "https" or (parts.scheme == "http" and local)):
            raise ProviderAway(f"its {name} is not https: {text!r}")
        return text

    def _read_keys(self) -> Any:
        """Keys that sign; those that joserfc cannot read are as if not there."""
        rows = self._ask(self._metadata.value.keys).get("keys")
        found = []
        for row in rows if isinstance(rows, list) else []:
            if not isinstance(row, dict) or row.get("kty") == "oct" or row.get("use") == "enc":
                continue
            try:
                found.append(self._jwk.JWKRegistry.import_key(row))
            except (self._errors.JoseError, ValueError, TypeError, KeyError) as error:
                logger.warning("identity provider %s: a key was ignored: %s", self.issuer, error)
        if not found:
            raise ProviderAway("it has no usable signing keys")
        return self._jwk.KeySet(found)

    def _ask(
        self, url: str, form: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The JSON object there. Raises ProviderAway; NotTrusted where it refuses a form."""
        sent = {"accept": "application/json", **(headers or {})}
        request = urllib.request.Request(url, form, sent)
        deadline_s = self._now_s() + self._settings.oidc_timeout_s
        try:
            with self._opener.open(request, timeout=self._settings.oidc_timeout_s) as answer:
                body = self._body(answer, deadline_s)
        except urllib.error.HTTPError as error:
            with error:
                if form is not None and 400 <= error.code < 500:
                    raise NotTrusted(_refusal(error)) from error
                raise ProviderAway(f"{url} answered with status {error.code}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ProviderAway(f"{url}: {error or type(error).__name__}") from error
        try:
            found = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ProviderAway(f"{url} did not answer with JSON") from error
        if not isinstance(found, dict):
            raise ProviderAway(f"{url} did not answer with a JSON object")
        return found

    def _body(self, answer: Any, deadline_s: float) -> bytes:
        """Raises OSError where it is too long or comes too slowly."""
        body = b""
        while part := answer.read1(_PART_BYTES):
            body += part
            if len(body) > MAX_ANSWER_BYTES:
                raise OSError("the answer is too long")
            if self._now_s() > deadline_s:
                raise TimeoutError("the answer took longer than oidc_timeout_s")
        return body


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A code or a secret goes where discovery said, and nowhere else."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _refusal(error: urllib.error.HTTPError) -> str:
    """What the provider says of a code that it does not take."""
    try:
        found = json.loads(error.read1(_PART_BYTES))
    except (OSError, ValueError, RecursionError, http.client.HTTPException):
        found = None  # whatever it sent: it is a refusal
    names = ("error", "error_description") if isinstance(found, dict) else ()
    parts = [str(found[name])[:200] for name in names if name in found]
    said = ": ".join(parts) or f"status {error.code}"
    return (
        f"the provider rejected the code ({said}); check oidc_client_id, oidc_client_secret and "
        "oidc_redirect_url"
    )
