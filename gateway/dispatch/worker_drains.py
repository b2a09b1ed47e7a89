"""What operators want of workers, carried out: drains, and restarts one after another (stage 5).

                     wanted          handed over   nothing runs   taken back, or begun anew
    serving          handing_over
    handing_over                     draining                     serving
    draining                                       drained        serving
    drained                                                       serving

    handing_over   serves on; models in demand that no other worker has are loaded elsewhere first,
                   for HANDOVER_S at most. No load comes here any more
    draining       gets no requests. What runs has `worker_drain_timeout_s`; then it goes on at
                   another worker from the tokens that its client has, if one is there, or if this
                   one is to begin anew
    drained        runs nothing. One that is to be restarted is ended now, and started again by its
                   home; it serves once a process that began after the order says so

Orders come from the registry (registry/models/worker_orders.py) and hold until they are taken back,
so a dispatcher that takes over goes on where the last one was. Any number may be drained; restarts
are one at a time, the next when the last one serves again, so of n workers n-1 serve.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gateway.dispatch.capacity import WorkerCapacity
from gateway.dispatch.fleet import Fleet
from registry.models.worker_orders import NO_ORDER, WorkerOrder

logger = logging.getLogger(__name__)

WorkerState: TypeAlias = Literal["serving", "handing_over", "draining", "drained"]
HANDOVER_S = 30.0
RESTART_AGAIN_S = 60.0
"""A worker that was to be ended and has not come back is ended once more."""


@dataclass(slots=True)
class _Drain:
    """Of one worker that is not serving as usual."""

    state: WorkerState
    since_s: float
    restarted_s: float = -math.inf


class WorkerDrains:
    """One dispatcher's. Used on the event loop only."""

    def __init__(
        self,
        fleet: Fleet,
        num_on: Callable[[str], int],
        move_off: Callable[[str], object],
        waiting: Callable[[], Mapping[str, int]],
        timeout_s: float,
    ) -> None:
        """`num_on(worker)`: requests that it has; `move_off(worker)`: have them go on elsewhere;
        `waiting()`: requests by model."""
        self._fleet = fleet
        self._num_on = num_on
        self._move_off = move_off
        self._waiting = waiting
        self._timeout_s = timeout_s
        self._orders: Mapping[str, WorkerOrder] = {}
        self._drains: dict[str, _Drain] = {}
        self.on_restart: Callable[[str], None] = lambda worker_id: None
        """Asked to end a worker's process, which is started again."""

    def set_orders(self, orders: Mapping[str, WorkerOrder]) -> None:
        """As the registry has them now."""
        self._orders = orders

    def state(self, worker_id: str) -> WorkerState:
        """Of a worker, connected or not."""
        drain = self._drains.get(worker_id)
        return "serving" if drain is None else drain.state

    def tick(self, now_s: float) -> None:
        """Whatever became possible by time."""
        for worker in list(self._fleet):
            self.look(worker, now_s)

    def look(self, worker: WorkerCapacity, now_s: float) -> None:
        """Whatever became possible by a worker's status; also keeps a new process of one that
        leaves from being given anything."""
        if worker.status is None:
            return
        worker_id = worker.worker_id
        if self._is_wanted(worker):
            if worker_id not in self._drains:
                logger.info("worker leaves worker=%s", worker_id)
                self._drains[worker_id] = _Drain("handing_over", now_s)
            self._go_on(worker, self._drains[worker_id], now_s)
        elif self._drains.pop(worker_id, None) is not None:
            logger.info("worker serves again worker=%s", worker_id)
        state = self.state(worker_id)
        serves = state in ("serving", "handing_over")
        self._fleet.let(worker, load=state == "serving", serve=serves)

    def _is_wanted(self, worker: WorkerCapacity) -> bool:
        order = self._orders.get(worker.worker_id, NO_ORDER)
        return order.drained or (self._restarts(worker) and self._my_turn(worker.worker_id))

    def _restarts(self, worker: WorkerCapacity) -> bool:
        order = self._orders.get(worker.worker_id, NO_ORDER)
        return worker.status is not None and worker.status.started_at < order.restart_at

    def _my_turn(self, worker_id: str) -> bool:
        """Nobody else is on its way out for a restart, or away."""
        return not any(
            name != worker_id and not self._orders.get(name, NO_ORDER).drained
            for name in self._drains
        )

    def _go_on(self, worker: WorkerCapacity, drain: _Drain, now_s: float) -> None:
        if drain.state == "handing_over":
            self._fleet.let(worker, load=False, serve=True)
            if self._hand_over(worker, now_s) and now_s - drain.since_s < HANDOVER_S:
                return
            drain.state, drain.since_s = "draining", now_s
        if drain.state == "draining" and not self._num_on(worker.worker_id):
            logger.info("worker drained worker=%s", worker.worker_id)
            drain.state, drain.since_s = "drained", now_s
        if drain.state == "draining":
            self._fleet.let(worker, load=False, serve=False)
            late = now_s - drain.since_s >= self._timeout_s
            if late and (self._restarts(worker) or self._num_staying()):
                self._move_off(worker.worker_id)
        elif self._restarts(worker) and now_s - drain.restarted_s >= RESTART_AGAIN_S:
            drain.restarted_s = now_s
            self.on_restart(worker.worker_id)

    def _num_staying(self) -> int:
        return sum(worker.takes_loads for worker in self._fleet)

    def _hand_over(self, worker: WorkerCapacity, now_s: float) -> bool:
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
            if not (name in worker.running or waiting.get(name) or self._fleet.is_pinned(name)):
                continue
            if not self._fleet.is_elsewhere(name):
                self._fleet.load(now_s, name)
                # Where no other worker can have it, nobody waits for that.
                left |= self._fleet.claimed_on(name, now_s) not in (None, worker.worker_id)
        return left
