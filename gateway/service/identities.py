"""The verbs on signing in by an identity provider, and on who is known to it as what (control.py).

    take_turn       before a code is taken to the provider: is it this address's turn
    give_back       it was nobody's fault
    sign_in_as      an identity that the provider has vouched for becomes a session's token
    bindings_of     what a user is known as
    bind, unbind    by who may write the installation's users

Who is bound to nobody is refused, unless the settings let a verified e-mail address find or make a
user. Where roles come from a claim, they are set anew at each sign-in.
"""

import hashlib
import logging
import secrets
from dataclasses import replace

from sqlalchemy.orm import Session

from gateway.policy import sign_in_guard
from gateway.policy.identity import Identity, roles_of, rules_of
from gateway.service import sessions
from gateway.service.control import Control, acting_as, require
from gateway.service.sessions import SignInRefused
from registry import audit, identities, sign_ins, user_sessions, users
from registry.errors import RegistryError
from registry.identities import IdentityRecord
from registry.sign_ins import Turn
from registry.users import UserRecord

USED_FORGET_S = 3600.0
_PASSWORD_BYTES = 32

logger = logging.getLogger(__name__)


def take_turn(control: Control, address: str) -> Turn:
    """Count one failure of this address, until `sign_in_as` or `give_back` takes it back, so that
    codes side by side cannot get past the count. Raises SignInRefused, which says how long to
    wait."""
    against = sign_in_guard.code_subjects(sessions.network_of(address))
    return sessions.take_turn(control, against, (sign_in_guard.CODE,))


def give_back(control: Control, turn: Turn) -> None:
    """The provider did not answer: that was no guess."""
    with control.writing() as session:
        sign_ins.take_back(session, turn)


def sign_in_as(
    control: Control, who: Identity, state: str, address: str, agent: str, turn: Turn
) -> str:
    """A session's token. `state`: of this one sign-in, which makes one session; `turn`: as
    `take_turn` gave it. Raises SignInRefused, which says what an owner can do."""
    try:
        with control.writing() as session:
            now_at = control.clock()
            digest = hashlib.sha256(state.encode()).hexdigest()
            if not identities.use_up(session, digest, now_at=now_at, forget_s=USED_FORGET_S):
                raise SignInRefused("This sign-in has been used already: begin again.")
            roles = _roles(control, session, who)
            user = _find(control, session, who, roles, now_at)
            if user.disabled:
                raise SignInRefused("This user is shut out: ask an owner.")
            if roles is not None:
                user = _set_roles(session, user, roles, now_at)
            lifetime_s = control.settings.admin_session_s
            token = user_sessions.begin(
                *(session, user.id, lifetime_s),
                now_at=now_at, address=address, agent=agent, issuer=who.issuer,
            )  # fmt: skip
            actor = acting_as(control, user).actor
            sign_ins.take_back(session, turn)
            told = {"address": address, "by": who.issuer}
            audit.append(session, actor, "session.begin", user.name, None, told, now_at=now_at)
    except SignInRefused as refused:
        logger.warning(
            "sign-in refused issuer=%s subject=%r email=%r address=%s: %s",
            *(who.issuer, who.subject, who.email, address, refused),
        )
        raise
    except RegistryError as error:  # such as roles of a tenant that is not there
        logger.error("sign-in by %s failed: %s", who.issuer, error)
        raise SignInRefused(f"This could not be done: {error}") from error
    return token


def bindings_of(control: Control, name: str) -> list[IdentityRecord]:
    """What a user is known as."""
    require(control, "users.read")
    with control.reading() as session:
        return identities.identities_of(session, users.get_user(session, name).id)


def bind(control: Control, name: str, subject: str, issuer: str = "") -> IdentityRecord:
    """The subject is this user; `issuer` "": the one of the settings. Raises RegistryError."""
    require(control, "users.write")
    with control.writing() as session:
        at = issuer or _issuer(control)
        return identities.bind(session, name, at, subject, now_at=control.clock())


def unbind(control: Control, name: str, issuer: str = "") -> UserRecord:
    """No longer; the user's sessions end. Raises RegistryError."""
    require(control, "users.write")
    with control.writing() as session:
        now_at = control.clock()
        at = issuer or _issuer(control)
        user = identities.unbind(session, name, at, now_at=now_at)
        user_sessions.revoke_all(session, user.id, now_at=now_at)
        return user


def _issuer(control: Control) -> str:
    found = control.settings.oidc_issuer
    if not found:
        raise RegistryError("no identity provider is set: set oidc_issuer, or name the issuer")
    return found


def _roles(control: Control, session: Session, who: Identity) -> dict[str, str] | None:
    """By tenant's id, whether rules say its name or its id; None: they are given here."""
    settings = control.settings
    if not settings.oidc_role_claim:
        return None
    met = [rule for rule in rules_of(settings.oidc_roles) if rule.group in who.groups]
    placed = [replace(rule, tenant=users.tenant_id_of(session, rule.tenant)) for rule in met]
    found = roles_of(placed, who.groups)
    if not found:
        raise SignInRefused("The provider names no group of yours that has a role here.")
    return found


def _find(
    control: Control, session: Session, who: Identity, roles: dict[str, str] | None, now_at: float
) -> UserRecord:
    """Raises SignInRefused."""
    user = identities.find_user(session, who.issuer, who.subject)
    if user is not None:
        return user
    settings = control.settings
    named = [one for one in users.list_users(session) if who.email and one.name == who.email]
    if named and settings.oidc_link_by_email:
        user = named[0]
        if any(one.issuer == who.issuer for one in identities.identities_of(session, user.id)):
            raise SignInRefused(
                f"{user.name} is bound to another account of the provider: an owner unbinds it."
            )
    elif who.email and not named and settings.oidc_create_users and roles:
        (tenant, role), *_ = roles.items()
        password = secrets.token_urlsafe(_PASSWORD_BYTES)  # nobody knows it
        user = users.create_user(session, who.email, password, role, tenant, now_at=now_at)
    else:
        raise SignInRefused(
            f"No user here is bound to your account, {who.subject}: an owner binds it "
            f"(polyhost users bind NAME {who.subject})."
        )
    identities.bind(session, user.name, who.issuer, who.subject, now_at=now_at)
    return user


def _set_roles(
    session: Session, user: UserRecord, roles: dict[str, str], now_at: float
) -> UserRecord:
    """Exactly these, given before others are taken, so that an owner stays one on the way."""
    for tenant_id, role in roles.items():
        if user.roles.get(tenant_id) != role:
            users.set_role(session, user.name, role, tenant_id, now_at=now_at)
    for tenant_id in user.roles.keys() - roles.keys():
        users.set_role(session, user.name, None, tenant_id, now_at=now_at)
    return users.get_user(session, user.id)
