"""`python -m bench.cache_search`: how long a search among a tenant's kept answers takes.

Sizes are what the defaults hold: one tenant's short answers in `cache_tenant_max_bytes`, and a
scope's vectors that `cache_max_bytes` mirrors from an older Redis; and ten times the first, for
who raises them. Milliseconds from the call on the event loop to its answer, and of processor time.
"""

import argparse
import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bench import machine, stats
from gateway.cache.memory_store import ENTRY_OVERHEAD_BYTES
from gateway.cache.types import SIMILARITY_FLOOR
from gateway.cache.vector_index import ROW_OVERHEAD_BYTES, VECTOR_OVERHEAD, VectorIndex
from gateway.settings.settings import Settings

TEXT_BYTES = 316
"""A question of 60 and an answer of 256 bytes."""
NEIGHBOURS = 8


def sizes(num_dims: int) -> list[int]:
    """Rows of one scope."""
    settings, vector_bytes = Settings(), int(4 * num_dims * VECTOR_OVERHEAD)
    entry_bytes = ENTRY_OVERHEAD_BYTES + TEXT_BYTES + vector_bytes
    kept = settings.cache_tenant_max_bytes // entry_bytes
    return [kept, settings.cache_max_bytes // (vector_bytes + ROW_OVERHEAD_BYTES), 10 * kept]


async def measure(num_rows: int, num_dims: int, num_lookups: int) -> dict[str, object]:
    """One size; vectors in clusters of eight."""
    dice = np.random.default_rng(0)
    centres = dice.standard_normal((1 + num_rows // 8, num_dims), np.float32)
    made = centres[dice.integers(len(centres), size=num_rows + num_lookups)]
    made += 0.7 * dice.standard_normal(made.shape, np.float32)
    made /= np.linalg.norm(made, axis=1, keepdims=True)
    index = VectorIndex(num_dims)
    for number in range(num_rows):
        index.add(b"%d" % number, made[number])
    walls, cpus = [], []
    with ThreadPoolExecutor(1) as threads:
        for vector in made[num_rows:]:
            wall, cpu = time.perf_counter(), time.process_time()
            await index.nearest(vector, NEIGHBOURS, SIMILARITY_FLOOR, threads)
            walls.append((time.perf_counter() - wall) * 1e3)
            cpus.append((time.process_time() - cpu) * 1e3)
    wall_ms, cpu_ms = stats.spread(walls), stats.spread(cpus)
    return {"rows": num_rows, "dims": num_dims, "ms": wall_ms, "cpu_ms": cpu_ms}


def main() -> None:
    """All sizes, as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lookups", type=int, default=300)
    args = parser.parse_args()
    measured = [
        asyncio.run(measure(num_rows, num_dims, args.lookups))
        for num_dims in (384, 1024)
        for num_rows in sizes(num_dims)
    ]
    print(json.dumps({"machine": machine.facts(), "searches": measured}, indent=2))


if __name__ == "__main__":
    main()
