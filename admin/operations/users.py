"""Operations on users.

Whoever may write the installation's users may do everything here. An owner of a tenant decides
which roles users have for that tenant, and no more: accounts and passwords are the installation's.
"""

import logging
import secrets
from dataclasses import dataclass, replace

from admin.context.operation import operation
from admin.context.operator_context import (
    OperatorContext,
    find_tenant,
    open_context,
    require,
    visible,
)
from admin.context.optimistic_lock import check_unchanged, version_of
from admin.context.policy.permissions import INSTALLATION
from admin.operations.policy import sign_in_guard
from admin.operations.sessions import network_of
from gateway.settings.settings import Settings
from registry import audit
from registry.accounts import identities, user_sessions, users
from registry.accounts.identities import IdentityRecord
from registry.accounts.users import UserRecord
from registry.base import JsonObject
from registry.errors import RegistryError

ADMIN = "admin"
MAX_LOCKS = 200
_PASSWORD_BYTES = 15

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SignInLock:
    """Attempts to sign in that have to wait. `kind`: the prefix of a guard of sign_in_guard.py."""

    kind: str
    address: str
    name: str
    num_failed: int
    wait_s: float


@operation("users.write", audit=("user.create",))
def create_user(
    context: OperatorContext, name: str, password: str, role: str, tenant: str = ""
) -> UserRecord:
    """A new user with a role for the installation, or for a tenant."""
    with context.writing() as session:
        return users.create_user(session, name, password, role, tenant, now_at=context.clock())


@operation("users.read", on="tenant")
def list_users(context: OperatorContext) -> list[UserRecord]:
    """All users; to an owner of tenants, those who have a role for one of them, and that role."""
    seen = visible(context, "users.read")
    with context.reading() as session:
        every = users.list_users(session)
    return [_as_seen(user, seen) for user in every if seen is None or seen & user.roles.keys()]


@operation("users.write", on="tenant", audit=("user.role",))
def set_role(
    context: OperatorContext, name: str, role: str | None, tenant: str = "", seen: str = ""
) -> UserRecord:
    """A user's role for the installation or for a tenant; None takes it away. `seen`: the mark of
    the roles that were looked at. Raises ChangedMeanwhile where they are others by now."""
    with context.writing() as session:
        if tenant:
            tenant = find_tenant(context, session, tenant, "users.write").id
        else:
            require(context, "users.write")
        if seen:
            known = _as_seen(users.get_user(session, name), visible(context, "users.read"))
            check_unchanged(f"the roles of {name!r}", roles_mark(known), seen)
        user = users.set_role(session, name, role, tenant, now_at=context.clock())
    return _as_seen(user, visible(context, "users.read"))


def roles_mark(user: UserRecord) -> str:
    """Of the user's roles, as far as who asks may see them."""
    return version_of(user.roles)


@operation(
    "users.write",
    audit=(
        "user.disable",
        "user.enable",
    ),
)
def set_user_disabled(context: OperatorContext, name: str, disabled: bool) -> UserRecord:
    """Whether the user is let in. Sessions of who is shut out do not come back."""
    with context.writing() as session:
        now_at = context.clock()
        user = users.set_disabled(session, name, disabled, now_at=now_at)
        if disabled:
            user_sessions.revoke_all(session, user.id, now_at=now_at)
    return user


@operation("users.write", audit=("user.password",))
def set_password(context: OperatorContext, name: str, password: str) -> UserRecord:
    """Another password; the user's sessions end."""
    with context.writing() as session:
        return users.set_password(session, name, password, now_at=context.clock())


@operation("users.write", audit=("user.remove",))
def remove_user(context: OperatorContext, name: str) -> UserRecord:
    """The user is gone; the name stays in the audit log."""
    with context.writing() as session:
        return users.remove_user(session, name, now_at=context.clock())


def ensure_admin(settings: Settings) -> str:
    """At a server's start: the user `admin`, with the setting's password or a new one.

    Where there is that user already, it keeps the password that was set since; where there are
    others and no password is given, nobody is added. Returns the password where it was made up
    here: it is to be shown once, and is nowhere to be had afterwards.
    """
    with open_context(settings, "server") as context, context.writing() as session:
        known = [user.name for user in users.list_users(session)]
        if ADMIN in known or (known and not settings.admin_password):
            return ""
        made = "" if settings.admin_password else secrets.token_urlsafe(_PASSWORD_BYTES)
        password, now_at = settings.admin_password or made, context.clock()
        users.create_user(session, ADMIN, password, "owner", INSTALLATION, now_at=now_at)
    logger.info("created the user %s", ADMIN)
    return made


def _as_seen(user: UserRecord, seen: frozenset[str] | None) -> UserRecord:
    """Without roles for what who asks may not see."""
    if seen is None:
        return user
    roles = {tenant_id: role for tenant_id, role in user.roles.items() if tenant_id in seen}
    names = {tenant_id: user.tenant_names[tenant_id] for tenant_id in roles}
    return replace(user, roles=roles, tenant_names=names)


@operation("users.read")
def bindings_of(context: OperatorContext, name: str) -> list[IdentityRecord]:
    """What a user is known as."""
    with context.reading() as session:
        return identities.identities_of(session, users.get_user(session, name).id)


@operation("users.write", audit=("user.bind",))
def bind(context: OperatorContext, name: str, subject: str, issuer: str = "") -> IdentityRecord:
    """The subject is this user; `issuer` "": the one of the settings. Raises RegistryError."""
    with context.writing() as session:
        at = issuer or _issuer(context)
        return identities.bind(session, name, at, subject, now_at=context.clock())


@operation("users.write", audit=("user.unbind",))
def unbind(context: OperatorContext, name: str, issuer: str = "") -> UserRecord:
    """No longer; the user's sessions end. Raises RegistryError."""
    with context.writing() as session:
        now_at = context.clock()
        at = issuer or _issuer(context)
        user = identities.unbind(session, name, at, now_at=now_at)
        user_sessions.revoke_all(session, user.id, now_at=now_at)
        return user


@operation("users.read")
def list_sign_in_locks(context: OperatorContext) -> list[SignInLock]:
    """What has to wait before the next attempt to sign in, the last failure first; MAX_LOCKS at
    most."""
    now_at, found = context.clock(), []
    fewest = min(guard.free for guard in sign_in_guard.EVERY)
    with context.reading() as session:
        names = {user.id: user.name for user in users.list_users(session)}
        for subject, row in user_sessions.most_failed(session, fewest, MAX_LOCKS):
            guard, address, name = sign_in_guard.parts_of(subject)
            name = names.get(name, name)
            if name and name not in names.values():
                continue  # made up; its address has a count of its own
            wait_s = sign_in_guard.wait_s([(row.num_failed, row.failed_at)], now_at, (guard,))
            if wait_s > 0:
                found.append(SignInLock(guard.prefix, address, name, row.num_failed, wait_s))
    return found


@operation("users.write", audit=("user.unlock",))
def unlock(context: OperatorContext, name: str = "", address: str = "") -> int:
    """Forget failed attempts to sign in: of a user, of an address (of IPv6: of its /64), or, with
    neither, all. Returns how many counts there were. Raises NotFound."""
    with context.writing() as session:
        user = users.get_user(session, name) if name else None
        network = network_of(address)

        def is_meant(subject: str) -> bool:
            _, of_address, of_name = sign_in_guard.parts_of(subject)
            if user is not None:
                return of_name in (user.id, user.name)
            return not address or of_address == network

        num_forgotten = user_sessions.forget_all(session, is_meant)
        target = name or network or "*"
        before: JsonObject = {"failure_counts": num_forgotten}
        now_at = context.clock()
        audit.record(session, now_at, "user.unlock", target, before, {"failure_counts": 0})
    return num_forgotten


def _issuer(context: OperatorContext) -> str:
    found = context.settings.oidc_issuer
    if not found:
        raise RegistryError(
            "no identity provider is configured; set oidc_issuer, or name the issuer"
        )
    return found
