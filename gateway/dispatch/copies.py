"""How many workers have a model, beyond what somebody waits for (stage 5).

One more copy where the copies are busy and a worker rests (policy/spreading.py), one less where a
model's rate does not need it (policy/relief.py). Loads for those who wait are placement's.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from gateway.dispatch.decisions import DecisionLog, DecisionRecord
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.policy.fleet_view import WorkerView
from gateway.dispatch.policy.model_history import Popularity
from gateway.dispatch.policy.reasons import DecisionFigures
from gateway.dispatch.policy.relief import surplus
from gateway.dispatch.policy.spreading import BusyModel, Spreading
from gateway.dispatch.ticket_queue import TicketQueue

AGAIN_S = 10.0
"""A copy is asked to leave at most so often."""


class Copies:
    """One dispatcher's. Both are looked at every second or so."""

    def __init__(
        self, queue: TicketQueue, fleet: Fleet, popularity: Popularity, decisions: DecisionLog
    ) -> None:
        self._queue = queue
        self._fleet = fleet
        self._popularity = popularity
        self._decisions = decisions
        self._spreading = Spreading()
        self._asked_s: dict[tuple[str, str], float] = {}  # (model, worker) -> when it was to leave

    def spread(self, now_s: float) -> None:
        """Copies of models whose copies are busy, on workers that do nothing."""
        running: Counter[str] = Counter()
        resting: dict[str, WorkerView] = {}
        for worker in self._fleet:
            running.update(worker.running)
            if worker.num_running() or not (worker.takes_loads and worker.is_fresh(now_s)):
                continue
            view = self._fleet.candidates.view_of(worker)
            if view is not None and not view.is_moving and not view.kv_short:
                resting[worker.worker_id] = view
        if not resting:
            return
        busy = [
            BusyModel(demand, running[demand.model_id], self._num_copies(demand.model_id))
            for demand in self._fleet.demand_of(running)
        ]
        for load in self._spreading.decide(now_s, busy, resting):
            about = (load.model_id, load.worker_id, DecisionFigures(load_s=load.load_s))
            why = "its copies are busy and this worker runs nothing"
            self._decisions.add(DecisionRecord(now_s, "load", "replica", *about, detail=why))
            self._fleet.load_ahead(load.worker_id, load.model_id)

    def give_up(self, now_s: float) -> None:
        """Copies that the rate of their model does not need: one of each model, and none that
        somebody waits for. Models that share a pack share its copies. The last copy stays, pinned
        or not."""
        self._asked_s = {key: at for key, at in self._asked_s.items() if now_s - at < AGAIN_S}
        held = self._fleet.held_back_on()
        for names in self._fleet.candidates.replicated():
            name = self._leader(names)
            if name is None or any(self._is_wanted(one, now_s) for one in names):
                continue
            copies = self._fleet.candidates.copies(names)
            leaving = {worker_id for worker_id in copies if (name, worker_id) in self._asked_s}
            idle = [
                replace(copy, free_share=0.0) if {"", copy.worker_id} & held else copy
                for copy in self._fleet.candidates.idle_copies(names)
                if copy.worker_id not in leaving
            ]
            busy_share = sum(self._popularity.service_rate(one, now_s) for one in names)
            decision = surplus(name, len(copies) - len(leaving), busy_share, idle, now_s)
            if decision is not None:
                self._asked_s[name, decision.worker_id] = now_s
                self._fleet.unload_copy(now_s, decision)

    def _is_wanted(self, name: str, now_s: float) -> bool:
        waits = self._queue.num_of_model(name) > 0
        return waits or self._fleet.claimed_on(name, now_s) is not None

    def _leader(self, names: Sequence[str]) -> str | None:
        """By which name a worker lets these models of one pack go: it keeps what another name is
        pinned for (engine/models/catalog.py). None: two are."""
        pinned = [name for name in names if self._fleet.is_pinned(name)]
        if len(pinned) > 1:
            return None
        return pinned[0] if pinned else names[0]

    def _num_copies(self, model_name: str) -> int:
        """Workers that have it, or are about to."""
        having = self._fleet.candidates.having
        return len(having(model_name, "resident")) + len(having(model_name, "loading"))
