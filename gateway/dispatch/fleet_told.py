"""What the dispatcher tells the operator's pages at one moment: workers, arenas, an hour of
residency, who waits, why the last models had to go.

`tell` makes it on the dispatcher's event loop, the operator's socket carries it (as msgpack: JSON
has no infinity, and times that nobody can foresee are just that), and `Fleet` is what a page has of
it, in whatever process it runs. All of it is bounded: rows by what
runs on the workers, history by residency_log.py, waiting groups and evictions by the numbers here.
"""

from typing import Final

import msgspec

from engine.protocol import Layout, ResidencyState, SwapRecord, WorkerStatus
from gateway.dispatch.decisions import DecisionRecord
from gateway.dispatch.dispatcher import Dispatcher
from gateway.services import DispatcherSnapshot

MAX_WAITING_GROUPS = 20
MAX_EVICTIONS = 3
_MAX_LOADS = 500
"""Models on devices of which it is told why they were loaded."""
_ON_DEVICE: Final = ("resident", "loading", "draining")


class Worker(msgspec.Struct, frozen=True):
    """One that is connected. `since`: model -> when it came into the state it is in, where that was
    seen; what lies where may be not known yet."""

    status: WorkerStatus
    layout: Layout | None
    since: dict[str, float]


class Moved(msgspec.Struct, frozen=True, array_like=True):
    """A model came from one state into another on a worker; see residency_log.Move."""

    at: float
    worker: str
    model: str
    before: ResidencyState
    state: ResidencyState


class Swapped(msgspec.Struct, frozen=True, array_like=True):
    """A load or an eviction that ended then."""

    at: float
    worker: str
    swap: SwapRecord


class Candidate(msgspec.Struct, frozen=True):
    """See engine.protocol.SwapCandidate."""

    model: str
    outcome: str
    score: float
    demand: float
    reload_s: float
    size_bytes: int
    num_pages: int


class Evicted(msgspec.Struct, frozen=True):
    """A decision about who had to go; see engine.protocol.SwapChoice. Of candidates, those that
    decisions.py keeps."""

    at: float
    worker: str
    newcomer: str
    reason: str
    waited_s: float
    score: float
    num_pages_short: int
    candidates: list[Candidate]


class WaitingGroup(msgspec.Struct, frozen=True):
    """Requests of one tenant for one model, and why the oldest of them waits."""

    tenant_id: str
    model: str
    num_waiting: int
    waited_s: float
    code: str
    text: str


class Loaded(msgspec.Struct, frozen=True, array_like=True):
    """Why a model was loaded last."""

    at: float
    reason: str


class Fleet(msgspec.Struct, frozen=True):
    """All of it. Instants are epoch seconds; `since_at`: from when on moves are known.

    `lost`: workers that are gone -> since when. `loads`: by model, of those on a device.
    """

    at: float
    since_at: float
    workers: list[Worker]
    lost: dict[str, float]
    moves: list[Moved]
    swaps: list[Swapped]
    evictions: list[Evicted]
    loads: dict[str, Loaded]
    waiting: list[WaitingGroup]
    dispatcher: DispatcherSnapshot


_packer = msgspec.msgpack.Encoder()
_unpacker: msgspec.msgpack.Decoder[Fleet] = msgspec.msgpack.Decoder(Fleet)


def encode(fleet: Fleet) -> bytes:
    """For the socket."""
    return _packer.encode(fleet)


def decode(packed: bytes) -> Fleet:
    """What `encode` made. Raises msgspec.DecodeError."""
    return _unpacker.decode(packed)


def tell(dispatcher: Dispatcher, now_s: float, offset_s: float) -> Fleet:
    """As of now. `offset_s`: from the dispatcher's clock to the wall's."""
    history = dispatcher.history
    statuses = dispatcher.worker_statuses()
    snapshot = dispatcher.snapshot()
    waiting = []
    if snapshot.num_waiting:
        groups = dispatcher.look().groups(None, None, most=MAX_WAITING_GROUPS)
        waiting = [
            WaitingGroup(
                group.head.tenant_id,
                group.head.model,
                group.num_waiting,
                group.head.waited_s,
                group.head.code,
                group.head.text,
            )
            for group in groups
        ]
    on_device = {r.model_id for s in statuses for r in s.models if r.state in _ON_DEVICE}
    loads = {}
    for name in sorted(on_device)[:_MAX_LOADS]:
        for record in dispatcher.decisions.last("load", name):
            loads[name] = Loaded(record.at_s + offset_s, record.reason)
    return Fleet(
        at=now_s + offset_s,
        since_at=history.since_s(now_s) + offset_s,
        workers=[
            Worker(
                msgspec.structs.replace(status, swaps=[], choices=[], service=[], taken=[]),
                history.layout(status.worker_id),
                {name: s + offset_s for name, s in history.since(status.worker_id).items()},
            )
            for status in statuses
        ],
        lost={worker: at_s + offset_s for worker, at_s in history.lost.items()},
        moves=[
            Moved(m.at_s + offset_s, m.worker, m.model, m.before, m.state)
            for m in history.moves(now_s)
        ],
        swaps=[Swapped(s.at_s + offset_s, s.worker, s.swap) for s in history.swaps()],
        evictions=[
            _evicted(record, offset_s)
            for record in dispatcher.decisions.last("eviction", limit=MAX_EVICTIONS)
        ],
        loads=loads,
        waiting=waiting,
        dispatcher=snapshot,
    )


def _evicted(record: DecisionRecord, offset_s: float) -> Evicted:
    figures = record.figures or {}
    return Evicted(
        record.at_s + offset_s,
        record.worker,
        record.model,
        record.reason,
        figures.get("waited_s", 0.0),
        figures.get("score", 0.0),
        figures.get("pages_short", 0),
        [
            Candidate(
                c.model_id,
                c.outcome,
                c.score,
                c.demand,
                c.reload_s,
                c.size_bytes,
                c.num_pages,
            )
            for c in record.candidates
        ],
    )
