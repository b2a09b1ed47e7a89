"""What happened to models on workers in the last hour, and how each arena lies: for pictures.

    note    a worker's status: its layout where it tells one, and which models changed their state
    lose    the worker is gone: nothing is anywhere on it any more

A model that a worker does not name is `cold` there. What a worker has when it is first heard of is
no change: how long it was so is not known, and the move says the same state twice.

Bounded: MAX_MOVES changes and MAX_SWAPS swaps, of an hour at most; `since_s` says from when on all
of them are kept. Decides nothing, and nothing reads it to decide. Times are the dispatcher's
clock.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engine.protocol import Layout, ResidencyState, SwapRecord, WorkerStatus

SPAN_S = 3600.0
MAX_MOVES = 2000
MAX_SWAPS = 64


@dataclass(frozen=True, slots=True)
class Move:
    """A model came from one state into another on a worker; or was found there, where both are
    one."""

    at_s: float
    worker: str
    model: str
    before: ResidencyState
    state: ResidencyState


@dataclass(frozen=True, slots=True)
class Swapped:
    """A load or an eviction that has ended."""

    at_s: float
    worker: str
    swap: SwapRecord


@dataclass(slots=True)
class _Here:
    """One worker: models that are not cold, and since when each is in its state, where that was
    seen."""

    states: dict[str, ResidencyState]
    since: dict[str, float]
    layout: Layout | None = None


class ResidencyLog:
    """Of all workers of one dispatcher, since it began."""

    def __init__(self) -> None:
        self._workers: dict[str, _Here] = {}
        self._lost: dict[str, float] = {}
        self._moves: deque[Move] = deque()
        self._swaps: deque[Swapped] = deque(maxlen=MAX_SWAPS)
        self._since_s: float | None = None

    def note(self, status: WorkerStatus, has_moved: bool, now_s: float) -> None:
        """Take in a heartbeat. `has_moved`: some state may differ, or swaps have ended."""
        here = self._workers.get(status.worker_id)
        is_found = here is None
        if here is None:
            here = self._workers[status.worker_id] = _Here({}, {})
            self._lost.pop(status.worker_id, None)
            if self._since_s is None:
                self._since_s = now_s
        if status.layout is not None:
            here.layout = status.layout
        if not has_moved:
            return
        self._swaps += [Swapped(now_s, status.worker_id, swap) for swap in status.swaps]
        now: dict[str, ResidencyState] = {row.model_id: row.state for row in status.models}
        # A host tier may hold thousands: only what differs is looked at.
        moved = {model for model, _ in now.items() ^ here.states.items()}
        for model in sorted(moved):
            state = now.get(model, "cold")
            before = state if is_found else here.states.get(model, "cold")
            self._move(Move(now_s, status.worker_id, model, before, state), here)

    def lose(self, worker_id: str, now_s: float) -> None:
        """Its process, or the way to it, is gone."""
        here = self._workers.pop(worker_id, None)
        if here is None:
            return
        self._lost[worker_id] = now_s
        for model, before in list(here.states.items()):
            self._move(Move(now_s, worker_id, model, before, "cold"), here)

    @property
    def lost(self) -> Mapping[str, float]:
        """Workers that were here and are not -> since when."""
        return self._lost

    def since_s(self, now_s: float) -> float:
        """From when on every change is kept."""
        began_s = now_s if self._since_s is None else self._since_s
        return max(began_s, now_s - SPAN_S)

    def layout(self, worker_id: str) -> Layout | None:
        """As it told last."""
        here = self._workers.get(worker_id)
        return None if here is None else here.layout

    def since(self, worker_id: str) -> dict[str, float]:
        """Since when each model is in the state it is in. Not named: what is cold, and what was so
        already when the worker was first heard of."""
        here = self._workers.get(worker_id)
        return {} if here is None else dict(here.since)

    def moves(self, now_s: float) -> list[Move]:
        """Of the last hour, the oldest first."""
        self._forget(now_s)
        return list(self._moves)

    def swaps(self) -> Iterator[Swapped]:
        """The last ones, the newest first."""
        return reversed(self._swaps)

    def _move(self, move: Move, here: _Here) -> None:
        if move.state == "cold":
            here.states.pop(move.model, None)
            here.since.pop(move.model, None)
        else:
            here.states[move.model] = move.state
            if move.before != move.state:
                here.since[move.model] = move.at_s
        self._moves.append(move)
        if len(self._moves) > MAX_MOVES:
            self._since_s = self._moves.popleft().at_s
        self._forget(move.at_s)

    def _forget(self, now_s: float) -> None:
        while self._moves and self._moves[0].at_s < now_s - SPAN_S:
            self._moves.popleft()
