"""A worker in simulated time: the product's `Worker` and `Engine` on a modelled device.

One event is one `Worker.tick`, at the worker's own time. Waiting for a step moves that time on, so
what the tick sends leaves when the step has ended; what arrives meanwhile is read by the next tick,
as in reality. A tick that rests ends until its time is up or a message comes.

What is modelled otherwise: while a load is under way the product looks every 2 ms whether it has
ended; here the worker is woken when it ends, and every POLL_S for what else depends on time. An
acknowledgement of usage does not wake it: it is read with whatever comes next.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.sim.cable import Cable
from bench.sim.device import DeviceClock, Roofline, SimBackend
from bench.sim.fast_forward import FastForward
from bench.sim.loop import Event, Loop
from bench.sim.packs import SimPacks
from bench.sim.parts import (
    Answers,
    HostMemory,
    LoadFault,
    LoadFigures,
    SimRunner,
    SimWeightStore,
    lay_out,
)
from bench.sim.stretch import FIRST_STEPS, Stretch, plan
from engine.backend.base import Backend
from engine.config import EngineConfig, WorkerConfig
from engine.dependencies import EngineDependencies
from engine.engine import Engine
from engine.memory.kv_plan import KvPlan
from engine.memory.page_pool import PagePool
from engine.pack import PackIndex
from engine.protocol import AckUsage, FromWorker, ToWorker
from engine.residency.policy.eviction import EvictionPolicy
from engine.worker.worker_loop import BUSY_POLL_S, Worker

POLL_S = 0.02
SPIN_S = 5e-5
"""What a tick takes that ran no step."""


@dataclass(frozen=True, slots=True)
class Site:
    """What all workers of a world share."""

    packs: SimPacks
    roofline: Roofline
    loads: LoadFigures
    answers: Answers
    eviction: EvictionPolicy | None = None


@dataclass(frozen=True, slots=True)
class WorkerFaults:
    """What may go wrong inside one worker; by default nothing does."""

    load: LoadFault = lambda revision: (1.0, None)
    late_by: Callable[[], int] = lambda: 0


class SimLink:
    """Implements engine.worker_link.Link for one process."""

    num_malformed = 0

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._inbox: deque[tuple[bytes, ToWorker]] = deque()
        self.cables: dict[bytes, Cable] = {}
        self.rest_s: float | None = None
        """For how long the last tick would have waited; None: it did not."""

    def begin_tick(self) -> None:
        """Nothing has been waited for yet."""
        self.rest_s = None

    @property
    def needs_reading(self) -> bool:
        """Something has arrived and was not read that should not wait."""
        return any(type(message) is not AckUsage for _, message in self._inbox)

    def put(self, identity: bytes, message: ToWorker) -> None:
        """A message has arrived."""
        self._inbox.append((identity, message))

    def wait(self, timeout_s: float) -> bool:
        """Returns at once: the event loop does the waiting."""
        self.rest_s = timeout_s
        return bool(self._inbox)

    def receive(self, max_messages: int) -> Iterator[tuple[bytes, ToWorker]]:
        """What had arrived when the tick began: nothing arrives during an event."""
        for _ in range(min(max_messages, len(self._inbox))):
            yield self._inbox.popleft()

    def send(self, identity: bytes, message: FromWorker) -> bool:
        """Leaves at the worker's own time."""
        cable = self.cables.get(identity)
        if cable is None:
            return False
        cable.to_gateway(message, self._clock.now_s)
        return True

    def close(self, linger_s: float) -> None:
        """Nobody is there any more."""
        self.cables.clear()


@dataclass(slots=True, eq=False)
class Process:
    """One life of a worker process."""

    link: SimLink
    backend: SimBackend
    weight_store: SimWeightStore
    engine: Engine
    worker: Worker
    fast_forward: FastForward
    stretch: Stretch | None = None
    """Steps that are planned, and come into the engine when somebody looks or at their end."""

    def take_stretch(self) -> Stretch | None:
        """It has ended."""
        stretch, self.stretch = self.stretch, None
        return stretch


class SimWorker:
    """A machine with one device, its host memory, and the worker process that runs there."""

    def __init__(
        self,
        number: int,
        loop: Loop,
        site: Site,
        config: WorkerConfig,
        faults: WorkerFaults | None = None,
    ) -> None:
        self.number = number
        self.worker_id = config.worker_id
        self.config = config
        self.clock = DeviceClock(loop.now_s)
        self.host = HostMemory(config.engine.host_tier_bytes)
        self.process: Process | None = None
        self.busy_s = 0.0
        """Device seconds of processes that have ended."""
        self.on_tick: Callable[[SimWorker], None] | None = None
        self.skips = True
        """Whether steps in which nothing is decided are taken at one go."""
        self.poll_s = POLL_S
        """How often a load that waits for room looks, while nothing else is decided."""
        self.num_skipped = 0
        self._loop = loop
        self._site = site
        self._faults = faults or WorkerFaults()
        self._num_starts = 0
        self._most_steps = FIRST_STEPS
        self._next: Event | None = None
        self._cables: list[Cable] = []

    @property
    def is_up(self) -> bool:
        """A process runs."""
        return self.process is not None

    @property
    def busy_so_far_s(self) -> float:
        """Seconds of the device used, over all processes."""
        return self.busy_s + (self.process.backend.busy_s if self.process else 0.0)

    def attach(self, cable: Cable) -> None:
        """A gateway has a cable to this machine."""
        self._cables.append(cable)

    def detach(self, cable: Cable) -> None:
        """A gateway is gone."""
        self._cables.remove(cable)

    def start(self) -> None:
        """A new process, with an epoch of its own."""
        assert self.process is None
        self._num_starts += 1
        self.clock.wait_until(self._loop.now_s)
        link = SimLink(self.clock)
        backend = SimBackend(self.clock, self._site.roofline, self._faults.late_by)
        weight_store = SimWeightStore(self.clock, self.host, self._site.loads, self._faults.load)
        dependencies = EngineDependencies(
            packs=self._site.packs,
            make_weight_store=lambda _backend, _config: weight_store,
            make_runner=self._make_runner,
            lay_out=lay_out,
            eviction=self._site.eviction,
        )
        engine = Engine(self.config.engine, backend, dependencies)
        worker = Worker(
            self.config,
            engine,
            link,
            epoch=f"{self.worker_id}.{self._num_starts}",
            device=backend.name,
            clock=self.clock,
        )
        self.process = Process(link, backend, weight_store, engine, worker, FastForward(engine))
        for cable in self._cables:
            cable.worker_started()
        self._wake(self._loop.now_s)

    def crash(self) -> None:
        """The process is gone, with all but the host tier."""
        process = self.process
        if process is None:
            return
        if process.stretch is not None:
            # What has ended by now was sent.
            self.clock.wait_until(process.stretch.advance_ended(self._loop.now_s))
            process.worker.tell(process.stretch.deltas())
        self.busy_s += process.backend.busy_s
        self.process = None
        if self._next is not None:
            self._next.cancel()
            self._next = None
        for cable in self._cables:
            cable.worker_ended()

    def pause(self, seconds: float) -> None:
        """The process stands still for so long."""
        self._interrupt()
        self.look()
        if self.process is not None and self.process.stretch is not None:
            self.clock.wait_until(self.process.stretch.end_s)
        self.clock.wait_until(self._loop.now_s + seconds)
        if self._next is not None and self._next.time_s < self.clock.now_s:
            self._next.cancel()
            self._next = self._loop.at(self.clock.now_s, self._tick)

    # What its cables say (cable.Socket).

    def plug(self, identity: bytes, cable: Cable) -> None:
        """A connection begins."""
        assert self.process is not None
        self.process.link.cables[identity] = cable

    def unplug(self, identity: bytes) -> None:
        """A connection has ended: sends to it fail from now on."""
        self._interrupt()
        if self.process is not None:
            self.process.link.cables.pop(identity, None)

    def deliver(self, identity: bytes, message: ToWorker) -> None:
        """A message arrives; one for an earlier process is lost."""
        process = self.process
        if process is not None and identity in process.link.cables:
            process.link.put(identity, message)
            if type(message) is AckUsage:
                return  # whenever it is read: nothing waits for it
            if process.stretch is not None:
                self._interrupt()
            else:
                self._wake(max(self._loop.now_s, self.clock.now_s))

    def look(self) -> None:
        """Have the engine as single steps would have it by now."""
        if self.process is not None and self.process.stretch is not None:
            self.process.stretch.advance_begun(self._loop.now_s)

    # Ticks.

    def _interrupt(self) -> None:
        """Steps that were planned ahead end with the one under way."""
        stretch = self.process.stretch if self.process is not None else None
        if stretch is not None and stretch.cut(self._loop.now_s):
            assert self._next is not None
            self._next.cancel()
            self._next = self._loop.at(max(self._loop.now_s, stretch.end_s), self._tick)

    def _plan(self, process: Process, now_s: float) -> Stretch | None:
        """Steps in which nothing is decided are taken at one go."""
        until_s = process.worker.quiet_until_s
        load_end_s = process.weight_store.next_end_s
        if load_end_s is not None:
            until_s = min(until_s, load_end_s)
        if process.link.needs_reading:
            return None
        process.stretch = plan(
            process.engine,
            process.fast_forward,
            process.backend,
            now_s,
            until_s,
            self.poll_s,
            self._most_steps,
        )
        return process.stretch

    def _wake(self, time_s: float) -> None:
        """Tick at `time_s`, or earlier where that is due already."""
        if self._next is not None:
            if self._next.time_s <= time_s:
                return
            self._next.cancel()
        self._next = self._loop.at(time_s, self._tick)

    def _tick(self) -> None:
        process = self.process
        assert process is not None
        self._next = None
        began_s = self._loop.now_s
        self.clock.wait_until(began_s)
        stretch = process.take_stretch()
        if stretch is not None:
            if stretch.num_steps:
                stretch.advance_ended(self.clock.now_s)
                process.worker.tell(stretch.deltas())
            self.num_skipped += stretch.num_steps
            self._most_steps = stretch.next_most(self._most_steps)
        link = process.link
        link.begin_tick()
        process.worker.tick()
        if self.on_tick is not None:
            self.on_tick(self)
        now_s = self.clock.now_s
        planned = None
        if self.skips and link.rest_s is None and now_s > began_s:
            planned = self._plan(process, now_s)
        if planned is not None:
            self._wake(planned.end_s)
        elif link.rest_s is None:
            self._wake(now_s if now_s > began_s else self._after_nothing(process))
        elif link.needs_reading:
            self._wake(max(now_s, began_s + SPIN_S))
        else:
            self._wake(now_s + self._rest_s(process, link.rest_s, now_s))

    def _after_nothing(self, process: Process) -> float:
        """No step ran, and yet there is work: copies are awaited, or the next tick finds some."""
        return max(self._loop.now_s + SPIN_S, process.backend.free_s)

    def _rest_s(self, process: Process, rest_s: float, now_s: float) -> float:
        """At least a moment, so that time goes on."""
        if rest_s == BUSY_POLL_S:
            # Nothing but loads is waited for, and perhaps for somebody to leave.
            until_s = min(
                process.worker.quiet_until_s,
                process.fast_forward.until_s(now_s, self.poll_s or BUSY_POLL_S),
            )
            rest_s = max(BUSY_POLL_S, until_s - now_s)
        end_s = process.weight_store.next_end_s
        if end_s is not None:
            rest_s = min(rest_s, end_s - now_s)
        return max(rest_s, SPIN_S)

    def _make_runner(
        self,
        instance_id: str,
        pack_dir: Path,
        index: PackIndex,
        backend: Backend,
        pool: PagePool,
        config: EngineConfig,
    ) -> SimRunner:
        assert isinstance(backend, SimBackend)
        return SimRunner(
            instance_id,
            index,
            KvPlan.of(index, config.block_tokens, pool),
            backend,
            pool,
            self._site.packs.of(pack_dir).cost,
            self._site.answers,
            config.prefix_cache,
            config.max_batch_tokens,
        )
