"""`simulate`: a world and its workload in, a `Run` out. The same every time.

A run ends when the workload is through and every request has ended, or at `until_s`. With
`check_every` n, the invariants of dispatcher and engines are checked after every n-th tick of a
worker (1: after each).
"""

import gc
import time
from array import array
from collections.abc import Callable, Iterator

from bench.sim.client import SimClient
from bench.sim.gateway import Postings, SimGateway
from bench.sim.loop import Loop
from bench.sim.prompts import token_ids
from bench.sim.sampling import Sampler
from bench.sim.types import REFUSED_COUNTER, Arrival, Run, Swap, Workload, World
from bench.sim.worker import SimWorker, WorkerFaults
from bench.sim.world import make_workers, set_up, start_times
from engine.protocol import SwapRecord

GC_THRESHOLD = 100_000


class Simulation:
    """One world on its way. `fuzz.py` reaches into it; everybody else calls `simulate`."""

    def __init__(
        self,
        world: World,
        workload: Workload,
        sample_s: float = 1.0,
        faults: Callable[[int], WorkerFaults | None] = lambda number: None,
        future: Workload | None = None,
    ) -> None:
        self.run = Run(world, sample_s=sample_s)
        self.loop = Loop()
        self.postings = Postings()
        self.stage = set_up(world, self._answer, future)
        self.workers = make_workers(world, self.stage, self.loop, faults)
        self.gateway: SimGateway | None = None
        self.latency_s: Callable[[], float] = lambda: self.stage.latency_s
        """One way of one message."""
        self.on_through: Callable[[], None] = self.loop.stop
        """Called when nothing more comes and nothing is under way."""
        self.on_end: Callable[[SimClient], None] = lambda client: None
        """Called with every request that has ended."""
        self.num_arrived = 0
        self._arrivals: Iterator[Arrival] = iter(workload)
        self._output_tokens: array[int] = array("i")
        self._number_of_model = {model.name: n for n, model in enumerate(self.stage.models)}
        self._number_of_worker = {worker.worker_id: worker.number for worker in self.workers}
        self._more = True
        self._sampler = Sampler(self)

    def start(self) -> None:
        """Processes and the first arrival."""
        for worker, start_s in zip(self.workers, start_times(self.run.world), strict=True):
            self.loop.at(start_s, worker.start)
        self.start_gateway()
        self._sampler.start()
        self._next_arrival()

    def start_gateway(self) -> None:
        """A new gateway process; the one before has died or there was none."""
        stage = self.stage
        self.gateway = SimGateway(
            self.loop,
            stage.settings,
            self.workers,
            stage.models,
            stage.principals,
            self.postings,
            lambda: self.latency_s(),
            stage.posting_s,
            self._ended,
            self._swapped,
            stage.policies,
        )

    def finish(self) -> Run:
        """What came of it."""
        self.run.simulated_s = self.loop.now_s
        self._sampler.finish()
        return self.run

    @property
    def is_through(self) -> bool:
        """Nothing more comes, and nothing is under way."""
        return not self._more and (self.gateway is None or not self.gateway.clients)

    def _answer(self, request_id: str) -> int:
        return self._output_tokens[int(request_id)]

    def _next_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is None:
            self._more = False
            self._tell_if_through()
            return
        queued_s = arrival.at_s + self.stage.request_s
        self.loop.at(max(queued_s, self.loop.now_s), lambda: self._arrive(arrival))

    def _arrive(self, arrival: Arrival) -> None:
        self.send(arrival)
        self._next_arrival()

    def send(self, arrival: Arrival) -> None:
        """A client sends a request now, whatever the workload says."""
        number = self.num_arrived
        self.num_arrived += 1
        self._output_tokens.append(arrival.output_tokens)
        if self.gateway is not None:
            self.gateway.submit(number, arrival, token_ids(arrival.prompt))
        else:
            client = SimClient(str(number), number, arrival, self._ended, self.loop.clock)
            client.cut()

    def _ended(self, client: SimClient) -> None:
        client.write(self.run.records)
        if client.refused_for:
            counter = REFUSED_COUNTER + client.refused_for
            self.run.counters[counter] = self.run.counters.get(counter, 0.0) + 1.0
        self.on_end(client)
        self._tell_if_through()

    def _tell_if_through(self) -> None:
        """Once the dispatcher, too, has heard of the last one."""
        if self.is_through:
            self.loop.after(0.0, self.on_through)

    def _swapped(self, worker_id: str, record: SwapRecord) -> None:
        self.run.swaps.append(
            Swap(
                at_s=self.loop.now_s,
                worker=self._number_of_worker[worker_id],
                model=self._number_of_model[record.model_id],
                kind=record.kind,
                tier=record.tier,
                duration_s=record.duration_s,
                size_bytes=record.size_bytes,
            )
        )


def simulate(
    world: World,
    workload: Workload,
    until_s: float | None = None,
    check_every: int = 0,
    sample_s: float = 1.0,
    future: Workload | None = None,
) -> Run:
    """Run it. `Run.wall_s` is the only figure that differs from one time to the next.

    `future` is the same workload once more, for a policy that has to be told it (belady).
    """
    began_s = time.perf_counter()
    # Most of what a run makes lives as long as a request; looking for cycles often finds nothing.
    thresholds = gc.get_threshold()
    gc.set_threshold(GC_THRESHOLD, 20, 100)
    try:
        simulation = Simulation(world, workload, sample_s, future=future)
        if check_every:
            _check(simulation, check_every)
        simulation.start()
        simulation.loop.run(until_s)
        run = simulation.finish()
    finally:
        gc.set_threshold(*thresholds)
    run.wall_s = time.perf_counter() - began_s
    return run


def _check(simulation: Simulation, every: int) -> None:
    num_ticks = 0

    def look(worker: SimWorker) -> None:
        nonlocal num_ticks
        num_ticks += 1
        if num_ticks % every == 0 and worker.process is not None:
            worker.process.worker.check_integrity()
            if simulation.gateway is not None:
                simulation.gateway.requests.check_integrity()

    for worker in simulation.workers:
        worker.on_tick = look
