"""Signing in, by a password or by an identity provider, and sessions.

    sign_in               a name and a password become a session's token, if it is their turn
    take_code_turn        counts a failure of an address before a code goes to the provider
    give_back             takes it back: the provider did not answer
    sign_in_as            an identity that the provider has vouched for becomes a session's token
    remember              what a browser is known by afterwards, for failures to count apart
    who                   a token becomes a user and what that user may do
    sign_out              the end of it

These make a user of a request, so they are no operations. What a signed-in user does is one:
listing and ending sessions, and another password for oneself, which ends all of one's sessions.

A user who is bound to no identity is refused, unless the settings let a verified e-mail address
find or make a user. Where roles come from a claim, they are set anew at each sign-in. A token is a
secret: it is in no log, no audit entry and no message.
"""

import hashlib
import ipaddress
import logging
import secrets
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from sqlalchemy.orm import Session

from admin.context.operation import operation
from admin.context.operator_context import OperatorContext, acting_as, require
from admin.context.policy import permissions
from admin.oidc.policy.identity import Identity, roles_of
from admin.operations.policy import sign_in_guard
from admin.operations.policy.sign_in_guard import Guard
from gateway.settings.oidc_settings import rules_of
from registry import audit
from registry.accounts import identities, known_browsers, user_sessions, users
from registry.accounts.known_browsers import KnownBrowser
from registry.accounts.user_sessions import Failures, SessionRecord, Turn
from registry.accounts.users import UserRecord
from registry.errors import InvalidValue, RegistryBusy, RegistryError
from registry.session import appending, report_busy

TOUCH_S = 30.0
"""A session's last use is written down this often at most."""
MAX_NAME_LEN = 128
USED_FORGET_S = 3600.0
_PASSWORD_BYTES = 32

logger = logging.getLogger(__name__)


class SignInRefused(RegistryError):
    """Wrong name or password, or too many tries; `wait_s` says how long to wait, if at all."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class SignedIn:
    """Who asks, by a session that holds."""

    user: UserRecord
    session: SessionRecord
    operator: OperatorContext
    """Acts in the user's name, with the user's rights."""


def sign_in(
    context: OperatorContext, name: str, password: str, address: str, agent: str, browser: str = ""
) -> str:
    """A session's token. `browser`: what `remember` gave it, if anything. Raises SignInRefused.

    The attempt is counted as failed before the password is looked at, and taken back when it was
    right: attempts side by side cannot get past the count.
    """
    name = name[:MAX_NAME_LEN]
    against, guards = _against(context, name, address, browser)
    turn = take_turn(context, against, guards)
    began_at = context.clock()  # a password that is changed from here on ends this session too
    with context.reading() as session:
        user = users.authenticate(session, name, password)
    if user is None or not context.settings.may_use_password(user.name):
        logger.warning("sign-in refused user=%r address=%s", name, address)
        raise SignInRefused("Wrong user name or password.")
    with acting_as(context, user).writing() as session:
        now_at = context.clock()
        if users.get_user(session, user.id).disabled:  # meanwhile
            raise SignInRefused("Wrong user name or password.")
        user_sessions.forget(session, against[0])
        user_sessions.take_back(session, turn)
        lifetime_s = context.settings.admin_session_s
        token = user_sessions.begin(
            session, user.id, lifetime_s, now_at=began_at, address=address, agent=agent
        )
        shown = {"address": address}
        audit.append(
            session, f"admin:{user.name}", "session.begin", user.name, None, shown, now_at=now_at
        )
    return token


def who(context: OperatorContext, token: str, is_use: bool = True) -> SignedIn | None:
    """Whose token it is; None where it is nobody's, or the session has ended.

    `is_use`: a person did something, so the session is not idle; a page that follows by itself
    does not keep it alive.
    """
    now_at, idle_s = context.clock(), context.settings.admin_idle_s
    with context.reading() as session:
        found = user_sessions.find(session, token, now_at=now_at, idle_s=idle_s)
        user = None if found is None else users.get_user(session, found.user_id)
    if found is None or user is None:
        return None
    if is_use and now_at - found.seen_at >= TOUCH_S:
        # Where others write for long, the next page notes it.
        with (
            suppress(RegistryBusy),
            report_busy(),
            appending(context.engine, "gateway") as session,
        ):
            user_sessions.touch(session, token, now_at=now_at)
    return SignedIn(user, found, acting_as(context, user))


def ended(context: OperatorContext, tokens: Collection[str]) -> frozenset[str]:
    """Those of the tokens whose sessions hold no more: ended, idle, or of who was shut out."""
    now_at, idle_s = context.clock(), context.settings.admin_idle_s
    with context.reading() as session:
        return frozenset(
            token
            for token in tokens
            if user_sessions.user_of(session, token, now_at=now_at, idle_s=idle_s) is None
        )


def sign_out(context: OperatorContext, token: str) -> None:
    """The session is over, for whoever has the token."""
    with context.writing() as session:
        user_sessions.revoke(session, token, now_at=context.clock())


@operation(on="own")
def list_sessions(context: OperatorContext) -> list[SessionRecord]:
    """Sessions that have not ended: one's own, or everybody's for who may write users."""
    every = permissions.allowed(context.grants, "users.write")
    with context.reading() as session:
        return user_sessions.list_sessions(
            session,
            "" if every else context.user_id,
            now_at=context.clock(),
            idle_s=context.settings.admin_idle_s,
        )


@operation(on="own", audit=("session.end",))
def end_session(context: OperatorContext, session_id: str) -> None:
    """One's own, or anybody's for who may write users. Raises RegistryError."""
    now_at = context.clock()
    with context.writing() as session:
        owner = user_sessions.owner_of(session, session_id)
        if owner != context.user_id:
            require(context, "users.write")
        user_sessions.revoke_by_id(session, session_id, now_at=now_at)
        ended = users.get_user(session, owner).name
        audit.append(
            session, context.actor, "session.end", ended, None, {"by": "hand"}, now_at=now_at
        )


@operation(on="own", audit=("user.password",))
def change_own_password(
    context: OperatorContext, present: str, password: str, address: str, browser: str = ""
) -> None:
    """Another password for oneself; all of one's sessions end. Raises RegistryError."""
    with context.reading() as session:
        name = users.get_user(session, context.user_id).name
    against, guards = _against(context, name, address, browser)
    turn = take_turn(context, against, guards)
    with context.reading() as session:
        right = users.authenticate(session, name, present) is not None
    if not right:
        raise InvalidValue("The current password is wrong.")
    with context.writing() as session:
        user_sessions.forget(session, against[0])
        user_sessions.take_back(session, turn)
        users.set_password(session, name, password, now_at=context.clock())


def remember(context: OperatorContext, user_id: str) -> str:
    """What the browser in which this user has signed in is known by from now on."""
    with context.reading() as session:
        return known_browsers.remember(session, user_id, now_at=context.clock())


def _against(
    context: OperatorContext, name: str, address: str, browser: str
) -> tuple[Sequence[str], Sequence[Guard]]:
    """What an attempt counts against: the browser where it is known as this user's, or else the
    name and the address."""
    known = _known(context, browser)
    if known is not None and known.user_name == name:
        return sign_in_guard.browser_subjects(known.user_id, known.id), (sign_in_guard.BROWSER,)
    return sign_in_guard.subjects(name, network_of(address)), sign_in_guard.GUARDS


def _known(context: OperatorContext, browser: str) -> KnownBrowser | None:
    if not browser:
        return None
    with context.reading() as session:
        return known_browsers.find(session, browser, now_at=context.clock())


def take_turn(context: OperatorContext, against: Sequence[str], guards: Sequence[Guard]) -> Turn:
    """Count one failure, for `take_back`. Raises SignInRefused where it is not time for another
    try."""
    with context.reading() as session:  # who has to wait writes nothing
        _check_wait(user_sessions.failures(session, against), context.clock(), guards)
    with context.writing() as session:
        now_at = context.clock()
        _check_wait(user_sessions.failures(session, against), now_at, guards)
        forget_s = sign_in_guard.FORGET_S
        return user_sessions.count_up(session, against, now_at=now_at, forget_s=forget_s)


def _check_wait(found: list[Failures], now_at: float, guards: Sequence[Guard]) -> None:
    pairs = [(row.num_failed, row.failed_at) for row in found]
    wait_s = sign_in_guard.wait_s(pairs, now_at, guards)
    if wait_s > 0:
        said = f"{wait_s:.0f} s" if wait_s < 100 else f"{wait_s / 60:.0f} min"
        raise SignInRefused(f"Too many attempts. Try again in {said}.", wait_s)


def network_of(address: str) -> str:
    """What somebody has at hand: an address, or of IPv6 a network of 64 bits."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if parsed.version == 6:
        return str(ipaddress.ip_network(f"{address.partition('%')[0]}/64", strict=False))
    return str(parsed)


def take_code_turn(context: OperatorContext, address: str, browser: str = "") -> Turn:
    """Count one failure of this address, or of a browser that is known as some user's, until
    `sign_in_as` or `give_back` takes it back, so that codes side by side cannot get past the
    count. Raises SignInRefused, which says how long to wait."""
    known = _known(context, browser)
    if known is not None:
        against = sign_in_guard.browser_subjects(known.user_id, known.id)
        return take_turn(context, against, (sign_in_guard.BROWSER,))
    against = sign_in_guard.code_subjects(network_of(address))
    return take_turn(context, against, (sign_in_guard.CODE,))


def give_back(context: OperatorContext, turn: Turn) -> None:
    """The provider did not answer: that was no guess."""
    with context.writing() as session:
        user_sessions.take_back(session, turn)


def sign_in_as(
    context: OperatorContext, who: Identity, state: str, address: str, agent: str, turn: Turn
) -> str:
    """A session's token. `state`: of this one sign-in, which makes one session; `turn`: as
    `take_code_turn` gave it. Raises SignInRefused, which says what an owner can do."""
    try:
        with context.writing() as session:
            now_at = context.clock()
            digest = hashlib.sha256(state.encode()).hexdigest()
            if not identities.use_up(session, digest, now_at=now_at, forget_s=USED_FORGET_S):
                raise SignInRefused("This sign-in was already used. Start again.")
            roles = _roles(context, session, who)
            user = _find(context, session, who, roles, now_at)
            if user.disabled:
                raise SignInRefused("This user is disabled. Ask an owner to enable it.")
            if roles is not None:
                user = _set_roles(session, user, roles, now_at)
            lifetime_s = context.settings.admin_session_s
            token = user_sessions.begin(
                *(session, user.id, lifetime_s),
                now_at=now_at, address=address, agent=agent, issuer=who.issuer,
            )  # fmt: skip
            actor = acting_as(context, user).actor
            user_sessions.take_back(session, turn)
            shown = {"address": address, "by": who.issuer}
            audit.append(session, actor, "session.begin", user.name, None, shown, now_at=now_at)
    except SignInRefused as refused:
        logger.warning(
            "sign-in refused issuer=%s subject=%r email=%r address=%s: %s",
            *(who.issuer, who.subject, who.email, address, refused),
        )
        raise
    except RegistryError as error:  # such as roles of a tenant that is not there
        logger.error("sign-in by %s failed: %s", who.issuer, error)
        raise SignInRefused(f"The sign-in failed: {error}") from error
    return token


def _roles(context: OperatorContext, session: Session, who: Identity) -> dict[str, str] | None:
    """By tenant's id, whether rules say its name or its id; None: they are given here."""
    settings = context.settings
    if not settings.oidc_role_claim:
        return None
    met = [rule for rule in rules_of(settings.oidc_roles) if rule.group in who.groups]
    placed = [replace(rule, tenant=users.tenant_id_of(session, rule.tenant)) for rule in met]
    found = roles_of(placed, who.groups)
    if not found:
        raise SignInRefused("None of your groups at the provider has a role here. Ask an owner.")
    return found


def _find(
    context: OperatorContext,
    session: Session,
    who: Identity,
    roles: dict[str, str] | None,
    now_at: float,
) -> UserRecord:
    """Raises SignInRefused."""
    user = identities.find_user(session, who.issuer, who.subject)
    if user is not None:
        return user
    settings = context.settings
    named = [one for one in users.list_users(session) if who.email and one.name == who.email]
    if named and settings.oidc_link_by_email:
        user = named[0]
        if any(one.issuer == who.issuer for one in identities.identities_of(session, user.id)):
            raise SignInRefused(
                f"{user.name} is bound to another account of the provider. "
                "Ask an owner to unbind it."
            )
    elif who.email and not named and settings.oidc_create_users and roles:
        (tenant, role), *_ = roles.items()
        password = secrets.token_urlsafe(_PASSWORD_BYTES)  # nobody knows it
        user = users.create_user(session, who.email, password, role, tenant, now_at=now_at)
    else:
        raise SignInRefused(
            f"No user is bound to your account {who.subject}. Ask an owner to run "
            f"`polyhost users bind NAME {who.subject}`."
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
