"""A dispatcher's word about workers, scripted: what the operator's socket answers where pages ask.

`FleetDesk.fleet` is told to whoever asks; tests change it between looks, from any thread.
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from engine.protocol import Layout, Lease, ModelStatus, SwapRecord, WorkerStatus
from gateway.dispatch.fleet_told import (
    Candidate,
    Evicted,
    Fleet,
    Loaded,
    Moved,
    Swapped,
    WaitingGroup,
    Worker,
    encode,
)
from gateway.dispatch.operator_socket import listening, operator_socket
from gateway.services import DispatcherSnapshot
from tests.admin.site import MIB, Site

PAGE = 2 * MIB
NUM_PAGES = 256


class FleetDesk:
    """Implements operator_socket.Desk. `fleet` None: it says that it cannot tell."""

    def __init__(self, fleet: Fleet | None) -> None:
        self.fleet = fleet
        self.num_asked = 0

    def answer(self, line: bytes) -> dict[str, Any]:
        asked = msgspec.json.decode(line)["ask"]
        if asked != "fleet" or self.fleet is None:
            return {"error": f"no {asked} here"}
        self.num_asked += 1
        return {"at": self.fleet.at, "fleet": encode(self.fleet)}


@contextlib.contextmanager
def telling(site: Site, desk: FleetDesk) -> Iterator[FleetDesk]:
    """The site's dispatcher answers, as long as the block runs."""
    up, over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with listening(operator_socket(site.control.settings.data_path), desk):
            up.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="desk")
    thread.start()
    try:
        assert up.wait(30), "the desk did not open"
        yield desk
    finally:
        over.set()
        thread.join(30)


def model(name: str, state: str = "resident", running: int = 0) -> ModelStatus:
    """Weights of 32 pages, KV of 8."""
    kv = 8 * PAGE if state == "resident" else 0
    return ModelStatus(name, state, 32 * PAGE, kv, running, 0, 0.2)  # type: ignore[arg-type]


def status(
    *rows: ModelStatus, worker: str = "worker-0", pages: dict[str, int] | None = None
) -> WorkerStatus:
    """Each model on the device has 32 pages of weights, 6 of KV in use, 2 of KV kept, unless
    `pages` says whose they are."""
    if pages is None:
        pages = {}
        for row in rows:
            if row.state == "resident":
                pages |= {f"{row.model_id}/weights": 32, f"{row.model_id}/kv": 6}
                pages[f"{row.model_id}/kv_cached"] = 2
        pages["free"] = NUM_PAGES - sum(pages.values())
    leases = [Lease(row.model_id, 8, 4096, 64 << 10) for row in rows if row.state == "resident"]
    return WorkerStatus(
        "epoch", worker, 0, 8, pages["free"] * PAGE, 2.0, PAGE, NUM_PAGES, pages, list(rows),
        leases, [], {"generation_tokens": 0.0},
    )  # fmt: skip


def layout(*names: str) -> Layout:
    """Weights low, KV high."""
    owners = [*(f"{name}/weights" for name in names), "free", *(f"{name}/kv" for name in names)]
    num = len(names)
    stretches = [(n, 32) for n in range(num)]
    stretches.append((num, NUM_PAGES - 40 * num))
    stretches += [(num + 1 + n, 8) for n in range(num)]
    return Layout(owners, stretches)


def fleet(at: float, *workers: WorkerStatus, **fields: Any) -> Fleet:
    """Connected since half an hour; every model on a device came ten minutes ago."""
    rows = [(each, row) for each in workers for row in each.models]
    here = {r.model_id for _, r in rows if r.state == "resident"}
    moves = [
        Moved(at - 600, each.worker_id, row.model_id, "loading", "resident")
        for each, row in rows
        if row.state == "resident"
    ]
    lies = [[r.model_id for r in each.models if r.state == "resident"] for each in workers]
    given: dict[str, Any] = {
        "at": at,
        "since_at": at - 1800,
        "workers": [
            Worker(
                each,
                layout(*names) if len(names) * 40 <= NUM_PAGES else None,
                {row.model_id: at - 600 for row in each.models},
            )
            for each, names in zip(workers, lies, strict=True)
        ],
        "lost": {},
        "moves": moves,
        "swaps": [],
        "evictions": [],
        "loads": {name: Loaded(at - 601, "idle models make room") for name in here},
        "waiting": [],
        "dispatcher": queue(),
        **fields,
    }
    return Fleet(**given)


def queue(waiting: int = 0, running: int = 0, **etas: float) -> DispatcherSnapshot:
    """The fair queue's figures."""
    return DispatcherSnapshot(
        waiting, running, {"beta": waiting}, {"alpha": running}, {}, {}, 0, 0, 0, 0, 0, 0, {},
        load_eta_s=etas,
    )  # fmt: skip


def eviction(at: float, gone: str, newcomer: str, num_kept: int = 1) -> Evicted:
    """`gone` left for `newcomer`; others stayed."""
    rows = [Candidate(gone, "evicted", 1e-11, 0.1, 0.2, 32 * PAGE, 40)]
    rows += [
        Candidate(f"kept-{n}", "kept: first use", 3e-11, 0.3, 0.2, 32 * PAGE, 40)
        for n in range(num_kept)
    ]
    return Evicted(at, "worker-0", newcomer, "load", 0.4, 2e-11, 24, rows)


def swap(at: float, name: str, kind: str, reason: str = "") -> Swapped:
    """One that has ended."""
    tier = "host" if kind == "load" else "none"
    record = SwapRecord(name, kind, tier, 32 * PAGE, 0.2, reason)  # type: ignore[arg-type]
    return Swapped(at, "worker-0", record)


def group(tenant_id: str, name: str, num: int = 3) -> WaitingGroup:
    """Requests that wait for a load."""
    text = f"{name} is being loaded on worker-0 (bound reached), 0.2 s to go"
    return WaitingGroup(tenant_id, name, num, 0.7, "loading", text)
