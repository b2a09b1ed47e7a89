"""Users: people who may see or change things, what they may, and their passwords.

A user has a role for the whole installation, or for single tenants, or both. What a role may do is
not known here (admin/context/policy/permissions.py). Names are unique; a removed user's name
stays in the audit log. As long as there are users, one of them is an owner of the installation who
is let in.

Unlike API keys (api_keys.py), people's passwords can be guessed, so a digest costs memory and time
on purpose: 64 MiB and some 50 ms by argon2-cffi's defaults (RFC 9106, second choice). It names its
own parameters. Only for logging in: never on the request path.
"""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from sqlalchemy import CheckConstraint, ForeignKey, String, delete, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from registry import audit
from registry.accounts import tenants
from registry.base import Base, Id, Instant, JsonObject, Name, new_id, record_of, values_of
from registry.errors import AlreadyExists, IllegalTransition, InvalidValue, NotFound

Role: TypeAlias = Literal["owner", "admin", "viewer"]

ROLES: tuple[Role, ...] = get_args(Role)
INSTALLATION: Final = ""
"""Where a tenant's id would stand: the role is for everything."""
MIN_PASSWORD_LEN: Final = 8
MAX_PASSWORD_LEN: Final = 256
# Compared with where there is no such user, so that answers take as long: of a random password.
NOBODY: Final = "$argon2id$v=19$m=65536,t=3,p=4$c29tZXJhbmRvbXNhbHQhIQ$" + "A" * 43


@dataclass(frozen=True, slots=True)
class UserRecord:
    """A user. `roles` by tenant id, INSTALLATION for all of it; `tenant_names` for people."""

    id: str
    name: str
    disabled: bool
    created_at: float
    password_set_at: float
    roles: dict[str, Role]
    tenant_names: dict[str, str]

    @property
    def is_owner(self) -> bool:
        """Of the whole installation, and let in."""
        return not self.disabled and self.roles.get(INSTALLATION) == "owner"


class User(Base):
    """See UserRecord."""

    __tablename__ = "users"

    id: Mapped[Id] = mapped_column(primary_key=True)
    name: Mapped[Name] = mapped_column(unique=True)
    password_digest: Mapped[str] = mapped_column(String(255))
    disabled: Mapped[bool]
    created_at: Mapped[Instant]
    password_set_at: Mapped[Instant]


class UserRole(Base):
    """A user's role for a tenant, or for the installation (tenant_id "")."""

    __tablename__ = "user_roles"
    __table_args__ = (CheckConstraint("role IN ('owner', 'admin', 'viewer')", name="role"),)

    user_id: Mapped[Id] = mapped_column(
        ForeignKey("users.id", ondelete="CASCADE"), primary_key=True
    )
    tenant_id: Mapped[Id] = mapped_column(primary_key=True)
    role: Mapped[str] = mapped_column(String(16))


def create_user(
    session: Session, name: str, password: str, role: str, tenant: str = "", *, now_at: float
) -> UserRecord:
    """With one role, of a tenant (name or id) or the installation. The first must be an owner.

    Raises AlreadyExists, InvalidValue, NotFound or IllegalTransition.
    """
    tenants.check_display_name("user", name)
    if session.scalar(select(User.id).where(User.name == name)) is not None:
        raise AlreadyExists(f"user {name!r} already exists")
    row = User(
        id=new_id("usr"),
        name=name,
        password_digest=hash_password(password),
        disabled=False,
        created_at=now_at,
        password_set_at=now_at,
    )
    session.add(row)
    session.flush()
    _put_role(session, row.id, tenant_id_of(session, tenant), role)
    user = get_user(session, name)
    _check_owned(session, name)
    audit.record(session, now_at, "user.create", name, None, _public(user))
    return user


def list_users(session: Session) -> list[UserRecord]:
    """All users by name."""
    return [_record(session, row) for row in session.scalars(select(User).order_by(User.name))]


def get_user(session: Session, name_or_id: str) -> UserRecord:
    """Raises NotFound."""
    return _record(session, _row(session, name_or_id))


def set_role(
    session: Session, name: str, role: str | None, tenant: str = "", *, now_at: float
) -> UserRecord:
    """The user's role for a tenant, or for the installation; None takes it away.

    Raises NotFound, InvalidValue, or IllegalTransition for the last owner's.
    """
    before = get_user(session, name)
    tenant_id = tenant_id_of(session, tenant)
    session.execute(
        delete(UserRole).where(UserRole.user_id == before.id, UserRole.tenant_id == tenant_id)
    )
    if role is not None:
        _put_role(session, before.id, tenant_id, role)
    return _changed(session, "user.role", before, now_at)


def set_disabled(session: Session, name: str, disabled: bool, *, now_at: float) -> UserRecord:
    """Whether the user is let in. Raises NotFound, or IllegalTransition for the last owner."""
    before = get_user(session, name)
    _row(session, name).disabled = disabled
    return _changed(session, "user.disable" if disabled else "user.enable", before, now_at)


def set_password(session: Session, name: str, password: str, *, now_at: float) -> UserRecord:
    """Raises NotFound or InvalidValue."""
    before = get_user(session, name)
    row = _row(session, name)
    row.password_digest, row.password_set_at = hash_password(password), now_at
    return _changed(session, "user.password", before, now_at)


def remove_user(session: Session, name: str, *, now_at: float) -> UserRecord:
    """Raises NotFound, or IllegalTransition for the last owner, whoever else there is."""
    before = get_user(session, name)
    session.execute(delete(UserRole).where(UserRole.user_id == before.id))
    session.delete(_row(session, name))
    session.flush()
    _check_owned(session, before.name)
    audit.record(session, now_at, "user.remove", before.name, _public(before), None)
    return before


def authenticate(session: Session, name: str, password: str) -> UserRecord | None:
    """The user of that name and password who is let in, else None, after as long."""
    row = session.scalar(select(User).where(User.name == name))
    right = verify_password(NOBODY if row is None else row.password_digest, password)
    return _record(session, row) if row is not None and right and not row.disabled else None


def _changed(session: Session, action: str, before: UserRecord, now_at: float) -> UserRecord:
    session.flush()
    _check_owned(session, before.name)
    after = get_user(session, before.id)
    audit.record(session, now_at, action, before.name, _public(before), _public(after))
    return after


def _check_owned(session: Session, name: str) -> None:
    """Raises IllegalTransition where a change left users and no owner."""
    if not any(user.is_owner for user in list_users(session)):
        raise IllegalTransition(
            f"at least one enabled owner is required, and {name!r} is the last one: "
            "make another user an owner first"
        )


def _put_role(session: Session, user_id: str, tenant_id: str, role: str) -> None:
    if role not in ROLES:
        raise InvalidValue(f"role must be one of {', '.join(ROLES)}, got {role!r}")
    session.add(UserRole(user_id=user_id, tenant_id=tenant_id, role=role))
    session.flush()


def tenant_id_of(session: Session, tenant: str) -> str:
    """Of a name or an id; INSTALLATION for "". Raises NotFound."""
    return tenants.get_tenant(session, tenant).id if tenant else INSTALLATION


def _row(session: Session, name_or_id: str) -> User:
    row = session.scalar(select(User).where(User.id == name_or_id)) or session.scalar(
        select(User).where(User.name == name_or_id)
    )
    if row is None:
        raise NotFound(f"unknown user {name_or_id!r}: see `polyhost users list`")
    return row


def _record(session: Session, row: User) -> UserRecord:
    query = (
        select(UserRole.tenant_id, UserRole.role, tenants.Tenant.name)
        .outerjoin(tenants.Tenant, tenants.Tenant.id == UserRole.tenant_id)
        .where(UserRole.user_id == row.id)
        .order_by(UserRole.tenant_id)
    )
    roles: dict[str, Role] = {}
    names: dict[str, str] = {}
    for tenant_id, role, tenant_name in session.execute(query):
        roles[tenant_id] = next(known for known in ROLES if known == role)
        if tenant_id != INSTALLATION:
            names[tenant_id] = tenant_name or tenant_id
    return record_of(UserRecord, row, roles=roles, tenant_names=names)


def _public(user: UserRecord) -> JsonObject:
    """What the audit log may hold of a user: no digest."""
    roles = {tenant_id or "*": role for tenant_id, role in user.roles.items()}
    return values_of(user, "name", "disabled", "password_set_at") | {"roles": roles}


def hash_password(password: str) -> str:
    """What is stored. Raises InvalidValue."""
    if not MIN_PASSWORD_LEN <= len(password) <= MAX_PASSWORD_LEN:
        raise InvalidValue(
            f"a password must have {MIN_PASSWORD_LEN} to {MAX_PASSWORD_LEN} characters"
        )
    if not _is_text(password):
        raise InvalidValue("a password must be valid UTF-8 text")
    return PasswordHasher().hash(password)


def verify_password(stored: str, password: str) -> bool:
    """Is this the password? Takes as long either way."""
    given = password[: MAX_PASSWORD_LEN + 1]
    try:  # what cannot be a password takes as long, too
        return PasswordHasher().verify(stored, given if _is_text(given) else "") and _is_text(given)
    except (VerificationError, InvalidHashError):
        return False


def _is_text(password: str) -> bool:
    """Half of a surrogate pair has no bytes."""
    return password.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in password)
