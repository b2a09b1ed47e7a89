"""The settings of signing in by an identity provider (docs/admin.md)."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from gateway.settings.base_settings import setting

CALLBACK: Final = "/admin/oidc/callback"
EVERYBODY: Final = "*"
ALGORITHMS: Final = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}
    | {"ES256", "ES384", "ES512", "EdDSA", "Ed25519"}
)
"""Signatures whose key the provider alone has; no shared secrets, and never `none`."""


ROLE_RANKS: Final[Mapping[str, int]] = {"viewer": 0, "admin": 1, "owner": 2}


@dataclass(frozen=True, slots=True)
class RoleRule:
    """Who is in `group` has `role`, of a tenant (name or id) or, where it is "", of everything."""

    group: str
    role: str
    tenant: str


def rules_of(text: str) -> tuple[RoleRule, ...]:
    """`GROUP=ROLE` or `GROUP=ROLE@TENANT`, with commas. Raises ValueError."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        group, _, rest = part.rpartition("=")
        role, at, tenant = rest.strip().partition("@")
        if not group.strip() or role not in ROLE_RANKS or (at and not tenant):
            raise ValueError(f"{part!r} is not like GROUP=ROLE or GROUP=ROLE@TENANT")
        found.append(RoleRule(group.strip(), role, tenant))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class OidcSettings:
    """The provider, who may sign in by it, and who by a password."""

    oidc_issuer: str = setting(
        "",
        "URL of the identity provider with which operators sign in, exactly as in the `iss` "
        "claim of its tokens. Empty: users sign in with passwords only.",
    )
    oidc_client_id: str = setting("", "Client ID of this server at the provider.")
    oidc_client_secret: str = setting(
        "", "Client secret of this server at the provider. Empty: only PKCE is used."
    )
    oidc_redirect_url: str = setting(
        "",
        "Redirect URL registered at the provider: this server's address and "
        "`/admin/oidc/callback`.",
    )
    oidc_name: str = setting("single sign-on", "Name of the provider on the sign-in page.")
    oidc_scopes: str = setting(
        "openid email",
        "Scopes to request from the provider, separated by spaces. Must include `openid`.",
    )
    oidc_algorithms: str = setting(
        "RS256",
        "Signature algorithms accepted for the provider's tokens, separated by commas: RS, PS, "
        "ES or EdDSA, never none.",
    )
    oidc_clock_skew_s: float = setting(
        60.0, "Maximum difference between the provider's clock and this machine's.", gt=0.0
    )
    oidc_timeout_s: float = setting(
        5.0, "How long to wait for one response from the provider.", gt=0.0
    )
    oidc_keys_s: float = setting(
        3600.0,
        "How long the provider's endpoints and keys are cached before they are fetched again.",
        gt=0.0,
    )
    oidc_link_by_email: bool = setting(
        False,
        "At the first sign-in, bind the existing user whose name is the e-mail address that the "
        "provider has verified. Use it only with providers that never give an address to another "
        "person.",
    )
    oidc_create_users: bool = setting(
        False,
        "Create a user at the first sign-in if the person has a mapped role. The user's name is "
        "the verified e-mail address.",
    )
    oidc_role_claim: str = setting(
        "",
        "Claim that holds the user's roles, such as `groups` or `realm_access.roles`; roles are "
        "set again at each sign-in. Empty: roles are assigned in Polyhost.",
    )
    oidc_roles: str = setting(
        "",
        "Mapping from values of that claim to roles, separated by commas: `GROUP=ROLE`, or "
        "`GROUP=ROLE@TENANT`.",
    )
    oidc_sign_out: bool = setting(
        False, "After signing out of Polyhost, offer to sign out at the provider too."
    )
    password_users: str = setting(
        EVERYBODY,
        "Users who may sign in with a password, for example when the provider is unavailable, "
        "separated by commas. `*`: all users.",
    )

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
            known = ", ".join(sorted(ALGORITHMS))
            raise ValueError(
                f"oidc_algorithms: {(wrong or [''])[0]!r} is not supported; use some of {known}"
            )
        if bool(rules) != bool(self.oidc_role_claim):
            raise ValueError("oidc_role_claim and oidc_roles need each other: set both or neither")
        if self.oidc_create_users and not rules:
            raise ValueError("oidc_create_users needs oidc_role_claim and oidc_roles: set both")
        if not self.oidc_issuer:
            if self.password_users.strip() != EVERYBODY:
                raise ValueError(
                    "password_users needs oidc_issuer: without a provider, other users could not "
                    "sign in"
                )
            return
        _check_url("oidc_issuer", self.oidc_issuer)
        if not self.oidc_client_id:
            raise ValueError(
                "oidc_issuer needs oidc_client_id: set the client ID that the provider gave you"
            )
        if not self.oidc_redirect_url.endswith(CALLBACK):
            raise ValueError(
                "oidc_issuer needs oidc_redirect_url: set it to this server's public address "
                f"followed by {CALLBACK}"
            )
        _check_url("oidc_redirect_url", self.oidc_redirect_url)
        if "openid" not in self.oidc_scopes.split():
            raise ValueError("oidc_scopes must include openid: add it")


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
        raise ValueError(f"{name} is not a valid URL: {error}") from error
    plain = parts.scheme == "http" and is_loopback(host)
    odd = parts.query or parts.fragment or parts.username or not text.isprintable()
    if not host or odd or not (parts.scheme == "https" or plain):
        raise ValueError(f"{name} must be an https URL without a query (http: loopback only)")


def _words(text: str) -> list[str]:
    return [part for part in (part.strip() for part in text.split(",")) if part]
