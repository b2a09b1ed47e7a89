"""Bounds of an API key that are to be set anew (api_keys.change)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from registry.key_cache import KeyCache


class Unchanged(Enum):
    """What `KeyChanges` does not touch; None there means: no bound."""

    UNCHANGED = "unchanged"


UNCHANGED: Final = Unchanged.UNCHANGED


@dataclass(frozen=True, slots=True)
class KeyChanges:
    """As in `create_key`."""

    expires_at: float | Unchanged | None = UNCHANGED
    allowed_models: Sequence[str] | Unchanged | None = UNCHANGED
    allowed_cidrs: Sequence[str] | Unchanged | None = UNCHANGED
    cache: KeyCache | Unchanged = UNCHANGED
