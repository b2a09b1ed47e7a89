"""How many workers have a model, beyond what somebody waits for (stage 5).

One more copy where the copies are busy and a worker rests (policy/spreading.py), one less where a
model's rate does not need it (policy/relief.py). Loads for those who wait are placement's.
"""

from collections import Counter

from gateway.dispatch.decisions import DecisionLog, DecisionRecord
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.policy.fleet_view import WorkerView
from gateway.dispatch.policy.model_history import Popularity
from gateway.dispatch.policy.reasons import DecisionFigures
from gateway.dispatch.policy.relief import surplus
from gateway.dispatch.policy.spreading import BusyModel, Spreading
from gateway.dispatch.ticket_queue import TicketQueue


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
            self._decisions.add(DecisionRecord(now_s, "load", "replica", *about))
            self._fleet.load_ahead(load.worker_id, load.model_id)

    def give_up(self, now_s: float) -> None:
        """Copies that the rate of their model does not need: one of each model, and none that
        somebody waits for."""
        for name in self._fleet.candidates.replicated():
            if self._queue.num_of_model(name) or self._fleet.is_pinned(name):
                continue
            if self._fleet.claimed_on(name, now_s) is not None:
                continue
            num_copies = len(self._fleet.candidates.having(name, "resident"))
            idle = self._fleet.candidates.idle_copies(name)
            busy_share = self._popularity.service_rate(name, now_s)
            decision = surplus(name, num_copies, busy_share, idle, now_s)
            if decision is not None:
                self._fleet.unload_copy(now_s, decision)

    def _num_copies(self, model_name: str) -> int:
        """Workers that have it, or are about to."""
        having = self._fleet.candidates.having
        return len(having(model_name, "resident")) + len(having(model_name, "loading"))
