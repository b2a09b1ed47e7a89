"""What the request path knows of the registry: keys by public id, hosted models by name.

Stage 1 (auth) and stage 2 (prepare) look things up here; nothing here touches the database. The
supervisor's poll (`gateway/registry_poll.py`) puts a new view in place, or changes this one, when
the registry's version changes, at once, so a lookup sees one version and never half of two.
"""

from collections.abc import Iterable

from gateway.policy.price_book import PriceBook
from gateway.policy.pricing import Rates
from gateway.types import HostedModel
from registry.api_keys import KeyRecord
from registry.quotas import UNLIMITED, Limits


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

    def models(self) -> list[HostedModel]:
        """All `ready` models, in the order of the catalog."""
        return list(self._models.values())
