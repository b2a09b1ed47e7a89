"""What an identity provider's claims say of somebody, and which roles follow from them. Pure.

The signature was checked before (admin/oidc/provider.py); here the claims are held to what was
asked for: the issuer and the audience to the letter, the nonce, the instants within a skew
(OpenID Connect Core 1.0, 3.1.3.7). Roles follow from the values of one claim by rules such as
`ops=admin` or `acme-people=viewer@acme`; of several for the same place the highest counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.settings.oidc_settings import ROLE_RANKS, RoleRule

MAX_SUBJECT_LEN: Final = 255
MAX_EMAIL_LEN: Final = 128
MAX_AGE_S: Final = 600.0
"""A token that was made longer ago is none that was just asked for."""
_MAX_INSTANT_S: Final = 1e15
_SMALL: Final = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}
"""Of ASCII's capital letters, the small one."""


class NotTrusted(Exception):
    """What came is not what was asked for; the message is for the operator, not for who sent it."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Somebody, as an issuer knows them. `email` "": none that the issuer has verified."""

    issuer: str
    subject: str
    email: str
    groups: frozenset[str]


@dataclass(frozen=True, slots=True)
class SignInAttempt:
    """What a sign-in asked for."""

    issuer: str
    client_id: str
    nonce: str
    role_claim: str = ""


def identity_of(
    claims: Mapping[str, Any], asked: SignInAttempt, now_s: float, skew_s: float
) -> Identity:
    """Raises NotTrusted, which says what is wrong."""
    if claims.get("iss") != asked.issuer:
        raise NotTrusted(
            f"the token is from the issuer {claims.get('iss')!r}, not {asked.issuer!r}"
        )
    _check_audience(claims, asked.client_id)
    _check_instants(claims, now_s, skew_s)
    if not asked.nonce or claims.get("nonce") != asked.nonce:
        raise NotTrusted("the token's nonce does not belong to this sign-in")
    subject = claims.get("sub")
    sound = isinstance(subject, str) and 0 < len(subject) <= MAX_SUBJECT_LEN
    if not isinstance(subject, str) or not sound or not subject.isprintable():
        raise NotTrusted("the token has no valid subject")
    return Identity(asked.issuer, subject, _email(claims), _groups(claims, asked.role_claim))


def roles_of(rules: Sequence[RoleRule], groups: Iterable[str]) -> dict[str, str]:
    """Roles by tenant ("": of everything); empty where no rule is met."""
    inside = frozenset(groups)
    found: dict[str, str] = {}
    for rule in rules:
        if rule.group in inside:
            before = found.get(rule.tenant)
            if before is None or ROLE_RANKS[rule.role] > ROLE_RANKS[before]:
                found[rule.tenant] = rule.role
    return found


def _check_audience(claims: Mapping[str, Any], client_id: str) -> None:
    audience = claims.get("aud")
    every = audience if isinstance(audience, list) else [audience]
    if client_id not in every:
        raise NotTrusted(f"the token is meant for {audience!r}, not for {client_id!r}")
    party = claims.get("azp")
    if (len(every) > 1 or party is not None) and party != client_id:
        raise NotTrusted(f"the token was issued to {party!r}, not to {client_id!r}")


def _check_instants(claims: Mapping[str, Any], now_s: float, skew_s: float) -> None:
    ends_s, made_s = _instant(claims, "exp"), _instant(claims, "iat")
    if now_s >= ends_s + skew_s:
        raise NotTrusted(f"the token expired {now_s - ends_s:.0f} s ago: check the clocks")
    if made_s > now_s + skew_s:
        raise NotTrusted(
            f"the token was issued {made_s - now_s:.0f} s in the future: check the clocks"
        )
    if made_s < now_s - MAX_AGE_S - skew_s:
        raise NotTrusted(f"the token was issued {now_s - made_s:.0f} s ago: check the clocks")
    if "nbf" in claims and _instant(claims, "nbf") > now_s + skew_s:
        raise NotTrusted("the token is not valid yet: check the clocks")


def _instant(claims: Mapping[str, Any], name: str) -> float:
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotTrusted(f"the token has no {name}")
    if not -_MAX_INSTANT_S < value < _MAX_INSTANT_S:  # nor does NaN get past
        raise NotTrusted(f"the token's {name} is not a time")
    return float(value)


def _email(claims: Mapping[str, Any]) -> str:
    """Only what the issuer has verified: others could name themselves as they like.

    ASCII's letters alone become small: of others some would become ASCII's (the Kelvin sign a k),
    and so somebody else's address.
    """
    email = claims.get("email")
    if claims.get("email_verified") is not True or not isinstance(email, str):
        return ""
    email = email.strip().translate(_SMALL)
    local, _, domain = email.rpartition("@")
    sound = email.isprintable() and local and domain and len(email) <= MAX_EMAIL_LEN
    return email if sound else ""


def _groups(claims: Mapping[str, Any], name: str) -> frozenset[str]:
    """The claim's texts: by its name, or by a way such as `realm_access.roles`."""
    if not name:
        return frozenset()
    found: Any = claims.get(name)
    if found is None:
        found = claims
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
    every = [found] if isinstance(found, str) else found if isinstance(found, list) else []
    return frozenset(one for one in every if isinstance(one, str))
