"""What a gateway knows of the registry: keys by public id, hosted models by name.

Stage 1 (auth) and stage 2 (prepare) look things up in the Directory without touching the database.
The poll (registry_poll.py) puts a new view in place, or changes this one, when the registry's
version changes, at once, so a lookup sees one version and never half of two.

`read_view` reads everything, or what has changed, in one snapshot and in a thread. Keys may be
many, so of them only those are read that the audit log names; the rest (models, prices, limits of
models and of the gateway, tenants' shares) is small and is read whole when anything of it has
changed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.orm import Session

from gateway.limits.limits import UnreadPasts
from gateway.pricing.policy.pricing import Plan, PriceBook, Prices, Rates, Terms
from gateway.settings.settings import PACKS_FOLDER
from gateway.types import HostedModel
from registry import audit
from registry.accounts import api_keys, quotas, tenants
from registry.accounts.api_keys import KeyRecord
from registry.accounts.quotas import UNLIMITED, Limits
from registry.models import catalog, floors, worker_orders
from registry.models.worker_orders import WorkerOrder
from registry.money import plans, prices
from registry.money.prices import PRICE_NAMES, PriceRecord


class Directory:
    """The current view. Read and replaced on the event loop only."""

    def __init__(self) -> None:
        self._version = -1
        self._keys: dict[str, KeyRecord] = {}
        self._public_ids: dict[str, str] = {}
        self._models: dict[str, HostedModel] = {}
        self._book = PriceBook()
        self.limits = UNLIMITED
        """Of all requests together."""
        self.unread = UnreadPasts()
        """Counts of the view's limits that nobody may draw on yet."""

    @property
    def version(self) -> int:
        """The registry's version this view was read at; -1 before the first."""
        return self._version

    def replace(
        self,
        version: int,
        keys: Iterable[KeyRecord],
        models: Iterable[HostedModel],
        limits: Limits = UNLIMITED,
        book: PriceBook | None = None,
    ) -> None:
        """Put a new view in place; prices stay where none are given."""
        self._book = self._book if book is None else book
        self.limits = limits
        self._keys = {key.public_id: key for key in keys}
        self._public_ids = {key.id: public_id for public_id, key in self._keys.items()}
        self._models = {model.name: model for model in models}
        self._version = version

    def update(self, version: int, keys: Iterable[KeyRecord], gone: Iterable[str]) -> None:
        """These keys are new or have changed, those ids are not usable any more; all else stays."""
        for key_id in gone:
            self._keys.pop(self._public_ids.pop(key_id, ""), None)
        for key in keys:
            self._keys[key.public_id] = key
            self._public_ids[key.id] = key.public_id
        self._version = version

    def update_models(self, models: Iterable[HostedModel], limits: Limits, book: PriceBook) -> None:
        """All but the keys, anew."""
        self._models = {model.name: model for model in models}
        self.limits = limits
        self._book = book

    def find_key(self, public_id: str) -> KeyRecord | None:
        """The usable key with this public id. The caller still verifies secret and expiry."""
        return self._keys.get(public_id)

    def find_key_by_id(self, key_id: str) -> KeyRecord | None:
        """The usable key of this id."""
        return self._keys.get(self._public_ids.get(key_id, ""))

    def find_model(self, name: str) -> HostedModel | None:
        """The model of this public name if it is `ready`."""
        return self._models.get(name)

    def rates(self, tenant_id: str, model: str, at: float) -> Rates:
        """What a request that arrived at `at` is billed by; of models that are gone, too."""
        return self._book.rates(tenant_id, model, at)

    def keys(self) -> Iterable[KeyRecord]:
        """All usable keys."""
        return self._keys.values()

    def model_names(self) -> list[str]:
        """Of all `ready` models. In any thread."""
        return list(self._models)

    def models(self) -> list[HostedModel]:
        """All `ready` models, in the order of the catalog."""
        return list(self._models.values())


@dataclass(frozen=True, slots=True)
class Catalog:
    """All but keys.

    weights   bytes of each ready model's weights
    reserved  what tenants have of each worker
    book      prices, plans and terms, past and to come
    orders    what operators want of workers
    """

    models: Sequence[HostedModel]
    weights: dict[str, int]
    limits: Limits
    reserved: dict[str, float]
    book: PriceBook
    orders: dict[str, WorkerOrder]


@dataclass(frozen=True, slots=True)
class View:
    """`is_whole`: `keys` are all there are; otherwise those that changed, `gone` the ids of those
    that are not usable any more, `tenants` those that changed, and `catalog` None where it did not.
    `upto`: the audit log's last entry that is in it; `changed_at`: when that was made."""

    version: int
    upto: int
    changed_at: float
    is_whole: bool
    keys: Sequence[KeyRecord]
    gone: Sequence[str]
    tenants: frozenset[str]
    catalog: Catalog | None


def read_view(session: Session, data_path: Path, known_version: int, upto: int) -> View | None:
    """None where nothing has changed since `known_version` (-1: everything is read)."""
    current = audit.current_version(session)
    if current == known_version:
        return None
    found = audit.changes_since(session, upto) if known_version >= 0 else None
    changed_at = audit.changed_at(session)
    if found is None:
        keys = api_keys.active_keys(session)
        every = _catalog(session, data_path)
        return View(
            current, audit.last_entry(session), changed_at, True, keys, (), frozenset(), every
        )
    tenant_ids = found.tenants | found.limited
    keys, gone = api_keys.keys_of(session, found.keys | found.limited, tenant_ids)
    # Ids name themselves, but a model may be called anything.
    ids = {key.id for key in keys} | {key.tenant_id for key in keys} | set(gone)
    others = found.others or bool(found.tenants)
    if not others and found.limited:
        is_else = not found.limited <= ids
        others = is_else or quotas.has_any(session, "model", found.limited)
    part = _catalog(session, data_path) if others else None
    return View(current, found.upto, changed_at, False, keys, gone, tenant_ids, part)


def _catalog(session: Session, data_path: Path) -> Catalog:
    return Catalog(
        models=hosted_models(session, data_path),
        weights={m.name: m.weight_bytes for m in catalog.ready_models(session)},
        limits=quotas.get_limits(session, "gateway"),
        reserved=tenants.reserved_shares(session),
        book=price_book(session),
        orders=worker_orders.all_orders(session),
    )


def hosted_models(session: Session, data_dir: Path) -> list[HostedModel]:
    """The ready models as the request path needs them."""
    limits, kept = quotas.all_limits(session, "model"), floors.by_model(session)
    hosted = []
    for model in catalog.ready_models(session):
        hosted.append(
            HostedModel(
                name=model.name,
                revision=model.revision,
                pack_dir=str(data_dir / PACKS_FOLDER / model.pack),
                max_context=model.max_context,
                vocab_size=model.vocab_size,
                created_at=int(model.created_at),
                pinned=model.pinned,
                weight=model.weight,
                weight_bytes=model.weight_bytes,
                task=model.task,
                dim=model.dim,
                labels=tuple(model.labels),
                multi_label=model.multi_label,
                limits=limits.get(model.name, UNLIMITED),
                floors=kept.get(model.name, ()),
            )
        )
    return hosted


def price_book(session: Session) -> PriceBook:
    """Everything dated about prices, as of the session's snapshot."""
    listed: dict[str, list[tuple[float, Prices]]] = {}
    for price in prices.list_prices(session):
        listed.setdefault(price.model, []).append((price.valid_from, _prices(price)))
    discounts: dict[str, list[tuple[float, int]]] = {}
    for one in plans.list_discounts(session):
        discounts.setdefault(one.plan, []).append((one.valid_from, one.discount_bp))
    own: dict[str, dict[str, list[tuple[float, Prices | None]]]] = {}
    for priced in plans.list_plan_prices(session):
        of_plan = own.setdefault(priced.plan, {}).setdefault(priced.model, [])
        of_plan.append((priced.valid_from, None if priced.price is None else _prices(priced.price)))
    terms: dict[str, list[tuple[float, Terms]]] = {}
    for held in plans.list_terms(session):
        dated = terms.setdefault(held.tenant_id, [])
        dated.append((held.valid_from, Terms(held.plan, held.discount_bp)))
    made = {name: Plan(dated, own.get(name, {})) for name, dated in discounts.items()}
    return PriceBook(listed, made, terms)


def _prices(price: PriceRecord) -> Prices:
    return Prices(*(getattr(price, name) for name in PRICE_NAMES))
