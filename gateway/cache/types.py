"""The nouns of the answer cache, which its parts hand to one another, and the seam behind stage 4:
where kept answers live. No behaviour, no I/O.

Instants named `*_at` are wall-clock seconds (UTC epoch): entries are shared by processes, and
outlive them. memory_store.py keeps them in one process, redis_answers.py in a Redis that several
gateways share, with its vector sets where it has them. What both promise:

- An entry is found in its own scope only, until `expires_at`, however often it is used.
- Each tenant's entries are bounded in bytes; the one goes first whose hits have saved least for the
  bytes it takes, saving long ago counting less.
- Once `invalidate` or `purge` has returned, nothing that it named is found again, by any gateway;
  nor is it kept again by a request that had begun before: `keep` refuses an entry whose epoch is
  not the scope's present one.
- A look-up ends within its deadline, by raising StoreUnavailable if need be. That is a miss.
"""

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gateway.cache.policy.cache_choice import LEAST_SIMILARITY
from gateway.cache.policy.cache_confidence import Confidence

Vector: TypeAlias = NDArray[np.float32]
"""One embedding, of length 1."""

Epoch: TypeAlias = bytes
"""How often what a scope belongs to has been invalidated, as its store counts it. Only compared."""


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """A complete answer. `finish_reason` is stop or length."""

    text: str
    finish_reason: str
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Scope:
    """Within it, and nowhere else, answers are looked for.

    `digest` (32 bytes) stands for all that an answer depends on but the last thing the user said,
    tenant and model included; those are in clear beside it to purge and to invalidate by.
    """

    tenant_id: str
    model_name: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One kept answer.

    `entry_id`: the id of the request it came from, by which it can be traced; `key_id`: that
    request's API key. `exact_key` (32 bytes) is the digest of the whole request, scope included: a
    later entry with the same takes this one's place. `question`: what the user said last, as text;
    `vector` its embedding, None where it can only be found exactly. `cost_nanos`: what making it
    cost, thus what a hit saves. `expires_at` is fixed when it is made. `epoch`: the scope's as it
    was before its request was begun: a store keeps and finds only entries of the scope's present.
    """

    entry_id: str
    key_id: str
    scope: Scope
    exact_key: bytes
    question: str
    vector: Vector | None
    answer: CachedAnswer
    cost_nanos: int
    made_at: float
    expires_at: float
    epoch: Epoch
    confidence: Confidence = field(default_factory=Confidence)


@dataclass(frozen=True, slots=True)
class Found:
    """What an exact look-up says: the entry, and the scope's epoch at that moment."""

    entry: Entry | None
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Neighbour:
    """An entry of the scope, and how near its vector is: the cosine."""

    entry: Entry
    similarity: float


@dataclass(frozen=True, slots=True)
class Selector:
    """Which entries to drop: those of which everything holds that is not "". Never all empty."""

    tenant_id: str = ""
    model_name: str = ""
    key_id: str = ""
    question: str = ""


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

    @property
    def kind(self) -> str:
        """For operators: memory; or redis, with how it finds the nearest once that is known."""

    async def start(self) -> None:
        """Meet what is behind it, so that the log says early where that is out of reach."""

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
