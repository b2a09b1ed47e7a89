"""What the request path knows of the registry: keys by public id, hosted models by name.

Stage 1 (auth) and stage 2 (prepare) look things up here; nothing here touches the database. The
supervisor's poll (`gateway/registry_poll.py`) puts a whole new view in place when the registry's
version changes, so a lookup sees one version and never half of two.
"""

from collections.abc import Iterable

from gateway.types import HostedModel
from registry.api_keys import KeyRecord
from registry.quotas import UNLIMITED, Limits


class Directory:
    """The current view. Read and replaced on the event loop only."""

    def __init__(self) -> None:
        self._version = -1
        self._keys: dict[str, KeyRecord] = {}
        self._models: dict[str, HostedModel] = {}
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
    ) -> None:
        """Put a new view in place."""
        self.limits = limits
        self._keys = {key.public_id: key for key in keys}
        self._models = {model.name: model for model in models}
        self._version = version

    def find_key(self, public_id: str) -> KeyRecord | None:
        """The usable key with this public id. The caller still verifies secret and expiry."""
        return self._keys.get(public_id)

    def find_model(self, name: str) -> HostedModel | None:
        """The model of this public name if it is `ready`."""
        return self._models.get(name)

    def keys(self) -> Iterable[KeyRecord]:
        """All usable keys."""
        return self._keys.values()

    def models(self) -> list[HostedModel]:
        """All `ready` models, in the order of the catalog."""
        return list(self._models.values())
