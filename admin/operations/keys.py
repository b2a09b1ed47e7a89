"""Operations on API keys, and the keys that a page may send requests as."""

import difflib
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from sqlalchemy.orm import Session

from admin.context.operation import operation
from admin.context.operator_context import OperatorContext, find_key, find_tenant, require, visible
from admin.context.optimistic_lock import check_unchanged, version_of
from gateway.cache.cache_request import no_embedder
from gateway.limits.limits import period_of
from registry.accounts import api_keys, quotas
from registry.accounts.api_keys import KeyChanges, KeyRecord
from registry.accounts.key_terms import INFERENCE, KeyCache, Unchanged
from registry.accounts.quotas import Limits
from registry.accounts.tenants import TenantRecord
from registry.errors import AlreadyExists, InvalidValue
from registry.lists import keys as key_list
from registry.lists import search as finding
from registry.lists.keys import KeyFilter, KeyLine
from registry.money.usage import Amounts, UsageFilter, total
from registry.paging import Cut, Listed

RECENT_S = 86_400.0
MAX_COMPARED = 2000
MAX_UNKNOWN_SAID = 5
MAX_SUGGESTED = 20


class UnknownModels(InvalidValue):
    """A key was to be allowed models that are not registered."""


@operation("keys.write", on="tenant", audit=("key.create",))
def create_key(
    context: OperatorContext,
    tenant: str,
    name: str,
    *,
    limits: Limits | None = None,
    cache: KeyCache | None = None,
    scopes: Sequence[str] = (INFERENCE,),
    allowed_models: Sequence[str] | None = None,
    expires_in_s: float | None = None,
    allowed_cidrs: Sequence[str] | None = None,
    public_id: str = "",
) -> tuple[KeyRecord, str]:
    """A new key of a tenant, and its plaintext (shown once). A `public_id` that is given can be
    made once: AlreadyExists afterwards."""
    _check_cache(context, cache)
    now_at = context.clock()
    with context.writing() as session:
        _check_models(session, allowed_models or ())
        return api_keys.create_key(
            session,
            find_tenant(context, session, tenant, "keys.write").id,
            name,
            now_at=now_at,
            limits=limits,
            cache=cache,
            scopes=scopes,
            allowed_models=allowed_models,
            expires_at=None if expires_in_s is None else now_at + expires_in_s,
            allowed_cidrs=allowed_cidrs,
            plaintext=api_keys.generate_plaintext(public_id) if public_id else None,
        )


@operation("keys.read", on="tenant")
def list_keys(context: OperatorContext, tenant: str | None = None) -> list[KeyRecord]:
    """Keys of one tenant or of all, revoked ones included."""
    seen = visible(context, "keys.read")
    with context.reading() as session:
        if tenant is not None:
            one = find_tenant(context, session, tenant, "keys.read")
            return api_keys.list_keys(session, one.id)
        every = api_keys.list_keys(session)
    return [key for key in every if seen is None or key.tenant_id in seen]


@operation("keys.read", on="tenant")
def show_key(context: OperatorContext, key: str) -> KeyRecord:
    """The key of that id or public id."""
    with context.reading() as session:
        return find_key(context, session, key, "keys.read")


@operation("keys.write", on="tenant", audit=("key.change",))
def change_key(
    context: OperatorContext, key: str, changes: KeyChanges, seen: str = ""
) -> KeyRecord:
    """Other bounds for a key; its secret stays. `seen`: the mark of the bounds that were looked at.
    Raises ChangedMeanwhile where they are others by now."""
    if not isinstance(changes.cache, Unchanged):
        _check_cache(context, changes.cache)
    with context.writing() as session:
        found = find_key(context, session, key, "keys.write")
        check_unchanged("the key", bounds_mark(found), seen)
        if not isinstance(changes.allowed_models, Unchanged) and changes.allowed_models:
            _check_models(session, set(changes.allowed_models) - (found.allowed_models or set()))
        return api_keys.change(session, found.id, changes, now_at=context.clock())


@operation("keys.write", on="tenant", audit=("key.revoke",))
def revoke_key(context: OperatorContext, key: str) -> KeyRecord:
    """Refuse the key from now on."""
    with context.writing() as session:
        found = find_key(context, session, key, "keys.write")
        return api_keys.revoke(session, found.id, now_at=context.clock())


def bounds_mark(key: KeyRecord) -> str:
    """Of all that `change_key` may change."""
    models, networks = key.allowed_models, key.allowed_networks
    return version_of(
        (
            None if models is None else sorted(models),
            None if networks is None else [str(one) for one in networks],
            key.expires_at,
            key.cache.public(),
        )
    )


def secret_mark(key: KeyRecord) -> str:
    """Which secret the key has now, without a word of it: another one has another mark."""
    return hashlib.sha256(b"polyhost secret" + key.salt + key.digest).hexdigest()[:16]


@operation("keys.write", on="tenant", audit=("key.rotate",))
def rotate_key(
    context: OperatorContext, key: str, grace_s: float = 0.0, instead_of: str = ""
) -> tuple[KeyRecord, str]:
    """A new secret (shown once); the old one works for `grace_s` more seconds. `instead_of`: the
    mark of the secret that is to be replaced. Raises AlreadyExists where it has been."""
    with context.writing() as session:
        found = find_key(context, session, key, "keys.write")
        if instead_of and instead_of != secret_mark(found):
            raise AlreadyExists("the key was rotated in the meantime; nothing was changed")
        return api_keys.rotate(session, found.id, grace_s, now_at=context.clock())


def _check_models(session: Session, names: Collection[str]) -> None:
    """Raises UnknownModels: a slip of the keyboard would be a key that can ask nothing."""
    unknown = sorted(set(names) - finding.known_models(session, names))
    if not unknown:
        return
    there = finding.model_names(session, MAX_COMPARED)
    said = []
    for name in unknown[:MAX_UNKNOWN_SAID]:
        near = difflib.get_close_matches(name, there, 3, 0.6)
        said.append(f"{name!r}" + (f" (did you mean {' or '.join(near)}?)" if near else ""))
    more = f" and {len(unknown) - len(said)} more" if len(unknown) > len(said) else ""
    raise UnknownModels(f"no such model: {', '.join(said)}{more}; register a model first")


def _check_cache(context: OperatorContext, cache: KeyCache | None) -> None:
    """Raises InvalidValue for a mode that this server could not serve."""
    means = cache is not None and cache.mode in ("semantic", "shadow")
    if means and not context.settings.cache_embedder:
        raise InvalidValue(no_embedder(f"the cache mode {cache.mode}" if cache else ""))


@dataclass(frozen=True, slots=True)
class KeyView:
    """One key."""

    key: KeyRecord
    gateway_limits: Limits
    today: Amounts
    month: Amounts


@operation("keys.read", on="tenant")
def keys_page(
    context: OperatorContext, wanted: KeyFilter, sort: str, cut: Cut, tenant: str = ""
) -> tuple[Listed[KeyLine], int, TenantRecord | None]:
    """A page of those that who asks may see, of one tenant where it is named; how many there are of
    these, and that tenant."""
    seen = visible(context, "keys.read")
    now_at = context.clock()
    with context.reading() as session:
        one = find_tenant(context, session, tenant, "keys.read") if tenant else None
        only = replace(wanted, tenant_ids=seen if one is None else (one.id,))
        page = key_list.page(session, only, sort, cut, since_at=now_at - RECENT_S, now_at=now_at)
        return page, key_list.num_keys(session, only.tenant_ids), one


@operation("keys.read", on="tenant")
def key_view(context: OperatorContext, key: str) -> KeyView:
    """The key of that id or public id. Raises NotFound."""
    now_at = context.clock()
    day, month = (period_of(kind, now_at).began_at for kind in ("day", "month"))
    with context.reading() as session:
        found = find_key(context, session, key, "keys.read")
        upto, tenants, keys = int(now_at) + 1, (found.tenant_id,), (found.id,)
        return KeyView(
            key=found,
            gateway_limits=quotas.get_limits(session, "gateway"),
            today=total(session, UsageFilter(int(day), upto, tenants, keys)),
            month=total(session, UsageFilter(int(month), upto, tenants, keys)),
        )


@dataclass(frozen=True, slots=True)
class AskingKey:
    """A key that may be asked as. `title` is for people. `internal`: of a tenant of the operator's,
    and good for requests."""

    key_id: str
    public_id: str
    title: str
    internal: bool = False


@operation("keys.write", on="tenant")
def asking_keys(context: OperatorContext) -> list[AskingKey]:
    """Some keys that work, the operator's own first, then the newest; the caller may name
    others."""
    seen = visible(context, "keys.write")
    with context.reading() as session:
        rows = finding.working_keys(session, MAX_SUGGESTED, seen, now_at=context.clock())
    return [
        AskingKey(key_id, public_id, f"{name} of {tenant}", internal)
        for key_id, public_id, name, tenant, internal in rows
    ]


@operation("keys.write", on="tenant")
def key_to_ask_as(context: OperatorContext, key: str) -> AskingKey:
    """By id or public id. Raises NotFound or Forbidden."""
    require(context, "models.read")
    with context.reading() as session:
        found = find_key(context, session, key, "keys.write")
    return AskingKey(found.id, found.public_id, f"{found.name} of {found.tenant_name}")
