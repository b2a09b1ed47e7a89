"""The seam behind stage 4: where kept answers live. No decision (policy/cache_rule.py), no scope
(that is put together before).

`memory_store` keeps them in one process, `gateway/store/redis_answers.py` in a Redis that several
gateways share, with its vector sets where it has them. What all of them promise:

- An entry is found in its own scope only, until `expires_at`, however often it is used.
- Each tenant's entries are bounded in bytes; the one goes first whose hits have saved least for the
  bytes it takes, saving long ago counting less (policy/cache_worth.py).
- Once `invalidate` or `purge` has returned, nothing that it named is found again, by any gateway;
  nor is it kept again by a request that had begun before: `keep` refuses an entry whose epoch is
  not the scope's present one.
- A look-up ends within its deadline, by raising StoreUnavailable if need be. That is a miss.
"""

from dataclasses import dataclass
from typing import Protocol

from gateway.cache.types import Entry, Found, Neighbour, Scope, Selector, Vector
from gateway.policy.cache_choice import LEAST_SIMILARITY
from gateway.policy.cache_confidence import Confidence

SIMILARITY_FLOOR = LEAST_SIMILARITY
"""Neighbours farther away than this cosine are of no use to the rule, and not looked for."""


class StoreUnavailable(Exception):
    """No answer in time, or none to come."""


@dataclass(frozen=True, slots=True)
class Size:
    """Of everything kept: entries, and their bytes as they are counted against the bounds."""

    num_entries: int
    num_bytes: int


class AnswerStore(Protocol):
    """Kept answers. The first three and `learn` raise StoreUnavailable; so do `purge`,
    `invalidate` and `size`, which have more time and must not be taken for done."""

    async def exact(self, scope: Scope, exact_key: bytes) -> Found:
        """The answer to this very request, and the scope's epoch: to be read before the request
        goes on, and to be kept with its answer."""

    async def nearest(self, scope: Scope, vector: Vector, k: int) -> list[Neighbour]:
        """At most k entries of the scope, the nearest first, none below SIMILARITY_FLOOR. Their
        own vectors may be None."""

    async def entries(
        self, tenant_id: str, entry_id: str = "", model_name: str = "", limit: int = 1
    ) -> list[Entry]:
        """Some of the tenant's that may be served: that of a request, those of a model, or any
        ("" says nothing). Looks through all of them: for operators, not for requests."""

    async def keep(self, entry: Entry) -> None:
        """Remember it, soon; dropped without a word where it may not or cannot be kept."""

    async def used(self, entry: Entry, saved_nanos: int) -> None:
        """It has answered a request: it is worth that much more."""

    async def learn(self, entry: Entry, confidence: Confidence) -> bool:
        """Put this confidence in place of `entry.confidence`. False: another has learnt meanwhile,
        or it is gone; look it up again."""

    async def purge(self, selector: Selector) -> int:
        """Drop what is selected; how many. Raises ValueError where nothing is."""

    async def invalidate(self, tenant_id: str = "", model_name: str = "") -> None:
        """Everything of one tenant, or of one model, is old from now on: one step, however much it
        is. What it takes is given back afterwards."""

    async def size(self) -> Size:
        """What is kept; of what has expired, some may still be counted."""

    async def close(self) -> None:
        """At the end of the process."""
