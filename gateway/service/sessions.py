"""The verbs on signing in and on sessions, for the operator's pages (control.py).

    sign_in              a name and a password become a session's token, if it is their turn
    who                  a token becomes a user and what that user may do
    sign_out             the end of it
    list_sessions        one's own, or of all for whoever may see users
    end_session
    change_own_password  needs the present one; all of the user's sessions end

A token is a secret: it is in no log, no audit entry and no message.
"""

import ipaddress
import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from gateway.policy import permissions, sign_in_guard
from gateway.policy.sign_in_guard import Guard
from gateway.service.control import Control, acting_as, require
from registry import audit, sign_ins, user_sessions, users
from registry.errors import InvalidValue, RegistryBusy, RegistryError
from registry.session import appending, busy_is_told
from registry.sign_ins import Failures, Turn
from registry.user_sessions import SessionRecord
from registry.users import UserRecord

TOUCH_S = 30.0
"""A session's last use is written down this often at most."""
MAX_NAME_LEN = 128

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
    control: Control
    """Acts in the user's name, with the user's rights."""


def sign_in(control: Control, name: str, password: str, address: str, agent: str) -> str:
    """A session's token. Raises SignInRefused.

    The attempt is counted as failed before the password is looked at, and taken back when it was
    right: attempts side by side cannot get past the count.
    """
    name = name[:MAX_NAME_LEN]
    against = sign_in_guard.subjects(name, network_of(address))
    turn = take_turn(control, against)
    began_at = control.clock()  # a password that is changed from here on ends this session too
    with control.reading() as session:
        user = users.authenticate(session, name, password)
    if user is None or not control.settings.may_use_password(user.name):
        logger.warning("sign-in refused user=%r address=%s", name, address)
        raise SignInRefused("That name and password do not go together.")
    with acting_as(control, user).writing() as session:
        now_at = control.clock()
        if users.get_user(session, user.id).disabled:  # meanwhile
            raise SignInRefused("That name and password do not go together.")
        sign_ins.forget(session, against[0])
        sign_ins.take_back(session, turn)
        lifetime_s = control.settings.admin_session_s
        token = user_sessions.begin(
            session, user.id, lifetime_s, now_at=began_at, address=address, agent=agent
        )
        told = {"address": address}
        audit.append(
            session, f"admin:{user.name}", "session.begin", user.name, None, told, now_at=now_at
        )
    return token


def who(control: Control, token: str, is_use: bool = True) -> SignedIn | None:
    """Whose token it is; None where it is nobody's, or the session has ended.

    `is_use`: a person did something, so the session is not idle; a page that follows by itself
    does not keep it alive.
    """
    now_at, idle_s = control.clock(), control.settings.admin_idle_s
    with control.reading() as session:
        found = user_sessions.find(session, token, now_at=now_at, idle_s=idle_s)
        user = None if found is None else users.get_user(session, found.user_id)
    if found is None or user is None:
        return None
    if is_use and now_at - found.seen_at >= TOUCH_S:
        # Where others write for long, the next page notes it.
        with (
            suppress(RegistryBusy),
            busy_is_told(),
            appending(control.engine, "gateway") as session,
        ):
            user_sessions.touch(session, token, now_at=now_at)
    return SignedIn(user, found, acting_as(control, user))


def ended(control: Control, tokens: Collection[str]) -> frozenset[str]:
    """Those of the tokens whose sessions hold no more: ended, idle, or of who was shut out."""
    now_at, idle_s = control.clock(), control.settings.admin_idle_s
    with control.reading() as session:
        return frozenset(
            token
            for token in tokens
            if user_sessions.user_of(session, token, now_at=now_at, idle_s=idle_s) is None
        )


def sign_out(control: Control, token: str) -> None:
    """The session is over, for whoever has the token."""
    with control.writing() as session:
        user_sessions.revoke(session, token, now_at=control.clock())


def list_sessions(me: SignedIn) -> list[SessionRecord]:
    """Sessions that have not ended: one's own, or everybody's for who may write users."""
    control = me.control
    every = permissions.allowed(control.grants, "users.write")
    with control.reading() as session:
        return user_sessions.list_sessions(
            session,
            "" if every else me.user.id,
            now_at=control.clock(),
            idle_s=control.settings.admin_idle_s,
        )


def end_session(me: SignedIn, session_id: str) -> None:
    """One's own, or anybody's for who may write users. Raises RegistryError."""
    control, now_at = me.control, me.control.clock()
    with control.writing() as session:
        owner = user_sessions.owner_of(session, session_id)
        if owner != me.user.id:
            require(control, "users.write")
        user_sessions.revoke_by_id(session, session_id, now_at=now_at)
        ended = users.get_user(session, owner).name
        audit.append(
            session, control.actor, "session.end", ended, None, {"by": "hand"}, now_at=now_at
        )


def change_own_password(me: SignedIn, present: str, password: str, address: str) -> None:
    """Another password for oneself; all of one's sessions end. Raises RegistryError."""
    control = me.control
    against = sign_in_guard.subjects(me.user.name, network_of(address))
    turn = take_turn(control, against)
    with control.reading() as session:
        right = users.authenticate(session, me.user.name, present) is not None
    if not right:
        raise InvalidValue("This is not your present password.")
    with control.writing() as session:
        sign_ins.forget(session, against[0])
        sign_ins.take_back(session, turn)
        users.set_password(session, me.user.name, password, now_at=control.clock())


def take_turn(
    control: Control, against: Sequence[str], guards: Sequence[Guard] = sign_in_guard.GUARDS
) -> Turn:
    """Count one failure, for `take_back`. Raises SignInRefused where it is not time for another
    try."""
    with control.reading() as session:  # who has to wait writes nothing
        _check_wait(sign_ins.failures(session, against), control.clock(), guards)
    with control.writing() as session:
        now_at = control.clock()
        _check_wait(sign_ins.failures(session, against), now_at, guards)
        forget_s = sign_in_guard.FORGET_S
        return sign_ins.count_up(session, against, now_at=now_at, forget_s=forget_s)


def _check_wait(found: list[Failures], now_at: float, guards: Sequence[Guard]) -> None:
    pairs = [(row.num_failed, row.failed_at) for row in found]
    wait_s = sign_in_guard.wait_s(pairs, now_at, guards)
    if wait_s > 0:
        raise SignInRefused("Too many tries: wait, then try again.", wait_s)


def network_of(address: str) -> str:
    """What somebody has at hand: an address, or of IPv6 a network of 64 bits."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if parsed.version == 6:
        return str(ipaddress.ip_network(f"{address.partition('%')[0]}/64", strict=False))
    return str(parsed)
