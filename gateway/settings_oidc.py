"""The settings of signing in by an identity provider (docs/admin.md)."""

import ipaddress
from typing import Annotated, Final
from urllib.parse import urlsplit

from gateway.policy.identity import rules_of
from gateway.settings_cache import CacheSettings
from gateway.settings_kinds import Seconds, doc

CALLBACK: Final = "/admin/oidc/callback"
EVERYBODY: Final = "*"
ALGORITHMS: Final = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}
    | {"ES256", "ES384", "ES512", "EdDSA", "Ed25519"}
)
"""Signatures whose key the provider alone has; no shared secrets, and never `none`."""


class OidcSettings(CacheSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of `settings.Settings`."""

    oidc_issuer: Annotated[
        str,
        doc(
            "Address of the identity provider by which operators sign in, exactly as it names "
            "itself in its tokens; empty: by passwords alone."
        ),
    ] = ""
    oidc_client_id: Annotated[str, doc("What the provider calls this server.")] = ""
    oidc_client_secret: Annotated[
        str, doc("What this server proves itself to the provider with; empty: PKCE alone.")
    ] = ""
    oidc_redirect_url: Annotated[
        str,
        doc(
            "Where the provider sends browsers back to, as it is registered there: this server's "
            "address and `/admin/oidc/callback`."
        ),
    ] = ""
    oidc_name: Annotated[str, doc("What the sign-in page calls the provider.")] = "single sign-on"
    oidc_scopes: Annotated[str, doc("What is asked of the provider, with blanks.")] = "openid email"
    oidc_algorithms: Annotated[
        str,
        doc("How its tokens may be signed, with commas: RS, PS, ES or EdDSA, never none."),
    ] = "RS256"
    oidc_clock_skew_s: Annotated[
        float, Seconds, doc("How far the provider's clock and this machine's may differ.")
    ] = 60.0
    oidc_timeout_s: Annotated[
        float, Seconds, doc("How long the provider may take for one answer.")
    ] = 5.0
    oidc_keys_s: Annotated[
        float,
        Seconds,
        doc("How long the provider's addresses and keys are believed before they are read anew."),
    ] = 3600.0
    oidc_link_by_email: Annotated[
        bool,
        doc(
            "At a first sign-in, bind the user whose name is the e-mail address that the provider "
            "has verified; only for providers that give an address to nobody else."
        ),
    ] = False
    oidc_create_users: Annotated[
        bool, doc("Make a user, named by the verified e-mail address, of who has a mapped role.")
    ] = False
    oidc_role_claim: Annotated[
        str,
        doc(
            "Claim whose values say the roles, set anew at each sign-in, such as `groups` or "
            "`realm_access.roles`; empty: roles are given here."
        ),
    ] = ""
    oidc_roles: Annotated[
        str,
        doc("Which role a value gives, with commas: `GROUP=ROLE`, or `GROUP=ROLE@TENANT`."),
    ] = ""
    oidc_sign_out: Annotated[
        bool, doc("Offer the end of the session at the provider too, after signing out here.")
    ] = False
    password_users: Annotated[
        str,
        doc(
            "Users who may sign in with a password, with commas, for when the provider is away; "
            "`*`: everybody."
        ),
    ] = EVERYBODY

    @property
    def signing_algorithms(self) -> list[str]:
        """Of `oidc_algorithms`."""
        return _words(self.oidc_algorithms)

    def may_use_password(self, user: str) -> bool:
        """Whether this user's password opens anything."""
        return self.password_users.strip() == EVERYBODY or user in _words(self.password_users)

    def check_oidc(self) -> None:
        """Raises ValueError where fields contradict one another; it says what to set."""
        try:
            rules = rules_of(self.oidc_roles)
        except ValueError as error:
            raise ValueError(f"oidc_roles: {error}") from error
        wrong = [name for name in self.signing_algorithms if name not in ALGORITHMS]
        if wrong or not self.signing_algorithms:
            said = ", ".join(sorted(ALGORITHMS))
            raise ValueError(f"oidc_algorithms: {(wrong or [''])[0]!r} is none of {said}")
        if bool(rules) != bool(self.oidc_role_claim):
            raise ValueError("oidc_role_claim and oidc_roles go together: set both or none")
        if self.oidc_create_users and not rules:
            raise ValueError("oidc_create_users needs oidc_role_claim and oidc_roles: set them")
        if not self.oidc_issuer:
            if self.password_users.strip() != EVERYBODY:
                raise ValueError("password_users needs oidc_issuer: nobody else could sign in")
            return
        _check_url("oidc_issuer", self.oidc_issuer)
        if not self.oidc_client_id:
            raise ValueError(
                "oidc_issuer needs oidc_client_id, what the provider calls this server"
            )
        if not self.oidc_redirect_url.endswith(CALLBACK):
            raise ValueError(
                "oidc_issuer needs oidc_redirect_url: this server's address, as browsers know it, "
                f"and {CALLBACK}"
            )
        _check_url("oidc_redirect_url", self.oidc_redirect_url)
        if "openid" not in self.oidc_scopes.split():
            raise ValueError("oidc_scopes must have openid among them")


def is_loopback(host: str) -> bool:
    """Whether it is this machine, by its own name or address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_url(name: str, text: str) -> None:
    try:
        parts = urlsplit(text)
        host = parts.hostname or ""
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"{name} is no address: {error}") from error
    plain = parts.scheme == "http" and is_loopback(host)
    odd = parts.query or parts.fragment or parts.username or not text.isprintable()
    if not host or odd or not (parts.scheme == "https" or plain):
        raise ValueError(f"{name} must be an https address without a query (http: loopback only)")


def _words(text: str) -> list[str]:
    return [part for part in (part.strip() for part in text.split(",")) if part]
