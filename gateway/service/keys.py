"""The verbs on API keys, for the CLI and, later, the admin API and pages (control.py)."""

import hashlib
from collections.abc import Sequence

from gateway.cache.asks import no_embedder
from gateway.service.control import Control, find_key, find_tenant, visible
from gateway.service.meanwhile import check_unchanged, mark_of
from registry import api_keys
from registry.api_keys import KeyChanges, KeyRecord
from registry.errors import AlreadyExists, InvalidValue
from registry.key_cache import KeyCache
from registry.key_changes import Unchanged
from registry.key_scopes import INFERENCE
from registry.quotas import Limits


def create_key(
    control: Control,
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
    _check_cache(control, cache)
    now_at = control.clock()
    with control.writing() as session:
        return api_keys.create_key(
            session,
            find_tenant(control, session, tenant, "keys.write").id,
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


def list_keys(control: Control, tenant: str | None = None) -> list[KeyRecord]:
    """Keys of one tenant or of all, revoked ones included."""
    seen = visible(control, "keys.read")
    with control.reading() as session:
        if tenant is not None:
            one = find_tenant(control, session, tenant, "keys.read")
            return api_keys.list_keys(session, one.id)
        every = api_keys.list_keys(session)
    return [key for key in every if seen is None or key.tenant_id in seen]


def show_key(control: Control, key: str) -> KeyRecord:
    """The key of that id or public id."""
    with control.reading() as session:
        return find_key(control, session, key, "keys.read")


def change_key(control: Control, key: str, changes: KeyChanges, seen: str = "") -> KeyRecord:
    """Other bounds for a key; its secret stays. `seen`: the mark of the bounds that were looked at.
    Raises ChangedMeanwhile where they are others by now."""
    if not isinstance(changes.cache, Unchanged):
        _check_cache(control, changes.cache)
    with control.writing() as session:
        found = find_key(control, session, key, "keys.write")
        check_unchanged("the key was", bounds_mark(found), seen)
        return api_keys.change(session, found.id, changes, now_at=control.clock())


def revoke_key(control: Control, key: str) -> KeyRecord:
    """Refuse the key from now on."""
    with control.writing() as session:
        found = find_key(control, session, key, "keys.write")
        return api_keys.revoke(session, found.id, now_at=control.clock())


def bounds_mark(key: KeyRecord) -> str:
    """Of all that `change_key` may change."""
    models, networks = key.allowed_models, key.allowed_networks
    return mark_of(
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


def rotate_key(
    control: Control, key: str, grace_s: float = 0.0, instead_of: str = ""
) -> tuple[KeyRecord, str]:
    """A new secret (shown once); the old one works for `grace_s` more seconds. `instead_of`: the
    mark of the secret that is to be replaced. Raises AlreadyExists where it has been."""
    with control.writing() as session:
        found = find_key(control, session, key, "keys.write")
        if instead_of and instead_of != secret_mark(found):
            raise AlreadyExists("the key has another secret meanwhile: nothing was done")
        return api_keys.rotate(session, found.id, grace_s, now_at=control.clock())


def _check_cache(control: Control, cache: KeyCache | None) -> None:
    """Raises InvalidValue for a mode that this server could not serve."""
    means = cache is not None and cache.mode in ("semantic", "shadow")
    if means and not control.settings.cache_embedder:
        raise InvalidValue(no_embedder(f"the cache mode {cache.mode}" if cache else ""))
