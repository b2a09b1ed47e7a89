"""The arena of each device as a picture's figures: whose pages are what, since when, and why.

From what the dispatcher tells (gateway/dispatch/fleet_told.py) to rows; drawing them is
arena_picture.py's. Models of one pack are one row, under the first name, as workers tell it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.protocol import Layout, ModelStatus
from gateway.dispatch.fleet_told import Fleet, Moved, Worker

ON_DEVICE = ("resident", "loading", "draining")
SPAN_S = 3600.0
STEP_S = 10.0
"""The last hour moves on in such steps, so that a picture in which nothing happens stays."""
MAX_BANDS = 16
MAX_ROWS = 200
KINDS = ("weights", "kv_live", "kv_kept")


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model on a device. Pages by kind; `kv_tokens`: what its live KV would hold at most, None
    where nobody knows; `why`: what it was loaded for, "" where the dispatcher has not seen it."""

    name: str
    state: str
    reason: str
    weights: int
    kv_live: int
    kv_kept: int
    kv_tokens: int | None
    num_running: int
    since_at: float | None
    why: str

    @property
    def pages(self) -> int:
        """Of all kinds."""
        return self.weights + self.kv_live + self.kv_kept


@dataclass(frozen=True, slots=True)
class Arena:
    """One device. `rows`: the largest weights first, MAX_ROWS at most, `num_rows` of all; models
    that share a pack with a row have none of their own. `totals`: pages by kind, of all rows."""

    worker: str
    page_bytes: int
    num_pages: int
    free: int
    rows: list[ModelRow]
    num_rows: int
    layout: Layout | None
    totals: Mapping[str, int]

    def size(self, pages: int) -> int:
        """In bytes."""
        return pages * self.page_bytes

    def total(self, kind: str) -> int:
        """Pages of one kind, over all models."""
        return self.totals[kind]

    @property
    def taken(self) -> int:
        """Pages of all models."""
        return sum(self.totals.values())


@dataclass(frozen=True, slots=True)
class Stretch:
    """A model was in one state for a while, in seconds from the band's beginning."""

    from_s: float
    to_s: float
    state: str


@dataclass(frozen=True, slots=True)
class Band:
    """One model's last hour on a worker. `loads`, `evictions`: when, from the beginning; `known_s`:
    before that nothing is known."""

    worker: str
    model: str
    state: str
    stretches: list[Stretch]
    loads: list[float]
    evictions: list[float]
    known_s: float


def arenas(fleet: Fleet) -> list[Arena]:
    """Of the connected workers."""
    return [_arena(worker, fleet) for worker in fleet.workers]


def bands(fleet: Fleet) -> tuple[list[Band], int]:
    """The last hour, by model and worker: what is or was on a device. Of more than MAX_BANDS those
    that moved most; and how many there are."""
    to_at = -(-fleet.at // STEP_S) * STEP_S
    from_at = to_at - SPAN_S
    moves: dict[tuple[str, str], list[Moved]] = {}
    for move in fleet.moves:
        moves.setdefault((move.worker, move.model), []).append(move)
    now = {
        (worker.status.worker_id, row.model_id): row.state
        for worker in fleet.workers
        for row in worker.status.models
    }
    keys = [key for key, state in now.items() if state in ON_DEVICE]
    keys += [key for key in moves if key not in now or now[key] not in ON_DEVICE]
    keys = [key for key in keys if now.get(key) in ON_DEVICE or _was_there(moves[key])]
    keys.sort(key=lambda key: (-len(moves.get(key, ())), key[1], key[0]))
    shown = sorted(keys[:MAX_BANDS], key=lambda key: (now.get(key) not in ON_DEVICE, key[1], key))
    made = [
        _band(key, moves.get(key, []), now.get(key, "cold"), from_at, to_at, fleet.since_at)
        for key in shown
    ]
    return made, len(keys)


def _was_there(moves: list[Moved]) -> bool:
    return any(m.state in ON_DEVICE or m.before in ON_DEVICE for m in moves)


def _band(
    key: tuple[str, str],
    moves: list[Moved],
    state: str,
    from_at: float,
    to_at: float,
    since_at: float,
) -> Band:
    known_s = max(0.0, since_at - from_at)
    stretches, loads, evictions = [], [], []
    at_s, before = known_s, moves[0].before if moves else state
    if moves and moves[0].before == moves[0].state:
        before = "cold"  # found there by a dispatcher that had not heard of its worker
    for move in moves:
        then_s = min(SPAN_S, max(known_s, move.at - from_at))
        if then_s > at_s:
            stretches.append(Stretch(at_s, then_s, before))
        if move.at >= from_at:
            if move.state == "resident" and move.before in ("loading", "warm", "cold"):
                loads.append(then_s)
            elif move.before in ("resident", "draining") and move.state in ("warm", "cold"):
                evictions.append(then_s)
        at_s, before = then_s, move.state
    stretches.append(Stretch(at_s, to_at - from_at, state))
    worker, model = key
    return Band(worker, model, state, stretches, loads, evictions, known_s)


def _arena(worker: Worker, fleet: Fleet) -> Arena:
    status = worker.status
    by_kind: dict[str, dict[str, int]] = {}
    for owner, pages in status.pages.items():
        name, _, kind = owner.rpartition("/")
        if name:
            by_kind.setdefault(name, {})[kind] = pages
    models = {row.model_id: row for row in status.models}
    tokens = {lease.model_id: lease.kv_bytes_per_token for lease in status.leases}
    rows = []
    for name, kinds in by_kind.items():
        per_token = tokens.get(name, 0)
        live_bytes = kinds.get("kv", 0) * status.page_bytes
        rows.append(
            _row(
                name,
                models.get(name),
                kinds,
                live_bytes // per_token if per_token else None,
                worker.since,
                fleet,
            )
        )
    rows.sort(key=lambda row: (-row.weights, -row.pages, row.name))
    return Arena(
        status.worker_id,
        status.page_bytes,
        status.num_pages,
        status.pages.get("free", 0),
        rows[:MAX_ROWS],
        len(rows),
        worker.layout,
        {kind: sum(int(getattr(row, kind)) for row in rows) for kind in KINDS},
    )


def _row(
    name: str,
    model: ModelStatus | None,
    kinds: Mapping[str, int],
    kv_tokens: int | None,
    since: Mapping[str, float],
    fleet: Fleet,
) -> ModelRow:
    loaded = fleet.loads.get(name)
    return ModelRow(
        name=name,
        state=model.state if model else "draining",
        reason=model.reason if model else "",
        weights=kinds.get("weights", 0),
        kv_live=max(0, kinds.get("kv", 0)),
        kv_kept=kinds.get("kv_cached", 0),
        kv_tokens=kv_tokens,
        num_running=model.num_running if model else 0,
        since_at=since.get(name),
        why=loaded.reason if loaded else "",
    )
