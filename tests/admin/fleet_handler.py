"""A dispatcher's word about workers, scripted: what the operator's socket answers where pages ask.

`FleetHandler.fleet` is told to whoever asks; tests change it between looks, from any thread.
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from engine.protocol import Layout, Lease, ModelStatus, SwapCandidate, SwapRecord, WorkerStatus
from gateway.dispatch.decisions import DecisionRecord, Move, Swapped
from gateway.dispatch.operator_handler import (
    FleetReport,
    WaitingReport,
    Worker,
    encode,
)
from gateway.dispatch.policy.reasons import DecisionFigures
from gateway.ipc.control_socket import listening, operator_socket
from gateway.protocols import DispatcherSnapshot
from tests.admin.site import MIB, Site

PAGE = 2 * MIB
NUM_PAGES = 256


class FleetHandler:
    """Implements ControlHandler. `fleet` None: it says that it cannot tell."""

    def __init__(self, fleet: FleetReport | None) -> None:
        self.fleet = fleet
        self.num_asked = 0
        self.checks: dict[str, dict[str, str]] = {}

    def answer(self, line: bytes) -> dict[str, Any]:
        asked = msgspec.json.decode(line)["ask"]
        if asked == "check":
            return {"at": 0.0, "checks": self.checks}
        if asked != "fleet" or self.fleet is None:
            return {"error": f"no {asked} here"}
        self.num_asked += 1
        return {"at": self.fleet.at, "fleet": encode(self.fleet)}


@contextlib.contextmanager
def telling(site: Site, handler: FleetHandler) -> Iterator[FleetHandler]:
    """The site's dispatcher answers, as long as the block runs."""
    up, over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with listening(operator_socket(site.operator.settings.data_path), handler):
            up.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="handler")
    thread.start()
    try:
        assert up.wait(30), "the handler did not open"
        yield handler
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
        "epoch", worker, 8, pages["free"] * PAGE, 2.0, PAGE, NUM_PAGES, pages, list(rows),
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


def fleet(at: float, *workers: WorkerStatus, **fields: Any) -> FleetReport:
    """Connected since half an hour; every model on a device came ten minutes ago."""
    rows = [(each, row) for each in workers for row in each.models]
    here = {r.model_id for _, r in rows if r.state == "resident"}
    moves = [
        Move(at - 600, each.worker_id, row.model_id, "loading", "resident")
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
        "loads": {
            name: DecisionRecord(at - 601, "load", "idle models evicted", name) for name in here
        },
        "waiting": [],
        "dispatcher": queue(),
        **fields,
    }
    return FleetReport(**given)


def queue(waiting: int = 0, running: int = 0, **etas: float) -> DispatcherSnapshot:
    """The fair queue's figures."""
    return DispatcherSnapshot(
        num_waiting=waiting,
        num_running=running,
        waiting_by_model={"beta": waiting},
        running_by_model={"alpha": running},
        load_eta_s=etas,
    )


def eviction(at: float, gone: str, incoming: str, num_kept: int = 1) -> DecisionRecord:
    """`gone` left for `incoming`; others stayed."""
    rows = [SwapCandidate(gone, "evicted", 1e-11, 0.1, 0.2, 1.0, 32 * PAGE, 40)]
    rows += [
        SwapCandidate(f"kept-{n}", "kept: first use", 3e-11, 0.3, 0.2, 1.0, 32 * PAGE, 40)
        for n in range(num_kept)
    ]
    figures = DecisionFigures(waited_s=0.4, score=2e-11, pages_short=24)
    about = (incoming, "worker-0", figures)
    return DecisionRecord(at, "eviction", "load", *about, candidates=tuple(rows))


def swap(at: float, name: str, kind: str, reason: str = "") -> Swapped:
    """One that has ended."""
    tier = "host" if kind == "load" else "none"
    record = SwapRecord(name, kind, tier, 32 * PAGE, 0.2, reason)  # type: ignore[arg-type]
    return Swapped(at, "worker-0", record)


def group(tenant_id: str, name: str, num: int = 3) -> WaitingReport:
    """Requests that wait for a load."""
    text = f"{name} is being loaded on worker-0 (maximum wait reached), 0.2 s left"
    return WaitingReport(tenant_id, name, num, 0.7, "loading", text)
