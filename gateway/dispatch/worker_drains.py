"""What operators want of workers, carried out: drains, and restarts one after another (stage 5).

                     wanted          handed over   nothing runs   taken back, or begun anew
    serving          handing_over
    handing_over                     draining                     serving
    draining                                       drained        serving
    drained                                                       serving

    handing_over   serves on; models in demand that no other worker has are loaded elsewhere first,
                   for HANDOVER_S at most. No load comes here any more
    draining       gets no requests. What runs has `worker_drain_timeout_s`; then it goes on at
                   another worker that has its model, from the tokens that its client has. Where
                   this worker is to begin anew, all of it leaves
    drained        runs nothing, by the books here and by its own word. One that is to be restarted
                   is ended now, and started again by its home; it serves once another process of
                   it says so

Orders come from the registry (registry/models/worker_orders.py) and hold until they are taken back;
a dispatcher that takes over begins with handing over. Any number may be drained. Restarts are one
at a time: the next when all others that are to serve do, so of n workers n-1 serve. A worker that
is away for AWAY_S is not waited for: it may never come.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from engine.protocol import Restart
from gateway.dispatch.capacity import WorkerCapacity
from gateway.dispatch.fleet import Fleet
from registry.models.worker_orders import NO_ORDER, WorkerOrder

logger = logging.getLogger(__name__)

WorkerState: TypeAlias = Literal["serving", "handing_over", "draining", "drained"]
HANDOVER_S = 30.0
RESTART_AGAIN_S = 60.0
"""A process that was to be ended and is still there is ended once more."""
AWAY_S = 120.0
LONGEST_S = 60.0
"""Beyond its time-out: what a worker says it runs, and nobody here knows of, is not waited for."""


@dataclass(slots=True)
class _Drain:
    """Of one worker that is not serving as usual."""

    state: WorkerState
    since_s: float
    restarted_s: float = -math.inf
    loaded: set[str] = field(default_factory=set)
    """Models that were to be loaded elsewhere: once each."""


class WorkerDrains:
    """One dispatcher's. Used on the event loop only."""

    def __init__(
        self,
        fleet: Fleet,
        num_on: Callable[[str], int],
        move_off: Callable[[str, Callable[[str], bool]], object],
        waiting: Callable[[], Mapping[str, int]],
        timeout_s: float,
    ) -> None:
        """`num_on(worker)`: requests that it has; `move_off(worker, which models)`: have them go on
        elsewhere; `waiting()`: requests by model."""
        self._fleet = fleet
        self._num_on = num_on
        self._move_off = move_off
        self._waiting = waiting
        self._timeout_s = timeout_s
        self._orders: Mapping[str, WorkerOrder] = {}
        self._drains: dict[str, _Drain] = {}
        self._away_since_s: dict[str, float] = {}
        self.on_restart: Callable[[str], None] = lambda worker_id: None
        """Asked to end a worker's process, which is started again, where that is on this
        machine."""

    def set_orders(self, orders: Mapping[str, WorkerOrder]) -> None:
        """As the registry has them now."""
        self._orders = orders

    def state(self, worker_id: str) -> WorkerState:
        """Of a worker, connected or not."""
        drain = self._drains.get(worker_id)
        return "serving" if drain is None else drain.state

    def tick(self, now_s: float) -> None:
        """Whatever became possible by time."""
        self._away_since_s = {
            name: self._away_since_s.get(name, now_s) for name in self._fleet.away()
        }
        if self._orders or self._drains:
            for worker in list(self._fleet):
                self.look(worker, now_s)

    def look(self, worker: WorkerCapacity, now_s: float) -> None:
        """Whatever became possible by a worker's status; also keeps a new process of one that
        leaves from being given anything."""
        worker_id = worker.worker_id
        if worker.status is None or not (worker_id in self._orders or worker_id in self._drains):
            return  # it serves, as ever
        if self._is_wanted(worker, now_s):
            if worker_id not in self._drains:
                logger.info("worker leaves worker=%s", worker_id)
                self._drains[worker_id] = _Drain("handing_over", now_s)
            self._go_on(worker, self._drains[worker_id], now_s)
        elif self._drains.pop(worker_id, None) is not None:
            logger.info("worker serves again worker=%s", worker_id)
        state = self.state(worker_id)
        serves = state in ("serving", "handing_over")
        self._fleet.let(worker, load=state == "serving", serve=serves)

    def _is_wanted(self, worker: WorkerCapacity, now_s: float) -> bool:
        order = self._orders.get(worker.worker_id, NO_ORDER)
        return order.drained or (self._restarts(worker) and self._my_turn(worker.worker_id, now_s))

    def _restarts(self, worker: WorkerCapacity) -> bool:
        order = self._orders.get(worker.worker_id, NO_ORDER)
        return worker.status is not None and worker.status.started_at == order.restart_of > 0

    def _my_turn(self, worker_id: str, now_s: float) -> bool:
        """Nobody else that is to serve is on its way out, or away."""
        for name in self._fleet.worker_ids:
            if name == worker_id or self._orders.get(name, NO_ORDER).drained:
                continue
            away_s = now_s - self._away_since_s.get(name, now_s)
            if away_s < AWAY_S and (name in self._drains or not self._fleet.is_here(name)):
                return False
        return True

    def _go_on(self, worker: WorkerCapacity, drain: _Drain, now_s: float) -> None:
        if drain.state == "handing_over":
            self._fleet.let(worker, load=False, serve=True)
            if self._hand_over(worker, drain, now_s) and now_s - drain.since_s < HANDOVER_S:
                return
            drain.state, drain.since_s = "draining", now_s
        if drain.state == "draining":
            self._fleet.let(worker, load=False, serve=False)
            self._empty(worker, drain, now_s)
        is_due = drain.state == "drained" and now_s - drain.restarted_s >= RESTART_AGAIN_S
        if is_due and self._restarts(worker):
            drain.restarted_s = now_s
            self.on_restart(worker.worker_id)
            # Where its home is on another machine, nobody but the worker itself can be asked.
            self._fleet.send(worker.worker_id, Restart())

    def _empty(self, worker: WorkerCapacity, drain: _Drain, now_s: float) -> None:
        late_s = now_s - drain.since_s - self._timeout_s
        if late_s >= 0 and self._restarts(worker):
            self._move_off(worker.worker_id, lambda model: True)
        elif late_s >= 0:
            self._move_off(worker.worker_id, self._fleet.is_elsewhere)
        rests = not worker.has_work or (late_s >= LONGEST_S and self._restarts(worker))
        if rests and not self._num_on(worker.worker_id):
            logger.info("worker drained worker=%s", worker.worker_id)
            drain.state, drain.since_s = "drained", now_s

    def _num_staying(self) -> int:
        return sum(worker.takes_loads for worker in self._fleet)

    def _hand_over(self, worker: WorkerCapacity, drain: _Drain, now_s: float) -> bool:
        """Load elsewhere what is in demand and nowhere else. Whether there is still something."""
        assert worker.status is not None
        if not self._num_staying():
            return False
        waiting = self._waiting()
        left = False
        for model in worker.status.models:
            name = model.model_id
            if model.state not in ("resident", "loading"):
                continue
            runs = name in worker.running or model.num_running or model.num_waiting
            if not (runs or waiting.get(name) or self._fleet.is_pinned(name)):
                continue
            if not self._fleet.is_elsewhere(name):
                if name not in drain.loaded:
                    drain.loaded.add(name)
                    self._fleet.load(now_s, name)
                # Where no other worker can have it, nobody waits for that.
                left |= self._fleet.claimed_on(name, now_s) not in (None, worker.worker_id)
        return left
