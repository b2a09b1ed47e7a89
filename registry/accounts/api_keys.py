"""API keys: made, verified, rotated, revoked. Only salted digests are stored.

    sk-ph-<public id, 16 of [a-z2-7]>-<secret, 43 of [A-Za-z0-9_-]>

The public id finds the row, the secret proves the caller. The secret is 256 random bits, so a
single SHA-256 over (salt, secret) is enough: slow hashes (argon2, bcrypt) buy time against
guessing *people's* passwords, and nobody enumerates 2^256; a slow hash would only cost every
request milliseconds and hand out a way to exhaust the CPU.

A key may also be given as any other text (POLYHOST_DEMO_API_KEY). It has no public id of its own,
so one is derived by hashing the text (`public_id_of`), and the whole text is its secret. Such a
key is only as strong as the text: whoever sees its public id can test guesses.

A rotated key keeps its row, id and public id. The old secret works until its grace has ended.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import JSON, CheckConstraint, ColumnElement, ForeignKey, LargeBinary, String, select
from sqlalchemy.orm import Mapped, Session, aliased, mapped_column

from registry import audit
from registry.accounts import quotas
from registry.accounts.key_terms import (
    INFERENCE,
    KeyCache,
    Network,
    Unchanged,
    checked_scopes,
    parse_networks,
)
from registry.accounts.key_terms import KeyChanges as KeyChanges
from registry.accounts.quotas import UNLIMITED, Limits, Quota
from registry.accounts.tenants import (
    BATCH_FACTOR,
    PRIORITY_FACTORS,
    Priority,
    Tenant,
    check_display_name,
)
from registry.base import (
    Base,
    Id,
    Instant,
    JsonObject,
    Name,
    OptionalInstant,
    base32,
    new_id,
    random_token,
    record_of,
    values_of,
)
from registry.errors import AlreadyExists, InvalidValue, NotFound

KEY_PREFIX = "sk-ph-"
MAX_PLAINTEXT_LEN = 512
ID_SLICE = 500  # SQLite's oldest builds take 999 variables a statement.

_OUR_FORMAT = re.compile(r"sk-ph-([a-z2-7]{16})-([A-Za-z0-9_-]{43})")
_PUBLIC_ID_BYTES = 10
_SECRET_BYTES = 32
_SALT_BYTES = 16


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key as the gateway caches it, with what it needs of its tenant. Instants in epoch seconds.

    `previous_*` is the secret before the last rotation, good until `previous_until_at`.
    `allowed_models` None: all models. `allowed_networks` None: from anywhere.
    """

    id: str
    public_id: str
    tenant_id: str
    tenant_name: str
    tenant_weight: float
    tenant_disabled: bool
    name: str
    scopes: frozenset[str]
    limits: Limits
    cache: KeyCache
    allowed_models: frozenset[str] | None
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    salt: bytes
    digest: bytes
    previous_salt: bytes | None = None
    previous_digest: bytes | None = None
    previous_until_at: float | None = None
    allowed_networks: tuple[Network, ...] | None = None
    tenant_limits: Limits = UNLIMITED
    response_retention_days: int | None = None
    """The tenant's own."""
    tenant_class: Priority = "standard"
    batch_weight: float = BATCH_FACTOR
    """Of its tenant's requests of class batch: the factor of the class, and no other."""

    def usable(self, now_at: float) -> bool:
        """Neither revoked nor expired, and the tenant is let in."""
        expired = self.expires_at is not None and now_at >= self.expires_at
        return self.revoked_at is None and not expired and not self.tenant_disabled


class ApiKey(Base):
    """See KeyRecord."""

    __tablename__ = "api_keys"
    __table_args__ = (
        CheckConstraint("cache_mode IN ('off', 'exact', 'semantic', 'shadow')", name="cache_mode"),
    )

    id: Mapped[Id] = mapped_column(primary_key=True)
    public_id: Mapped[str] = mapped_column(String(16), unique=True)
    tenant_id: Mapped[Id] = mapped_column(ForeignKey("tenants.id"), index=True)
    name: Mapped[Name]
    scopes: Mapped[list[str]] = mapped_column(JSON)
    cache_mode: Mapped[str] = mapped_column(String(16))
    allowed_models: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    created_at: Mapped[Instant]
    expires_at: Mapped[OptionalInstant]
    revoked_at: Mapped[OptionalInstant]
    salt: Mapped[bytes] = mapped_column(LargeBinary)
    digest: Mapped[bytes] = mapped_column(LargeBinary)
    previous_salt: Mapped[bytes | None] = mapped_column(LargeBinary)
    previous_digest: Mapped[bytes | None] = mapped_column(LargeBinary)
    previous_until_at: Mapped[OptionalInstant]
    allowed_cidrs: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    cache_max_age_s: Mapped[OptionalInstant]
    cache_false_hit_budget: Mapped[OptionalInstant]
    cache_sampled: Mapped[bool] = mapped_column(default=False)


def generate_plaintext(public_id: str | None = None) -> str:
    """A fresh key in our format; `public_id` is given when a key is rotated."""
    return (
        f"{KEY_PREFIX}{public_id or random_token(_PUBLIC_ID_BYTES)}"
        f"-{secrets.token_urlsafe(_SECRET_BYTES)}"
    )


def public_id_of(plaintext: str) -> str:
    """The public id a key has or, for a text not in our format, the one derived from it."""
    match = _OUR_FORMAT.fullmatch(plaintext)
    if match is not None:
        return match.group(1)
    material = b"polyhost public id\0" + plaintext.encode("utf-8", "surrogateescape")
    return base32(hashlib.sha256(material).digest()[:_PUBLIC_ID_BYTES])


def verify(record: KeyRecord, plaintext: str, now_at: float) -> bool:
    """Is this the key's secret, and may it be used now? Compares in constant time."""
    given = _secret_of(plaintext)
    right = hmac.compare_digest(_digest(record.salt, given), record.digest)
    if record.previous_salt is not None and record.previous_digest is not None:
        was_right = hmac.compare_digest(
            _digest(record.previous_salt, given), record.previous_digest
        )
        right |= was_right and now_at < (record.previous_until_at or 0.0)
    return right and record.usable(now_at)


def create_key(
    session: Session,
    tenant_id: str,
    name: str,
    *,
    now_at: float,
    limits: Limits | None = None,
    cache: KeyCache | None = None,
    scopes: Sequence[str] = (INFERENCE,),
    allowed_models: Sequence[str] | None = None,
    expires_at: float | None = None,
    allowed_cidrs: Sequence[str] | None = None,
    plaintext: str | None = None,
) -> tuple[KeyRecord, str]:
    """A new key and its plaintext, which is nowhere to be had afterwards.

    `plaintext` makes a key of a given text. Raises NotFound, AlreadyExists or InvalidValue.
    """
    check_display_name("key", name)
    limits = limits or Limits()
    quotas.check(limits)
    cache = cache or KeyCache()
    cache.check()
    _check_expiry(expires_at, now_at)
    if session.get(Tenant, tenant_id) is None:
        raise NotFound(f"unknown tenant {tenant_id!r}: see `polyhost tenants list`")
    plaintext = generate_plaintext() if plaintext is None else _checked_plaintext(plaintext)
    public_id = public_id_of(plaintext)
    if session.scalar(select(ApiKey.id).where(ApiKey.public_id == public_id)) is not None:
        raise AlreadyExists("a key with this public id already exists: choose another text")
    salt = secrets.token_bytes(_SALT_BYTES)
    row = ApiKey(
        id=new_id("key"),
        public_id=public_id,
        tenant_id=tenant_id,
        name=name,
        scopes=checked_scopes(scopes),
        **cache.public(),
        allowed_models=_names(allowed_models),
        created_at=now_at,
        expires_at=expires_at,
        salt=salt,
        digest=_digest(salt, _secret_of(plaintext)),
        allowed_cidrs=_cidrs(allowed_cidrs),
    )
    session.add(row)
    session.flush()
    quotas.put(session, "key", row.id, limits)
    audit.record(session, now_at, "key.create", row.id, None, _public(row))
    return get_key(session, row.id), plaintext


def get_key(session: Session, id_or_public_id: str) -> KeyRecord:
    """By id or public id. Raises NotFound."""
    return _records(session, ApiKey.id == _row(session, id_or_public_id).id)[0]


def list_keys(session: Session, tenant_id: str | None = None) -> list[KeyRecord]:
    """All keys, revoked ones included, oldest first."""
    return _records(session, *([] if tenant_id is None else [ApiKey.tenant_id == tenant_id]))


def active_keys(session: Session) -> list[KeyRecord]:
    """Keys that are not revoked and whose tenant is let in, for the gateway's cache (which checks
    expiry at each request)."""
    return _records(session, ApiKey.revoked_at.is_(None), Tenant.disabled.is_(False))


def keys_of(
    session: Session, key_ids: Iterable[str], tenant_ids: Iterable[str]
) -> tuple[list[KeyRecord], list[str]]:
    """These keys, and all of these tenants: those that `active_keys` has, and the ids of the
    others. Names that are no ids are passed over."""
    wanted: set[str] = set()
    for column, ids in ((ApiKey.id, sorted(key_ids)), (ApiKey.tenant_id, sorted(tenant_ids))):
        for start in range(0, len(ids), ID_SLICE):
            some = column.in_(ids[start : start + ID_SLICE])
            wanted.update(session.scalars(select(ApiKey.id).where(some)))
    found, ids = [], sorted(wanted)
    for start in range(0, len(ids), ID_SLICE):
        some = ApiKey.id.in_(ids[start : start + ID_SLICE])
        found += _records(session, some, ApiKey.revoked_at.is_(None), Tenant.disabled.is_(False))
    return found, sorted(wanted.difference(record.id for record in found))


def change(
    session: Session, id_or_public_id: str, changes: KeyChanges, *, now_at: float
) -> KeyRecord:
    """Other bounds for a key; its secret stays. Raises NotFound or InvalidValue."""
    row = _row(session, id_or_public_id)
    if row.revoked_at is not None:
        raise InvalidValue(f"key {row.id} is revoked: create a new one")
    before = _public(row)
    if not isinstance(changes.expires_at, Unchanged):
        _check_expiry(changes.expires_at, now_at)
        row.expires_at = changes.expires_at
    if not isinstance(changes.allowed_models, Unchanged):
        row.allowed_models = _names(changes.allowed_models)
    if not isinstance(changes.allowed_cidrs, Unchanged):
        row.allowed_cidrs = _cidrs(changes.allowed_cidrs)
    if not isinstance(changes.cache, Unchanged):
        changes.cache.check()
        for name, value in changes.cache.public().items():
            setattr(row, name, value)
    session.flush()
    if _public(row) != before:
        audit.record(session, now_at, "key.change", row.id, before, _public(row))
    return get_key(session, row.id)


def revoke(session: Session, id_or_public_id: str, *, now_at: float) -> KeyRecord:
    """Refuse the key from now on. Revoking twice changes nothing. Raises NotFound."""
    row = _row(session, id_or_public_id)
    if row.revoked_at is None:
        before = _public(row)
        row.revoked_at = now_at
        session.flush()
        audit.record(session, now_at, "key.revoke", row.id, before, _public(row))
    return get_key(session, row.id)


def rotate(
    session: Session, id_or_public_id: str, grace_s: float = 0.0, *, now_at: float
) -> tuple[KeyRecord, str]:
    """A new secret for the key; the one it replaces works for `grace_s` more seconds.

    A secret that was still in an earlier grace stops working. Raises NotFound or InvalidValue.
    """
    row = _row(session, id_or_public_id)
    if row.revoked_at is not None:
        raise InvalidValue(f"key {row.id} is revoked: create a new one")
    if not 0 <= grace_s < float("inf"):
        raise InvalidValue("the grace period must be 0 seconds or more")
    plaintext = generate_plaintext(row.public_id)
    row.previous_salt, row.previous_digest = row.salt, row.digest
    row.previous_until_at = now_at + grace_s
    row.salt = secrets.token_bytes(_SALT_BYTES)
    row.digest = _digest(row.salt, _secret_of(plaintext))
    session.flush()
    after = {**_public(row), "previous_until_at": row.previous_until_at}
    audit.record(session, now_at, "key.rotate", row.id, _public(row), after)
    return get_key(session, row.id), plaintext


def _secret_of(plaintext: str) -> bytes:
    match = _OUR_FORMAT.fullmatch(plaintext)
    return (plaintext if match is None else match.group(2)).encode("utf-8", "surrogateescape")


def _digest(salt: bytes, secret: bytes) -> bytes:
    return hashlib.sha256(salt + secret).digest()


def _checked_plaintext(plaintext: str) -> str:
    graphic = plaintext.isascii() and plaintext.isprintable() and " " not in plaintext
    if not plaintext or not graphic or len(plaintext) > MAX_PLAINTEXT_LEN:
        raise InvalidValue(
            f"the text of a key must be 1 to {MAX_PLAINTEXT_LEN} visible ASCII characters without "
            "spaces"
        )
    return plaintext


def _check_expiry(expires_at: float | None, now_at: float) -> None:
    if expires_at is not None and not now_at < expires_at < float("inf"):
        raise InvalidValue("the expiry time must be in the future")


def _names(names: Sequence[str] | None) -> list[str] | None:
    return None if names is None else sorted(set(names))


def _cidrs(cidrs: Sequence[str] | None) -> list[str] | None:
    return None if cidrs is None else [str(network) for network in parse_networks(cidrs)]


def _row(session: Session, id_or_public_id: str) -> ApiKey:
    row = session.scalar(
        select(ApiKey).where((ApiKey.id == id_or_public_id) | (ApiKey.public_id == id_or_public_id))
    )
    if row is None:
        raise NotFound(f"unknown key {id_or_public_id!r}: see `polyhost keys list`")
    return row


def _records(session: Session, *where: ColumnElement[bool]) -> list[KeyRecord]:
    own, shared = aliased(Quota), aliased(Quota)
    query = (
        select(ApiKey, Tenant, own, shared)
        .join(Tenant, Tenant.id == ApiKey.tenant_id)
        .outerjoin(own, (own.scope == "key") & (own.owner == ApiKey.id))
        .outerjoin(shared, (shared.scope == "tenant") & (shared.owner == Tenant.id))
        .where(*where)
        .order_by(ApiKey.created_at, ApiKey.id)
    )
    return [_record(*row) for row in session.execute(query)]


def _record(key: ApiKey, tenant: Tenant, own: Quota | None, shared: Quota | None) -> KeyRecord:
    return record_of(
        KeyRecord,
        key,
        tenant_id=tenant.id,
        tenant_name=tenant.name,
        tenant_weight=tenant.weight * PRIORITY_FACTORS[tenant.priority],
        tenant_class=tenant.priority,
        batch_weight=tenant.weight * BATCH_FACTOR,
        tenant_disabled=tenant.disabled,
        response_retention_days=tenant.response_retention_days,
        scopes=frozenset(key.scopes),
        limits=quotas.limits_of(own),
        tenant_limits=quotas.limits_of(shared),
        cache=_cache(key),
        allowed_models=None if key.allowed_models is None else frozenset(key.allowed_models),
        allowed_networks=None if key.allowed_cidrs is None else parse_networks(key.allowed_cidrs),
    )


def _cache(key: ApiKey) -> KeyCache:
    return KeyCache(
        key.cache_mode, key.cache_max_age_s, key.cache_false_hit_budget, key.cache_sampled
    )


def _public(row: ApiKey) -> JsonObject:
    """What the audit log may hold of a key: no salt, no digest."""
    names = ("name", "tenant_id", "public_id", "scopes", "allowed_models", "allowed_cidrs")
    return values_of(row, *names, "expires_at", "revoked_at") | _cache(row).public()
