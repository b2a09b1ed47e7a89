"""Small worlds in which everything goes wrong, checked after every event.

    python -m bench.sim.fuzz --seeds 1000 [--first 0]

A seed draws a world (memory too small for its models, odd settings), a workload, and what happens
to it: worker processes that die, stand still or are not missed for a while, gateways that die,
connections that break, loads that last or fail, clients that go away, an operator who loads,
unloads and takes models off the catalog. What must hold:

    always   the invariants of dispatcher, workers and engines; a client's tokens are those it asked
             for, in number, and come once
    in time  every request ends, once
    at last  when all is calm again: nothing runs, all memory but the cache is back, every finish is
             acknowledged, limits hold nothing, workers are connected, and every model that can be
             loaded answers

A failure names its seed, and the same seed fails again.
"""

import argparse
import logging
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.sim.client import SimClient
from bench.sim.fuzz_worlds import Trouble, make_arrivals, make_trouble, make_world
from bench.sim.run import Simulation
from bench.sim.types import Arrival
from bench.sim.worker import SimWorker, WorkerFaults
from engine.errors import PackError

INSIDE = (
    "preemptions",
    "kv_evicted_pages",
    "kv_moved_pages",
    "kv_compactions",
    "weights_moved_pages",
    "prefix_cache_hits",
    "deadline_timeouts",
    "steps",
    "retries",
    "late_messages",
    "postings_claimed",
)
CALM_S = 200.0
"""Simulated seconds in which everything has to end after the last trouble."""


class Violation(AssertionError):
    """Something that must hold did not."""


@dataclass(slots=True, eq=False)
class Fuzz:
    """One seed's life."""

    seed: int
    rng: random.Random = field(init=False)
    trouble: Trouble = field(init=False)
    simulation: Simulation = field(init=False)
    happened: Counter[str] = field(default_factory=Counter)
    calm: bool = False
    ends: Counter[int] = field(default_factory=Counter)
    removed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.trouble = make_trouble(self.rng)
        world = make_world(self.rng, self.seed)
        arrivals = make_arrivals(self.rng, world)
        self.simulation = Simulation(world, arrivals, sample_s=5.0, faults=self._worker_faults)
        self.simulation.latency_s = self._latency_s
        self.simulation.on_through = lambda: None
        self.simulation.on_end = self._ended
        for worker in self.simulation.workers:
            worker.on_tick = self._ticked

    def run(self) -> Counter[str]:
        """Raises Violation, or whatever the product raises. What happened, by name."""
        simulation, loop = self.simulation, self.simulation.loop
        simulation.start()
        trouble = self.trouble
        self._every(trouble.crash_s, self._crash)
        self._every(trouble.gateway_s, self._kill_gateway)
        self._every(trouble.break_s, self._break)
        self._every(trouble.pause_s, self._pause)
        self._every(trouble.operator_s, self._operate)
        self._run_until(self.rng.uniform(5.0, 40.0))
        self.calm = True
        self._run_until(loop.now_s + 5.0)  # what had been put off happens
        self._restore()
        self._settle(self._all_ended)
        for number in range(len(simulation.stage.models)):
            self._ask(number)
        self._settle(self._at_rest)
        self._all_ended()
        self._count()
        return self.happened

    def _count(self) -> None:
        """What went on inside, so that one sees what a fuzz has reached."""
        for name, value in self.simulation.finish().counters.items():
            if value and name.removeprefix("engine_") in INSIDE:
                self.happened[f"inside: {name}"] += int(value)
        for swap in self.simulation.run.swaps:
            self.happened[f"swap: {swap.kind} {swap.tier}"] += 1

    def _settle(self, check: Callable[[], None]) -> None:
        """Run until `check` has nothing to say. Raises what it still says after CALM_S."""
        loop = self.simulation.loop
        last_s = loop.now_s + CALM_S
        while True:
            self._run_until(loop.now_s + 1.0)
            try:
                check()
                return
            except Violation:
                if loop.now_s >= last_s:
                    raise

    def _run_until(self, time_s: float) -> None:
        loop = self.simulation.loop
        loop.after_event = self._look
        loop.run(time_s)

    # What is looked at.

    def _look(self) -> None:
        gateway = self.simulation.gateway
        if gateway is not None:
            gateway.requests.check_integrity()

    def _ticked(self, worker: SimWorker) -> None:
        assert worker.process is not None
        worker.process.worker.check_integrity()

    def _ended(self, client: SimClient) -> None:
        self.ends[client.number] += 1
        self.happened[f"outcome {client.outcome}"] += 1
        arrival, got = client.arrival, client.num_tokens
        if client.outcome == "stop" and got != arrival.output_tokens + 1:
            raise Violation(f"request {client.number} stopped after {got} tokens: {arrival}")
        if client.outcome == "length" and got != arrival.max_tokens:
            raise Violation(f"request {client.number} has {got} tokens: {arrival}")
        if got > min(arrival.output_tokens + 1, arrival.max_tokens):
            raise Violation(f"request {client.number} got {got} tokens: {arrival}")

    def _all_ended(self) -> None:
        wrong = {n: self.ends[n] for n in range(self.simulation.num_arrived) if self.ends[n] != 1}
        if wrong:
            raise Violation(f"requests and how often they ended: {wrong}")

    def _ask(self, number: int) -> None:
        """In peace whatever can be loaded must be served, if not at the first try."""
        simulation = self.simulation
        gateway = simulation.gateway
        assert gateway is not None
        name = simulation.stage.models[number].name
        ends: list[SimClient] = []
        before = simulation.on_end

        def note(client: SimClient) -> None:
            ends.append(client)
            before(client)

        simulation.on_end = note
        last_s = simulation.loop.now_s + CALM_S
        asker = len(simulation.stage.principals) - 1
        while not ends or ends[-1].outcome != "stop":
            if gateway.dispatcher.model_failure(name) is not None:
                break
            if simulation.loop.now_s >= last_s:
                raise Violation(f"{name}: asked in peace, got {ends[-1].outcome} {ends[-1].error}")
            num_ends = len(ends)
            prompt = ((10**6 + number, 20),)
            simulation.send(Arrival(simulation.loop.now_s, asker, number, prompt, 3, 10))
            while len(ends) == num_ends:
                self._run_until(simulation.loop.now_s + 0.5)
            if ends[-1].outcome != "stop":  # a refusal at once takes no time: come again as told
                self._run_until(simulation.loop.now_s + min(20.0, ends[-1].retry_after_s or 0.5))
        simulation.on_end = before

    def _at_rest(self) -> None:
        gateway = self.simulation.gateway
        assert gateway is not None
        snapshot = gateway.dispatcher.snapshot()
        if snapshot.num_waiting or snapshot.num_running or gateway.store.num_open:
            raise Violation(f"left in the gateway: {snapshot}, {gateway.store.num_open} holds")
        if len(gateway.dispatcher.worker_statuses()) != len(self.simulation.workers):
            raise Violation("a worker that runs is not connected")
        for worker in self.simulation.workers:
            self._worker_at_rest(worker)

    def _worker_at_rest(self, worker: SimWorker) -> None:
        process = worker.process
        assert process is not None
        who, engine = worker.worker_id, process.engine
        if any(True for _ in engine.unfinished()):
            raise Violation(f"{who} still has requests")
        pool = engine.pool
        kv = sum(count for owner, count in pool.pages_by_owner().items() if owner.kind == "kv")
        if kv != engine.num_cached_pages or pool.num_unripe:
            raise Violation(f"{who}: {kv} KV pages, {engine.num_cached_pages} of them cached")
        status = engine.status(worker.clock.now_s)
        most = worker.config.engine.max_num_seqs
        if status.free_requests < most:
            raise Violation(f"{who} offers {status.free_requests} of {most} rows")
        free = (pool.num_free + pool.num_fenced + kv) * pool.page_bytes
        if status.free_kv_bytes != free:
            raise Violation(f"{who} offers {status.free_kv_bytes} bytes, {free} are free")
        unacked = process.worker.num_unacked
        if unacked:
            raise Violation(f"{who}: {unacked} finishes were never acknowledged")

    # What happens.

    def _every(self, mean_s: float, call: Callable[[], None]) -> None:
        if not mean_s:
            return

        def happen() -> None:
            if not self.calm:
                call()
                self._every(mean_s, call)

        self.simulation.loop.after(self.rng.expovariate(1 / mean_s), happen)

    def _crash(self) -> None:
        worker = self.rng.choice(self.simulation.workers)
        if not worker.is_up:
            return
        worker.crash()
        self.happened["worker died"] += 1
        loop, rng = self.simulation.loop, self.rng
        loop.after(rng.choice([0.3, 1.0, 3.0, 10.0]), lambda: self._start(worker))
        if rng.random() < 0.6:
            loop.after(rng.uniform(0.001, 0.3), lambda: self._missed(worker.number))

    def _start(self, worker: SimWorker) -> None:
        if not worker.is_up:
            worker.start()

    def _missed(self, number: int) -> None:
        if self.simulation.gateway is not None:
            self.simulation.gateway.worker_ended(number, "its process ended")

    def _kill_gateway(self) -> None:
        simulation = self.simulation
        if simulation.gateway is None:
            return
        self.happened["gateway died"] += 1
        gateway, simulation.gateway = simulation.gateway, None
        gateway.die()
        simulation.loop.after(self.rng.choice([0.05, 0.5, 3.0, 8.0]), self._start_gateway)

    def _start_gateway(self) -> None:
        if self.simulation.gateway is None:
            self.simulation.start_gateway()
            self.removed.clear()

    def _break(self) -> None:
        gateway = self.simulation.gateway
        if gateway is not None:
            self.happened["connection broke"] += 1
            self.rng.choice(self.rng.choice(gateway.worker_clients)).cable.break_()

    def _pause(self) -> None:
        worker = self.rng.choice(self.simulation.workers)
        self.happened["worker stood still"] += 1
        worker.pause(self.rng.choice([0.01, 0.2, 2.0, 20.0]))

    def _operate(self) -> None:
        gateway, rng = self.simulation.gateway, self.rng
        if gateway is None:
            return
        models = self.simulation.stage.models
        number = rng.randrange(len(models))
        verb = rng.choice(["load", "unload", "unload", "remove", "bring back"])
        self.happened[f"operator: {verb}"] += 1
        if verb == "load":
            gateway.dispatcher.load_model(models[number].name)
        elif verb == "unload":
            gateway.dispatcher.unload_model(models[number].name)
        elif verb == "remove":
            self.removed.add(number)
        else:
            self.removed.discard(number)
        if verb in ("remove", "bring back"):
            kept = [model for n, model in enumerate(models) if n not in self.removed]
            gateway.requests.set_catalog(kept)

    def _restore(self) -> None:
        """Everything runs again."""
        simulation = self.simulation
        for worker in simulation.workers:
            self._start(worker)
        self._start_gateway()
        if self.removed and simulation.gateway is not None:
            self.removed.clear()
            simulation.gateway.requests.set_catalog(simulation.stage.models)

    def _latency_s(self) -> float:
        if self.calm or self.rng.random() >= self.trouble.slow_messages:
            return self.simulation.stage.latency_s
        return self.rng.choice([0.002, 0.05, 1.0])

    def _worker_faults(self, number: int) -> WorkerFaults:
        rng = random.Random(f"{self.seed} worker {number}")
        trouble = self.trouble

        def load(revision: str) -> tuple[float, Exception | None]:
            factor, error = 1.0, None
            if not self.calm and rng.random() < trouble.slow_loads:
                factor = rng.choice([3.0, 30.0])
            if not self.calm and rng.random() < trouble.failed_loads:
                error = rng.choice([OSError("the disk failed"), PackError("the pack is damaged")])
                self.happened["load failed"] += 1
            return factor, error

        def late_by() -> int:
            return rng.randint(0, trouble.late_fences) if trouble.late_fences else 0

        return WorkerFaults(load, late_by)


def main(argv: Sequence[str] | None = None) -> int:
    """The number of seeds that failed, as exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m bench.sim.fuzz", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    happened: Counter[str] = Counter()
    failed: list[int] = []
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        try:
            happened += Fuzz(seed).run()
        except Exception as error:  # noqa: BLE001 - whatever it is, the seed is to be told
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
            traceback.print_exc()
    print(f"{arguments.seeds} seeds, {len(failed)} failed: {failed}")
    for name, count in sorted(happened.items()):
        print(f"  {name}: {count}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
