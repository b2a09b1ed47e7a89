"""The verbs on users, for the CLI and, later, the admin API and pages (control.py).

Whoever may write the installation's users may do everything here. An owner of a tenant decides
which roles users have for that tenant, and no more: accounts and passwords are the installation's.
"""

import logging
import secrets
from dataclasses import replace

from gateway.policy.permissions import INSTALLATION
from gateway.service.control import Control, find_tenant, open_control, require, visible
from gateway.service.meanwhile import check_unchanged, mark_of
from gateway.settings import Settings
from registry import user_sessions, users
from registry.users import UserRecord

ADMIN = "admin"
_PASSWORD_BYTES = 15

logger = logging.getLogger(__name__)


def create_user(
    control: Control, name: str, password: str, role: str, tenant: str = ""
) -> UserRecord:
    """A new user with a role for the installation, or for a tenant."""
    require(control, "users.write")
    with control.writing() as session:
        return users.create_user(session, name, password, role, tenant, now_at=control.clock())


def list_users(control: Control) -> list[UserRecord]:
    """All users; to an owner of tenants, those who have a role for one of them, and that role."""
    seen = visible(control, "users.read")
    with control.reading() as session:
        every = users.list_users(session)
    return [_as_seen(user, seen) for user in every if seen is None or seen & user.roles.keys()]


def set_role(
    control: Control, name: str, role: str | None, tenant: str = "", seen: str = ""
) -> UserRecord:
    """A user's role for the installation or for a tenant; None takes it away. `seen`: the mark of
    the roles that were looked at. Raises ChangedMeanwhile where they are others by now."""
    with control.writing() as session:
        if tenant:
            tenant = find_tenant(control, session, tenant, "users.write").id
        else:
            require(control, "users.write")
        if seen:
            known = _as_seen(users.get_user(session, name), visible(control, "users.read"))
            check_unchanged(f"the roles of {name!r} were", roles_mark(known), seen)
        user = users.set_role(session, name, role, tenant, now_at=control.clock())
    return _as_seen(user, visible(control, "users.read"))


def roles_mark(user: UserRecord) -> str:
    """Of the user's roles, as far as who asks may see them."""
    return mark_of(user.roles)


def set_user_disabled(control: Control, name: str, disabled: bool) -> UserRecord:
    """Whether the user is let in. Sessions of who is shut out do not come back."""
    require(control, "users.write")
    with control.writing() as session:
        now_at = control.clock()
        user = users.set_disabled(session, name, disabled, now_at=now_at)
        if disabled:
            user_sessions.revoke_all(session, user.id, now_at=now_at)
    return user


def set_password(control: Control, name: str, password: str) -> UserRecord:
    """Another password; the user's sessions end."""
    require(control, "users.write")
    with control.writing() as session:
        return users.set_password(session, name, password, now_at=control.clock())


def remove_user(control: Control, name: str) -> UserRecord:
    """The user is gone; the name stays in the audit log."""
    require(control, "users.write")
    with control.writing() as session:
        return users.remove_user(session, name, now_at=control.clock())


def ensure_admin(settings: Settings) -> str:
    """At a server's start: the user `admin`, with the setting's password or a new one.

    Where there is that user already, it keeps the password that was set since; where there are
    others and no password is given, nobody is added. Returns the password where it was made up
    here: it is to be shown once, and is nowhere to be had afterwards.
    """
    with open_control(settings, "server") as control, control.writing() as session:
        known = [user.name for user in users.list_users(session)]
        if ADMIN in known or (known and not settings.admin_password):
            return ""
        made = "" if settings.admin_password else secrets.token_urlsafe(_PASSWORD_BYTES)
        password, now_at = settings.admin_password or made, control.clock()
        users.create_user(session, ADMIN, password, "owner", INSTALLATION, now_at=now_at)
    logger.info("made the user %s", ADMIN)
    return made


def _as_seen(user: UserRecord, seen: frozenset[str] | None) -> UserRecord:
    """Without roles for what who asks may not see."""
    if seen is None:
        return user
    roles = {tenant_id: role for tenant_id, role in user.roles.items() if tenant_id in seen}
    names = {tenant_id: user.tenant_names[tenant_id] for tenant_id in roles}
    return replace(user, roles=roles, tenant_names=names)
