"""`python -m bench.cache_timing`: does the time of a look-up tell what other tenants have asked?

    python -m bench.cache_timing [--redis8 "$(python tests/redis8.py)"] [--vectors FILE.npz]

Two tenants, the same model, the same system prompt, in each kind of store. One has asked thousands
of questions. The other now looks up some of these, and as many that nobody has asked, in turn; it
finds none of either. Told are the medians of both, by how much they differ, and the rank test's z
(Mann and Whitney): beyond 3 in either direction the two could be told apart with so many look-ups.
Beside it, to show that the test sees what there is to see: the first tenant's own look-ups, of
questions that it has asked and of others. Exit status 1 where another's are told apart, or one's
own are not.
"""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import machine
from bench.cache_store import open_store
from bench.cache_store_fill import Vectors, fill, key_of, made_up, scope_of
from bench.kept_redis import REDIS_6, served
from gateway.cache.store import AnswerStore

ONE, OTHER = "one", "other"
NOT_KEPT = 10**6
"""Numbers of keys from here on are of nothing that is kept."""
APART = 3.0


def z_of(a: list[float], b: list[float]) -> float:
    """Of Mann and Whitney's rank sum; above 0 where `a` is the slower."""
    ranks = np.empty(len(a) + len(b))
    ranks[np.argsort([*a, *b], kind="stable")] = np.arange(1, len(ranks) + 1)
    over = ranks[: len(a)].sum() - len(a) * (len(a) + 1) / 2
    spread = np.sqrt(len(a) * len(b) * (len(ranks) + 1) / 12)
    return float((over - len(a) * len(b) / 2) / spread)


@dataclass(frozen=True, slots=True)
class Pools:
    """Questions of one kind: what ONE has asked, what nobody has, what OTHER has."""

    one: Vectors
    nobody: Vectors
    other: Vectors


def pools_of(base: Vectors, num: int) -> Pools:
    """Drawn without looking."""
    mixed = base[np.random.default_rng(2).permutation(len(base))]
    return Pools(mixed[:num], mixed[num : 2 * num], mixed[2 * num : 3 * num])


async def taken(store: AnswerStore, tenant: str, pools: Pools) -> dict[str, Any]:
    """What look-ups of this tenant take: of questions that ONE has asked, and of nobody's."""
    kept_ms, new_ms = list[float](), list[float]()
    first = 0 if tenant == ONE else NOT_KEPT
    dice = np.random.default_rng(3)
    for number in range(len(pools.one)):
        is_kept_first = bool(dice.integers(2))
        for is_kept in (is_kept_first, not is_kept_first):
            key = key_of(scope_of(tenant), first + number if is_kept else -1 - number)
            vector = pools.one[number] if is_kept else pools.nobody[number]
            began_s = time.perf_counter()
            await store.exact(scope_of(tenant), key)
            await store.nearest(scope_of(tenant), vector, 8)
            (kept_ms if is_kept else new_ms).append((time.perf_counter() - began_s) * 1e3)
    medians = float(np.median(kept_ms)), float(np.median(new_ms))
    return {
        "kept_ms": round(medians[0], 4),
        "new_ms": round(medians[1], 4),
        "differ_us": round(1e3 * (medians[0] - medians[1]), 2),
        "z": round(z_of(kept_ms, new_ms), 2),
    }


async def measure(kind: str, url: str, pools: Pools) -> dict[str, Any]:
    """One kind of store."""
    store = open_store(url)
    await fill(store, ONE, pools.one, None)
    await fill(store, OTHER, pools.other, None)
    await taken(store, OTHER, pools)  # caches are filled
    others = await taken(store, OTHER, pools)
    own = await taken(store, ONE, pools)
    await store.close()
    is_ok = abs(others["z"]) < APART and abs(own["z"]) > APART
    return {"kind": kind, "lookups": len(pools.one), "others": others, "own": own, "ok": is_ok}


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.cache_timing")
    parser.add_argument("--redis8", default="", help="what starts a Redis with vector sets")
    parser.add_argument("--vectors", type=Path, help="an .npz with `vectors` [n, 384]")
    parser.add_argument("--lookups", type=int, default=1000, help="of each sort")
    parser.add_argument("--output", type=Path, help="the report, as JSON")
    args = parser.parse_args()
    base = np.load(args.vectors)["vectors"] if args.vectors else made_up(20_000)
    pools = pools_of(base, min(args.lookups, len(base) // 3))
    commands = {"memory": "", "vectors": args.redis8, "matrix": REDIS_6}
    rows = []
    for kind, command in commands.items():
        if kind == "vectors" and not command:
            continue
        with served(command) as url:
            rows.append(asyncio.run(measure(kind, url, pools)))
        print(json.dumps(rows[-1]), flush=True)
    if args.output:
        told = {"benchmark": "cache-timing", "machine": machine.facts(), "stores": rows}
        args.output.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
