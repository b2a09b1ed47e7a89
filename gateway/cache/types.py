"""The nouns of the answer cache: what its parts hand to one another. No behaviour, no I/O.

Instants named `*_at` are wall-clock seconds (UTC epoch): entries are shared by processes, and
outlive them. Who decides is policy/cache_rule.py; who keeps is store.py.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gateway.policy.cache_confidence import Confidence

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
