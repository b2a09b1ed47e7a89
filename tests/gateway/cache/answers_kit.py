"""What tests of answer stores share: entries, a plain model of the seam, and each kind of store."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from gateway.cache.memory_store import MemoryAnswers, selects
from gateway.cache.redis_answers import RedisAnswers
from gateway.cache.types import (
    SIMILARITY_FLOOR,
    AnswerStore,
    CachedAnswer,
    Entry,
    Scope,
    Selector,
    Vector,
)
from tests import redis8
from tests.redis_kit import BINARY, RedisServer

BEGAN_AT = 1_795_000_000.0
NUM_DIMS = 48
PATIENT_S = 10.0
"""A deadline for tests that are not about deadlines."""
MIB = 1024 * 1024
KINDS = ("memory", "vectors", "matrix")


@dataclass
class Now:
    """The stores' clock."""

    at: float = BEGAN_AT

    def __call__(self) -> float:
        return self.at


def scope_of(tenant_id: str = "tenant", model_name: str = "model", system: str = "") -> Scope:
    """As gateway/cache/cache_request.py would make one."""
    digest = blake2b("\0".join((tenant_id, model_name, system)).encode(), digest_size=32).digest()
    return Scope(tenant_id, model_name, digest)


def vector_of(seed: str, near: str = "", share: float = 0.0) -> Vector:
    """A direction for a text; `share` of it that of another."""
    own = np.random.default_rng(int.from_bytes(blake2b(seed.encode()).digest()[:8]))
    vector = own.standard_normal(NUM_DIMS).astype(np.float32)
    vector /= np.linalg.norm(vector)
    if near:
        vector = (1 - share) * vector + share * vector_of(near)
    unit: Vector = (vector / np.linalg.norm(vector)).astype(np.float32)
    return unit


def entry_of(
    scope: Scope,
    question: str,
    epoch: bytes,
    vector: Vector | None = None,
    text: str = "answer",
    ttl_s: float = 600.0,
    made_at: float = BEGAN_AT,
    cost_nanos: int = 1000,
    key_id: str = "key",
) -> Entry:
    """An entry whose exact key is that of its question in its scope."""
    return Entry(
        entry_id=f"req-{scope.tenant_id}-{question}-{text}",
        key_id=key_id,
        scope=scope,
        exact_key=key_of(scope, question),
        question=question,
        vector=vector,
        answer=CachedAnswer(text, "stop", 3),
        cost_nanos=cost_nanos,
        made_at=made_at,
        expires_at=made_at + ttl_s,
        epoch=epoch,
    )


def key_of(scope: Scope, question: str) -> bytes:
    """The digest of a whole request."""
    return blake2b(scope.digest + question.encode(), digest_size=32).digest()


@dataclass
class Model:
    """What a store has to find: a dictionary, looked through from end to end."""

    now: Now
    entries: dict[bytes, Entry] = field(default_factory=dict)

    def keep(self, entry: Entry) -> None:
        """It has been kept."""
        self.entries[entry.exact_key] = entry

    def live(self, scope: Scope) -> list[Entry]:
        """What may be found in it."""
        entries = self.entries.values()
        return [one for one in entries if one.scope == scope and one.expires_at > self.now.at]

    def exact(self, scope: Scope, key: bytes) -> str | None:
        """The id of what is to be found."""
        found = [one.entry_id for one in self.live(scope) if one.exact_key == key]
        return found[0] if found else None

    def near(self, scope: Scope, vector: Vector) -> dict[str, float]:
        """Ids and cosines from the floor on."""
        live = [one for one in self.live(scope) if one.vector is not None]
        cosines = {one.entry_id: float(np.dot(one.vector, vector)) for one in live}  # type: ignore[arg-type]
        return {name: cos for name, cos in cosines.items() if cos >= SIMILARITY_FLOOR}

    def drop(self, selector: Selector) -> None:
        """It has been purged or invalidated."""
        kept = [one for one in self.entries.values() if not selects(selector, one)]
        self.entries = {one.exact_key: one for one in kept}

    def learn(self, entry: Entry, confidence: object) -> None:
        """It has been learnt."""
        old = self.entries[entry.exact_key]
        self.entries[entry.exact_key] = replace(old, confidence=confidence)  # type: ignore[arg-type]


@dataclass
class Rig:
    """One kind of store: all gateways that share it, and its server."""

    kind: str
    now: Now
    stores: list[AnswerStore]
    server: RedisServer | None = None

    def any(self, dice: random.Random) -> AnswerStore:
        """One gateway's."""
        return dice.choice(self.stores)

    async def settle(self) -> None:
        """Until what was handed over has been done."""
        for store in self.stores:
            if isinstance(store, RedisAnswers):
                await store.drain()


def server_of(kind: str, folder: Path) -> RedisServer:
    """A Redis with vector sets or without. Skips the test where there is none with."""
    if kind != "vectors":
        return RedisServer(folder, [str(BINARY)])
    try:
        return RedisServer(folder, redis8.command())
    except redis8.Missing as missing:
        pytest.skip(str(missing))


@asynccontextmanager
async def rig_of(
    kind: str,
    folder: Path,
    tenant_max_bytes: int = 64 * MIB,
    timeout_s: float = PATIENT_S,
    num_gateways: int = 2,
) -> AsyncIterator[Rig]:
    """One that is ready, with an empty store."""
    now = Now()
    if kind == "memory":
        memory = MemoryAnswers(4 * tenant_max_bytes, tenant_max_bytes, now)
        yield Rig(kind, now, [memory])
        memory.check_integrity()
        await memory.close()
        return
    server = server_of(kind, folder)
    server.start()
    stores = [
        RedisAnswers(
            server.url, "test", tenant_max_bytes, timeout_s, clock=now, write_timeout_s=PATIENT_S
        )
        for _ in range(num_gateways)
    ]
    try:
        for store in stores:
            await store.start()
            assert store.kind == f"redis ({kind})"
        yield Rig(kind, now, list(stores), server)
    finally:
        for store in stores:
            await store.close()
        server.stop()
