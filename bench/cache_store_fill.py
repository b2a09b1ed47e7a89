"""What `bench.cache_store` looks up: questions, answers, and a store filled with them.

A Redis knows how far its filling is, so that it may be done in parts. Lives here: made-up data,
filling. Does not: any figure, any process.
"""

import time
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from redis import Redis

from gateway.cache.codec import encode, id_of, set_of
from gateway.cache.store import AnswerStore
from gateway.cache.types import CachedAnswer, Entry, Scope
from gateway.store.redis_answers import (
    ENTRY_OVERHEAD_BYTES,
    MEMBER_OVERHEAD_BYTES,
    RedisAnswers,
    quoted,
)

NUM_DIMS = 384
TTL_S = 24 * 3600.0
ANSWER_BYTES = 256
QUESTION_BYTES = 60
IN_HAND = 64
"""Entries handed over before they are waited for."""
NUM_HELD = 600
"""Of the base; never kept, however many of them are asked."""
NEAR_SHARE = 0.25
TEMPLATES = 20
"""Tenants that are filled through the store; sets of the others are copies of theirs."""
DONE_KEY = "bench:done"
"""A hash in that Redis: how many entries of each tenant are there."""
PROSE = Path(__file__).resolve().parent.parent / "docs" / "architecture.md"
"""Answers are pieces of it: English, for answers are kept deflated."""

STATE_KEY = "{bench:cache}:state"
SCRIPT = Path(__file__).resolve().parent.parent / "gateway" / "store" / "answers.lua"

Vectors: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Questions:
    """`kept` are in the store, `asked` are looked up."""

    kept: Vectors
    asked: Vectors


def questions(base: Vectors, num_kept: int, num_asked: int, seed: int = 0) -> Questions:
    """Of the base first, then mixtures of three of it; half of what is asked is held out, half is
    beside one that is kept."""
    dice = np.random.default_rng(seed)
    base = base[dice.permutation(len(base))]
    held, base = base[:NUM_HELD], base[NUM_HELD:]
    num_mixed = max(0, num_kept - len(base))
    a, b, c = (base[dice.integers(len(base), size=num_mixed)] for _ in range(3))
    share = dice.uniform(0.1, 0.4, size=(num_mixed, 1)).astype(np.float32)
    kept = np.concatenate([base, unit(a + share * b + 0.2 * c)])[:num_kept]
    held = held[: num_asked // 2]
    chosen = kept[dice.integers(len(kept), size=num_asked - len(held))]
    other = base[dice.integers(len(base), size=len(chosen))]
    asked = np.concatenate([held, unit(chosen + NEAR_SHARE * other)])
    return Questions(kept, asked[dice.permutation(len(asked))])


def made_up(num: int, seed: int = 0) -> Vectors:
    """Clusters along axes of falling length, as sentence embeddings lie."""
    dice = np.random.default_rng(seed)
    fall = 0.99 ** np.arange(NUM_DIMS)
    centres = dice.standard_normal((max(1, num // 10), NUM_DIMS)) * fall
    made = centres[dice.integers(len(centres), size=num)]
    turn, _ = np.linalg.qr(dice.standard_normal((NUM_DIMS, NUM_DIMS)))
    return unit((made + 0.5 * fall * dice.standard_normal((num, NUM_DIMS))) @ turn)


class Answers:
    """Entries: an answer of a few sentences each, of a text of many."""

    def __init__(self) -> None:
        self._prose = PROSE.read_text(encoding="utf-8").encode("ascii", "replace").decode()

    def entry(
        self, tenant: str, number: int, vector: Vectors, epoch: bytes, like: str = ""
    ) -> Entry:
        """The one of that number; `like`: with the ids of that tenant's."""
        scope, question = scope_of(tenant), f"question {number} ".ljust(QUESTION_BYTES, "?")
        now = time.time()
        key = key_of(scope_of(like) if like else scope, number)
        begin = int.from_bytes(key_of(scope, number)[:4]) % (len(self._prose) - ANSWER_BYTES)
        text = self._prose[begin : begin + ANSWER_BYTES]
        return Entry(
            entry_id=f"chatcmpl-{number:032x}",
            key_id=f"key-{number % 7}",
            scope=scope,
            exact_key=key,
            question=question,
            vector=vector,
            answer=CachedAnswer(text, "stop", 70),
            cost_nanos=1000 + number % 97,
            made_at=now,
            expires_at=now + TTL_S,
            epoch=epoch,
        )


def scope_of(tenant: str) -> Scope:
    """The tenant's one scope."""
    return Scope(tenant, "model", blake2b(tenant.encode(), digest_size=32).digest())


def key_of(scope: Scope, number: int) -> bytes:
    """Of the question of that number."""
    return blake2b(scope.digest + b"%d" % number, digest_size=32).digest()


async def fill(store: AnswerStore, tenant: str, vectors: Vectors, done: Redis | None) -> None:
    """All of them kept; `done` remembers how many, and which are already."""
    scope, answers = scope_of(tenant), Answers()
    begin = 0 if done is None else int(done.hget(DONE_KEY, tenant) or 0)
    epoch = (await store.exact(scope, key_of(scope, 0))).epoch
    for number in range(begin, len(vectors)):
        await store.keep(answers.entry(tenant, number, vectors[number], epoch))
        is_last = number + 1 == len(vectors)
        if isinstance(store, RedisAnswers) and (is_last or (number + 1) % IN_HAND == 0):
            await store.drain()
            if done is not None:
                done.hset(DONE_KEY, tenant, number + 1)


async def copy(
    store: RedisAnswers, client: Redis, source: str, tenant: str, vectors: Vectors
) -> None:
    """As `fill` would, in a tenth of the time: entries by the same script, many calls at a time,
    and the source's set of vectors, which is the same but for its name, written out and read."""
    if int(client.hget(DONE_KEY, tenant) or 0) == len(vectors):
        return
    answers, scope, origin = Answers(), scope_of(tenant), scope_of(source)
    of_source = (await store.exact(origin, bytes(32))).epoch
    epoch = (await store.exact(scope, bytes(32))).epoch
    sha = client.script_load(SCRIPT.read_text())
    for begin in range(0, len(vectors), IN_HAND):
        pipe = client.pipeline(transaction=False)
        for number in range(begin, min(len(vectors), begin + IN_HAND)):
            entry = answers.entry(tenant, number, vectors[number], epoch, like=source)
            overhead = ENTRY_OVERHEAD_BYTES + MEMBER_OVERHEAD_BYTES + NUM_DIMS
            value = encode(entry, False, overhead)
            call = ("keep", "00000000", 0, tenant, scope.model_name, epoch, id_of(entry.exact_key))
            limits = (value, int(TTL_S * 1000), entry.cost_nanos, 1 << 33)
            pipe.evalsha(sha, 1, STATE_KEY, *call, *limits)
        if any(answer[2] != [1] for answer in pipe.execute()):
            raise RuntimeError("an entry was not kept")
    dumped = client.dump(store.link.set_key(of_source, quoted(source), set_of(origin, of_source)))
    name = store.link.set_key(epoch, quoted(tenant), set_of(scope, epoch))
    assert dumped is not None
    client.restore(name, int(TTL_S * 1000), dumped, replace=True)
    client.hset(DONE_KEY, tenant, len(vectors))


def unit(vectors: NDArray[Any]) -> Vectors:
    """Of length 1."""
    made: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return made.astype(np.float32)
