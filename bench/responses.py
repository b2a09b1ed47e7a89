"""Stored responses: what finding, continuing and storing one costs beside many others.

    python -m bench.responses [--responses 100000] [--tenants 10] [--work-dir DIR] [--output FILE]
                              [--database URL]

Fills a registry and a folder of objects through the product's own functions: chains of ten, of a
few kilobytes each, of several tenants. Filling does without syncs and takes a thousand rows in a
transaction; nothing that is timed does. Then times, one after another in this process:

    read       `ResponseStore.read` of responses at random: a row and its object, digest checked
    missing    the same of an id that is not there
    earlier    the items of a chain: the newest of ten, and of one of a thousand
    store      `ResponseStore.add`: an object and a row, both durable
    remove     `ResponseStore.remove`
    sweep      one look of the sweeper over all objects

What HTTP and the pipeline cost is not in it. Caches are warm, since the files were just written.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from sqlalchemy import Engine

from bench.machine import facts
from bench.stats import spread
from engine.objects.folder_store import FolderStore
from gateway.state.response_store import ResponseStore
from gateway.state.sweeper import StateSweeper
from registry.errors import NotFound
from registry.schema import upgrade
from registry.session import appending, make_engine
from registry.state import responses
from registry.state.responses import MAX_DEPTH, ResponseRecord, Viewer

CHAIN = 10
BATCH = 1000
NUM_READS = 5000
NUM_STORES = 300
NUM_CHAINS = 200
TEXT = "The game is afoot, Watson, and there is no time to be lost. " * 20
PLENTY = 10**9


class Filled:
    """A registry with responses, and how they are named."""

    def __init__(self, folder: Path, url: str, num_tenants: int) -> None:
        upgrade(url)
        self.engine: Engine = make_engine(url)
        self.objects = FolderStore(folder / "objects")
        self.store = ResponseStore(self.engine, self.objects, PLENTY, PLENTY, time.time)
        self.num_tenants = num_tenants

    def record(self, number: int, parent: int | None, depth: int) -> ResponseRecord:
        """The response of this number, without its object."""
        return ResponseRecord(
            id=f"resp_{number:032x}",
            tenant_id=self.tenant(number),
            parent_id=None if parent is None else f"resp_{parent:032x}",
            model="tiny",
            state="completed",
            depth=depth,
            object_name="",
            sha256="",
            items_bytes=0,
            created_at=time.time(),
        )

    def tenant(self, number: int) -> str:
        """Chains are of one tenant."""
        return f"ten_{number // MAX_DEPTH % self.num_tenants}"

    def viewer(self, number: int) -> Viewer:
        """Who may see that response."""
        return Viewer(self.tenant(number), None, 0.0)

    def fill(self, numbers: Sequence[int], length: int) -> None:
        """These responses, in chains of this length."""
        made = []
        for number in numbers:
            depth = number % length
            record = self.record(number, number - 1 if depth else None, depth)
            made.append(self.store.put(record, msgspec.json.encode(items(number)), body(number)))
        with appending(self.engine, "bench") as session:
            for record in made:
                assert responses.add(session, record, PLENTY)


def items(number: int) -> list[dict[str, Any]]:
    """The input of a response."""
    part = {"type": "input_text", "text": f"{number} {TEXT}"}
    return [{"id": f"msg_{number}", "type": "message", "role": "user", "content": [part]}]


def body(number: int) -> bytes:
    """A response as it is told."""
    part = {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
    said = {"id": f"msg_o{number}", "type": "message", "role": "assistant", "content": [part]}
    told = {"id": f"resp_{number:032x}", "status": "completed", "output": [said], "model": "tiny"}
    return msgspec.json.encode(told)


@contextmanager
def without_syncs() -> Iterator[None]:
    """While filling: a crash would only mean to begin anew."""
    with mock.patch.object(os, "fsync"):
        yield


def timed(work: Callable[[int], object], numbers: Sequence[int]) -> dict[str, float]:
    """Milliseconds of each call, and its mean CPU time."""
    values = []
    cpu_s = time.process_time()
    for number in numbers:
        began_s = time.perf_counter()
        work(number)
        values.append((time.perf_counter() - began_s) * 1000)
    cpu_ms = (time.process_time() - cpu_s) * 1000 / len(values)
    found = spread(values)
    assert found is not None
    figures = {"p50": found["p50"], "p99": found["p99"], "max": found["max"], "cpu": cpu_ms}
    return {name: round(value, 3) for name, value in figures.items()}


def measure(filled: Filled, num_responses: int) -> dict[str, Any]:
    """All figures, in milliseconds."""
    store, draw = filled.store, random.Random(1)

    def missing(number: int) -> None:
        try:
            store.read(filled.viewer(number), f"resp_{number + PLENTY:032x}")
        except NotFound:
            return
        raise AssertionError

    def remove(number: int) -> None:
        store.remove(filled.viewer(number), filled.record(number, None, 0).id)

    def add(number: int) -> None:
        assert store.add(filled.record(number, None, 0), items(number), body(number))

    def read(number: int) -> None:
        store.read(filled.viewer(number), filled.record(number, None, 0).id)

    def earlier(number: int) -> None:
        store.earlier(filled.viewer(number), filled.record(number, None, 0).id)

    at_random = [draw.randrange(num_responses) for _ in range(NUM_READS)]
    ends = [n // CHAIN * CHAIN + CHAIN - 1 for n in at_random[:NUM_CHAINS]]
    base = (num_responses // MAX_DEPTH + 1) * MAX_DEPTH
    with without_syncs():
        filled.fill(range(base, base + MAX_DEPTH - 1), MAX_DEPTH)
    new = range(base + MAX_DEPTH, base + MAX_DEPTH + NUM_STORES)
    figures: dict[str, Any] = {
        "read": timed(read, at_random),
        "missing": timed(missing, at_random),
        "earlier_10": timed(earlier, ends),
        "earlier_999": timed(earlier, [base + MAX_DEPTH - 2] * 10),
        "store": timed(add, new),
        "remove": timed(remove, new),
    }
    sweeper = StateSweeper(filled.engine, filled.objects, 30, 600.0, lambda: time.time() + 86_400)
    began_s = time.perf_counter()
    swept = sweeper.look()
    figures["sweep_s"] = round(time.perf_counter() - began_s, 2)
    assert swept.num_expired == swept.num_orphans == 0
    return figures


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--responses", type=int, default=100_000)
    parser.add_argument("--tenants", type=int, default=10)
    parser.add_argument("--work-dir", type=Path)
    parser.add_argument("--database", default="", help="another database than SQLite")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work_dir) as folder:
        url = options.database or f"sqlite:///{folder}/polyhost.db"
        filled = Filled(Path(folder), url, options.tenants)
        began_s = time.perf_counter()
        for begin in range(0, options.responses, BATCH):
            with without_syncs():
                filled.fill(range(begin, min(begin + BATCH, options.responses)), CHAIN)
        fill_s = time.perf_counter() - began_s
        found = {
            "machine": facts(),
            "num_responses": options.responses,
            "fill_s": round(fill_s, 1),
            "milliseconds": measure(filled, options.responses),
        }
        filled.engine.dispose()
    text = json.dumps(found, indent=2)
    if options.output:
        options.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
