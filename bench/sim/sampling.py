"""The world at moments: `Sample`s every `Run.sample_s`, and the counters at the end.

Workers are read as of their last tick. Pages are the pool's own count, so that "kv" is what
requests hold and "cached" what could be given back.
"""

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from bench.sim.types import Sample
from bench.sim.worker import Process, SimWorker

if TYPE_CHECKING:
    from bench.sim.run import Simulation


class Sampler:
    """Looks at a simulation on time."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self._tenants = {
            tenant.name: number for number, tenant in enumerate(simulation.run.world.tenants)
        }
        self._told_s: dict[int, float] = {}
        self._counters: defaultdict[str, float] = defaultdict(float)

    def start(self) -> None:
        """The first sample is at 0."""
        self._take()

    def finish(self) -> None:
        """Counters of the whole run."""
        simulation = self._simulation
        for worker in simulation.workers:
            self.keep(worker)
        counters = self._counters
        counters["events"] = simulation.loop.num_events
        counters["requests"] = simulation.num_arrived
        counters["postings"] = simulation.postings.num_posted
        counters["postings_claimed"] = simulation.postings.num_claimed
        counters["busiest_seconds"] = max(w.busy_so_far_s for w in simulation.workers)
        counters["busy_seconds"] = sum(w.busy_so_far_s for w in simulation.workers)
        gateway = simulation.gateway
        if gateway is not None:
            snapshot = gateway.dispatcher.snapshot()
            counters["messages"] = sum(
                c.cable.num_messages for ways in gateway.worker_clients for c in ways
            )
            counters["retries"] = snapshot.num_retries + snapshot.num_resumed
            counters["queue_timeouts"] = snapshot.num_queue_timeouts
            counters["queue_rejections"] = snapshot.num_queue_rejections
            counters["late_messages"] = snapshot.num_late_messages
            accounts = snapshot.accounts
            counters["tenant_device_seconds"] += sum(accounts.device_s.values())
            counters["system_device_seconds"] += accounts.failed_s
            counters["load_seconds_charged"] = sum(accounts.load_s.values())
            counters["load_seconds_system"] = accounts.system_load_s
        simulation.run.counters.update(sorted(counters.items()))

    def keep(self, worker: SimWorker) -> None:
        """Add what a process has counted; it ends now."""
        process = worker.process
        self._counters["steps_skipped"] += worker.num_skipped
        if process is not None:
            worker.look()
            for name, value in process.engine.status(worker.clock.now_s).counters.items():
                self._counters[f"engine_{name}"] += value
                if name in ("unbilled_seconds", "recompute_seconds"):
                    self._counters["system_device_seconds"] += value
            for request in process.engine.unfinished():
                self._counters["tenant_device_seconds"] += request.device_s

    def _take(self) -> None:
        simulation = self._simulation
        run, loop = simulation.run, simulation.loop
        pages: Counter[str] = Counter({"free": 0, "weights": 0, "kv": 0, "cached": 0})
        for worker in simulation.workers:
            if worker.process is not None:
                worker.look()
                _count_pages(worker.process, pages)
        gateway = simulation.gateway
        waiting = running = 0
        backlogged: tuple[int, ...] = ()
        service_s: dict[int, float] = {}
        if gateway is not None:
            snapshot = gateway.dispatcher.snapshot()
            waiting, running = snapshot.num_waiting, snapshot.num_running
            backlogged = tuple(sorted(self._tenants[t] for t in snapshot.waiting_by_tenant))
            service_s = self._service(dict(snapshot.service_s_by_tenant))
        busy_s = sum(worker.busy_so_far_s for worker in simulation.workers)
        run.samples.append(
            Sample(loop.now_s, dict(pages), waiting, running, busy_s, service_s, backlogged)
        )
        loop.after(run.sample_s, self._take)

    def _service(self, ended_s: dict[str, float]) -> dict[int, float]:
        """Of requests that have ended and of those that run, where it has changed."""
        service_s = {self._tenants[name]: seconds for name, seconds in ended_s.items()}
        for worker in self._simulation.workers:
            if worker.process is not None:
                for request in worker.process.engine.unfinished():
                    tenant = self._tenants[request.submit.tenant_id]
                    service_s[tenant] = service_s.get(tenant, 0.0) + request.service_s
        changed = {
            tenant: seconds
            for tenant, seconds in sorted(service_s.items())
            if self._told_s.get(tenant) != seconds
        }
        self._told_s.update(changed)
        return changed


def _count_pages(process: Process, pages: Counter[str]) -> None:
    pool = process.engine.pool
    pages["free"] += pool.num_free + pool.num_fenced
    for owner, count in pool.pages_by_owner().items():
        pages[owner.kind] += count
    cached = process.engine.num_cached_pages
    pages["kv"] -= cached
    pages["cached"] += cached
