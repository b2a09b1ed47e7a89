"""What the registry's poll reads, in one snapshot: everything, or what has changed.

Runs in a thread. Keys may be many, so of them only those are read that the audit log names; the
rest (models, prices, limits of models and of the gateway, tenants' shares) is small and is read
whole when anything of it has changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sqlalchemy.orm import Session

from gateway.policy.price_book import PriceBook
from gateway.service.models import hosted_models
from gateway.service.prices import price_book
from gateway.types import HostedModel
from registry import api_keys, catalog, changes, quotas, tenants, version
from registry.api_keys import KeyRecord
from registry.quotas import Limits

OF_CATALOG = ("model", "gateway")
NOBODY: Final = frozenset[str]()


@dataclass(frozen=True, slots=True)
class Catalog:
    """All but keys.

    weights   bytes of each ready model's weights
    reserved  what tenants have of each worker
    book      prices, plans and terms, past and to come
    """

    models: Sequence[HostedModel]
    weights: dict[str, int]
    limits: Limits
    reserved: dict[str, float]
    book: PriceBook


@dataclass(frozen=True, slots=True)
class View:
    """`is_whole`: `keys` are all there are; otherwise those that changed, `gone` the ids of those
    that are not usable any more, `tenants` those that changed, and `catalog` None where it did not.
    `upto`: the audit log's last entry that is in it."""

    version: int
    upto: int
    is_whole: bool
    keys: Sequence[KeyRecord]
    gone: Sequence[str]
    tenants: frozenset[str]
    catalog: Catalog | None


def read(
    session: Session,
    data_path: Path,
    known_version: int,
    upto: int,
    owners: frozenset[tuple[str, str]],
) -> View | None:
    """None where nothing has changed since `known_version` (-1: everything is read) and `owners`,
    (scope, id or name) of whom are to be looked at again, is empty."""
    current = version.current(session)
    found = changes.since(session, upto) if known_version >= 0 else None
    if current == known_version:
        found = changes.Changes(upto, NOBODY, NOBODY, NOBODY, False)
        if not owners:
            return None
    if found is None:
        keys = api_keys.active_keys(session)
        every = _catalog(session, data_path)
        return View(current, changes.newest(session), True, keys, (), frozenset(), every)
    again = {scope: frozenset(o for s, o in owners if s == scope) for scope, _ in owners}
    tenant_ids = found.tenants | found.limited | again.get("tenant", frozenset())
    key_ids = found.keys | found.limited | again.get("key", frozenset())
    keys, gone = api_keys.keys_of(session, key_ids, tenant_ids)
    # Ids name themselves, but a model may be called anything.
    ids = {key.id for key in keys} | {key.tenant_id for key in keys} | set(gone)
    others = found.others or bool(found.tenants) or not again.keys().isdisjoint(OF_CATALOG)
    if not others and found.limited:
        is_else = not found.limited <= ids
        others = is_else or quotas.has_any(session, "model", found.limited)
    part = _catalog(session, data_path) if others else None
    return View(current, found.upto, False, keys, gone, tenant_ids, part)


def _catalog(session: Session, data_path: Path) -> Catalog:
    return Catalog(
        models=hosted_models(session, data_path),
        weights={m.name: m.weight_bytes for m in catalog.ready_models(session)},
        limits=quotas.get_limits(session, "gateway"),
        reserved=tenants.reserved_shares(session),
        book=price_book(session),
    )
