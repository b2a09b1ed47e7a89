"""Where kept answers live: how long a look-up takes, what it finds, what Redis takes for them.

    python -m bench.cache_store [--redis8 "$(python tests/redis8.py)"] [--vectors FILE.npz]

Part `latency`: one tenant's entries in one scope (the hard case: scopes divide them), at each kind
of store; then look-ups one after the other, with the vector in hand: exact, and the nearest. Half
of the questions are near to one that is kept, half are not. What is found is held against a full
scan, made beforehand: its threads would be in the way. Before each look-up as much memory is read
as an index takes, as if a server had done something else meanwhile.
Part `memory`: many tenants' entries in Redis 8, and what it says it uses. Sets of vectors are made
by the store for TEMPLATES tenants; of the others they are copies (DUMP, RESTORE).
Questions are those of `--vectors` (as bench.cache keeps them) and mixtures of them, or made-up ones
in clusters.

In parts, for a machine that is not one's own for an hour:

    python -m bench.cache_store --folder DIR --fill-only ...    starts a Redis there and fills it;
                                                                again: goes on where it stopped
    python -m bench.cache_store --folder DIR ...                measures
    python -m bench.cache_store --folder DIR --stop             ends it
"""

import argparse
import asyncio
import contextlib
import json
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from redis import Redis

from bench import machine
from bench.cache_store_fill import (
    TEMPLATES,
    Questions,
    Vectors,
    copy,
    fill,
    key_of,
    made_up,
    questions,
    scope_of,
)
from bench.kept_redis import REDIS_6, KeptRedis, served
from bench.stats import percentile
from gateway.cache.codec import set_of
from gateway.cache.memory_store import MemoryAnswers
from gateway.cache.store import SIMILARITY_FLOOR, AnswerStore, StoreUnavailable
from gateway.cache.types import Entry, Scope
from gateway.store.redis_answers import RedisAnswers, quoted

ROOM_BYTES = 1 << 33
K = 8
PATIENT_S = 30.0
PROGRESS = 10
"""Tenants after which it is told how far the filling is."""
NUM_TRIED = 100
"""Tenants of whom one question is asked when all are there."""
TENANT = "tenant"
AS_GOOD = 1e-4
"""Of a cosine: nearer than that is the same."""
EFFORTS = (50, 100, 200, 400)
BETWEEN_BYTES = 64 << 20


def nearest_of(asked: Questions) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """By a full scan: which is kept nearest to each, and its cosine."""
    pieces = [one @ asked.kept.T for one in np.array_split(asked.asked, 20)]
    return (
        np.concatenate([one.argmax(axis=1) for one in pieces]),
        np.concatenate([one.max(axis=1) for one in pieces]),
    )


async def latency(store: AnswerStore, asked: Questions, num_warm: int) -> dict[str, Any]:
    """Milliseconds, and how often the nearest entry is the one that a full scan finds."""
    scope = scope_of(TENANT)
    _, best = nearest_of(asked)
    other = np.ones(BETWEEN_BYTES // 8)
    for vector in asked.asked[:num_warm]:  # axes are found, a matrix is read, caches are warm
        with contextlib.suppress(StoreUnavailable):  # the first one waits for the axes
            await _nearest(store, scope, vector)
    await asyncio.sleep(1.0)
    if isinstance(store, RedisAnswers):
        await store.drain()
    near_ms, exact_ms, num_right, num_near, num_late = [], [], 0, 0, 0
    for number in range(num_warm, len(asked.asked)):
        vector = asked.asked[number]
        other.sum()
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
        if best[number] >= SIMILARITY_FLOOR:
            num_near += 1
            found = asked.kept[_number(near[0].entry)] @ vector if near else 0.0
            num_right += bool(found >= best[number] - AS_GOOD)
    return {
        "nearest_ms": _spread(near_ms),
        "exact_ms": _spread(exact_ms),
        "recall_at_1": num_right / max(1, num_near),
        "num_with_a_neighbour": num_near,
        "num_late": num_late,
    }


async def efforts(store: RedisAnswers, asked: Questions, num_warm: int) -> list[dict[str, Any]]:
    """Redis's own search alone, by how many candidates it looks at (VSIM's EF)."""
    scope = scope_of(TENANT)
    _, best = nearest_of(asked)
    epoch = (await store.exact(scope, key_of(scope, 0))).epoch
    key = store.link.set_key(epoch, quoted(scope.tenant_id), set_of(scope, epoch))
    number_of = {key_of(scope, n)[:16]: n for n in range(len(asked.kept))}
    rows = []
    for effort in EFFORTS:
        taken_ms, num_right, num_near = [], 0, 0
        for number in range(num_warm, len(asked.asked)):
            vector = asked.asked[number]
            began_s = time.perf_counter()
            found = await store.link.similar(key, vector.tobytes(), K, effort)
            taken_ms.append((time.perf_counter() - began_s) * 1e3)
            if best[number] >= SIMILARITY_FLOOR:
                num_near += 1
                cosines = [asked.kept[number_of[member]] @ vector for member, _ in found]
                num_right += bool(max(cosines, default=0.0) >= best[number] - AS_GOOD)
        recall = num_right / max(1, num_near)
        rows.append({"effort": effort, "search_ms": _spread(taken_ms), "recall_at_1": recall})
    return rows


async def measure_latency(
    kind: str, url: str, asked: Questions, warm: int, only_fill: bool
) -> dict[str, Any]:
    """One kind of store."""
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    store = open_store(url)
    client = Redis.from_url(url) if url else None
    try:
        began_s = time.monotonic()
        await fill(store, TENANT, asked.kept, client)
        filled_s = time.monotonic() - began_s
        size = await store.size()
        told: dict[str, Any] = {"kind": kind, "num_entries": size.num_entries, "filled_s": filled_s}
        if only_fill:
            return told
        told |= await latency(store, asked, warm)
        if isinstance(store, RedisAnswers) and store.matching == "vectors":
            told["efforts"] = await efforts(store, asked, warm)
        told["counted_bytes"] = size.num_bytes
        if client is not None:
            told["redis_bytes"] = client.info("memory")["used_memory"]
    finally:
        await store.close()
        if client is not None:
            client.close()
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    return told | {"process_grew_bytes": grown_kib * 1024}


async def measure_memory(
    url: str, base: Vectors, tenants: int, each: int, until_s: float
) -> dict[str, Any]:
    """Many tenants in one Redis with vector sets; no further than until then."""
    with Redis.from_url(url) as client:
        store = open_store(url)
        assert isinstance(store, RedisAnswers)
        began_s = time.monotonic()
        for tenant in range(tenants):
            if time.monotonic() > until_s:
                break
            dice = np.random.default_rng(tenant % TEMPLATES)
            chosen = base[dice.integers(len(base), size=each)]
            name = f"tenant-{tenant:04d}"
            if tenant < TEMPLATES:
                await fill(store, name, chosen, client)
            else:
                await copy(store, client, f"tenant-{tenant % TEMPLATES:04d}", name, chosen)
            if (tenant + 1) % PROGRESS == 0:
                used = client.info("memory")["used_memory"]
                print(f"{tenant + 1} tenants: {used / 1e6:.0f} MB", flush=True)
        size = await store.size()
        num_found = 0
        for tenant in range(0, tenants, max(1, tenants // NUM_TRIED)):
            dice = np.random.default_rng(tenant % TEMPLATES)
            vector = base[dice.integers(len(base), size=each)][each // 2]
            scope = scope_of(f"tenant-{tenant:04d}")
            near = await store.nearest(scope, vector, 1)
            num_found += bool(near) and near[0].entry.scope == scope
        await store.close()
        info = client.info("memory")
    return {
        "tenants": tenants,
        "tried": len(range(0, tenants, max(1, tenants // NUM_TRIED))),
        "found": num_found,
        "entries_each": each,
        "num_entries": size.num_entries,
        "used_bytes": info["used_memory"],
        "used_peak_bytes": info["used_memory_peak"],
        "bytes_an_entry": info["used_memory"] / max(1, size.num_entries),
        "rss_bytes": info["used_memory_rss"],
        "counted_bytes": size.num_bytes,
        "filled_s": time.monotonic() - began_s,
    }


def open_store(url: str) -> AnswerStore:
    """With room and time for all."""
    if not url:
        return MemoryAnswers(ROOM_BYTES, ROOM_BYTES)
    return RedisAnswers(url, "bench", ROOM_BYTES, PATIENT_S, ROOM_BYTES, write_timeout_s=PATIENT_S)


async def _nearest(store: AnswerStore, scope: Scope, vector: Vectors) -> None:
    await store.exact(scope, key_of(scope, 0))
    await store.nearest(scope, vector, K)


def _number(entry: Entry) -> int:
    return int(entry.entry_id.rpartition("-")[2], 16)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {name: percentile(values, q) for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--redis8", default="", help="what starts a Redis with vector sets")
    parser.add_argument("--vectors", type=Path, help="an .npz with `vectors` [n, 384]")
    parser.add_argument("--parts", nargs="+", default=["latency", "memory"])
    parser.add_argument("--kinds", nargs="+", default=["memory", "vectors", "matrix"])
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--lookups", type=int, default=1000)
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--each", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="where a Redis goes on running (in it: a kind)")
    parser.add_argument("--fill-only", action="store_true", help="measure nothing yet")
    parser.add_argument("--for-s", type=float, default=1e9, help="then stop filling tenants")
    parser.add_argument("--stop", action="store_true", help="end what runs in --folder")
    parser.add_argument("--output", type=Path, help="the report, as JSON; what it says of other")
    return parser.parse_args()


def main() -> None:
    """See the module's docstring."""
    args = _options()
    if args.stop:
        for pid in args.folder.glob("*/redis.pid"):
            KeptRedis(pid.parent).stop()
        return
    until_s = time.monotonic() + args.for_s
    base = np.load(args.vectors)["vectors"] if args.vectors else made_up(20_000)
    commands = {"memory": "", "vectors": args.redis8, "matrix": REDIS_6}
    told: dict[str, Any] = {}
    if args.output and args.output.exists():
        told = json.loads(args.output.read_text())
    told |= {"vectors": "given" if args.vectors else "made up", "machine": machine.facts()}

    def folder(name: str) -> Path | None:
        return None if args.folder is None else Path(args.folder) / name

    for kind in args.kinds if "latency" in args.parts else ():
        if kind == "vectors" and not args.redis8:
            continue
        asked = questions(base, args.entries, args.lookups + args.lookups // 5)
        with served(commands[kind], folder(kind)) as url:
            warm = args.lookups // 5
            row = asyncio.run(measure_latency(kind, url, asked, warm, args.fill_only))
        rows = [one for one in told.get("latency", []) if one["kind"] != kind]
        told["latency"] = [*rows, row]
        print(json.dumps(row), flush=True)
    if "memory" in args.parts and args.redis8:
        with served(args.redis8, folder("tenants")) as url:
            row = asyncio.run(measure_memory(url, base, args.tenants, args.each, until_s))
        told["memory"] = row
        print(json.dumps(row), flush=True)
    if args.output and not args.fill_only:
        args.output.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
