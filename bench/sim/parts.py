"""The engine's parts in modelled time: runners that know what will be said, loads that only last.

    lay_out     a step without tensors
    SimRunner   running.InstanceRunner: the real KvCache, and a token a row as the workload dictates
    SimWeightStore    weight_store.WeightStore: a disk and a host tier, each loading one pack at a
                      time

What a load or a step costs is said here and in `bench/sim/device.py`; everything that decides is
the engine's own.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.sim.device import DeviceClock, ModelCost, SimBackend, StepLoad
from engine.errors import IntegrityError
from engine.memory.kv_cache import KvCache
from engine.memory.kv_plan import KvPlan
from engine.memory.page_pool import Owner, PagePool
from engine.pack import PackIndex
from engine.packs.policy.host_tier import HeldPack, choose_drops
from engine.packs.weight_store import Tier, TierRates
from engine.request import Request
from engine.running.batch import ScheduledRow, StepBatch
from engine.sampling.sampler import SampleOutput
from engine.sampling.sampling_batch import build_sampling

END_TOKEN = 2
PLAIN_TOKEN = 3
FIRST_PROMPT_TOKEN = 16
"""Ids below it have a meaning of their own."""

_NOTHING = torch.empty(0, dtype=torch.int64)
_NO_SAMPLING = build_sampling([], torch.device("cpu"))

Answers = Callable[[str], int]
"""By request id: tokens that the model says before the end of its sequence."""


def lay_out(rows: Sequence[ScheduledRow], cache: KvCache, device: torch.device) -> StepBatch:
    """engine.running.batch.LayOut: the rows, and no tensor."""
    return StepBatch(
        rows=tuple(rows),
        sampling_rows=tuple(row for row in rows if row.samples),
        input_ids=_NOTHING,
        position_ids=_NOTHING,
        logit_index=_NOTHING,
        plan=cache.plan,
        groups=(),
        sampling=_NO_SAMPLING,
        pending_index=_NOTHING,
        pending_source=_NOTHING,
    )


@functools.lru_cache(maxsize=4096)
def _output(token_ids: tuple[int, ...]) -> SampleOutput:
    """Most steps say the same; nobody writes into what a step has sampled."""
    return SampleOutput(
        torch.tensor(token_ids, dtype=torch.int64), torch.zeros(len(token_ids), dtype=torch.bool)
    )


class SimRunner:
    """Implements engine.running.InstanceRunner."""

    def __init__(
        self,
        instance_id: str,
        index: PackIndex,
        plan: KvPlan,
        backend: SimBackend,
        pool: PagePool,
        cost: ModelCost,
        answers: Answers,
        caching: bool,
        max_chunk: int,
    ) -> None:
        self.index = index
        self.cache = KvCache(
            Owner(instance_id, "kv"), plan, pool, backend.device, caching, max_chunk
        )
        self.cost = cost
        self._backend = backend
        self._answers = answers

    def bind(self, tensors: dict[str, torch.Tensor], generation: int) -> None:
        """There is nothing to point at."""

    def unbind(self) -> None:
        """Give all KV pages back."""
        self.cache.drop_all()

    def execute(self, batch: StepBatch) -> SampleOutput:
        """Takes the device's time; a token a sampling row."""
        load = StepLoad.of(
            self.cost, ((row.first, row.num_scheduled_tokens, row.samples) for row in batch.rows)
        )
        self._backend.spend(self._backend.roofline.step_s(self.cost, load))
        tokens = [self.next_token(row.request) for row in batch.sampling_rows]
        return _output(tuple(tokens))

    def steps_to_end(self, request: Request) -> int:
        """Steps until its last token, that one included."""
        said = self._answers(request.submit.request_id) + 1
        return min(said, request.submit.max_tokens) - request.num_generated

    def next_token(self, request: Request) -> int:
        """What comes after the request's tokens, those in flight included."""
        number = request.num_generated + request.num_pending
        return PLAIN_TOKEN if number < self._answers(request.submit.request_id) else END_TOKEN


@dataclass(slots=True, eq=False)
class SimLoad:
    """Implements engine.packs.LoadJob."""

    clock: DeviceClock
    index: PackIndex
    tier: Tier
    started_s: float
    ends_s: float
    error: Exception | None = None
    cancelled: bool = False

    @property
    def done(self) -> bool:
        """Its time has come."""
        return self.clock.now_s >= self.ends_s

    @property
    def duration_s(self) -> float:
        """Waiting for the loads before it included."""
        return self.ends_s - self.started_s

    def cancel(self) -> None:
        """It ends at once."""
        self.cancelled = True
        self.ends_s = min(self.ends_s, self.clock.now_s)


@dataclass(slots=True, eq=False)
class HostMemory:
    """Packs in shared memory, least recently used first. Outlives a worker process."""

    capacity_bytes: int
    packs: OrderedDict[str, int] = field(default_factory=OrderedDict)
    used_bytes: int = 0
    num_changes: int = 0

    def put(
        self,
        revision: str,
        size_bytes: int,
        in_use: Collection[str],
        worth: Callable[[str], float] = lambda revision: 0.0,
    ) -> None:
        """Keep a pack, in place of those that the product would give up for it."""
        if revision in self.packs:
            return
        held = [
            HeldPack(name, size, worth(name), place)
            for place, (name, size) in enumerate(self.packs.items())
            if name not in in_use
        ]
        free = self.capacity_bytes - self.used_bytes
        drops = choose_drops(size_bytes, worth(revision), held, free)
        if drops is None:
            return
        for name in drops:
            self.drop(name)
        self.packs[revision] = size_bytes
        self.used_bytes += size_bytes
        self.num_changes += 1

    def drop(self, revision: str) -> None:
        """Forget a pack."""
        self.used_bytes -= self.packs.pop(revision)
        self.num_changes += 1


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Bytes a second of each tier, and seconds that every load takes beside."""

    rates: dict[Tier, float]
    overhead_s: float


LoadFault = Callable[[str], tuple[float, Exception | None]]
"""By revision: how many times longer a load takes, and what it ends with."""


class SimWeightStore:
    """Implements engine.packs.WeightStore.

    Loads of one tier go one after the other, as they do in reality where each has all threads. A
    pack from the disk is copied to the host tier behind its load, as long as the load took.
    """

    def __init__(
        self,
        clock: DeviceClock,
        host: HostMemory,
        figures: LoadFigures,
        fault: LoadFault = lambda revision: (1.0, None),
    ) -> None:
        self._clock = clock
        self._host = host
        self._figures = figures
        self._fault = fault
        self._rates = TierRates()
        self._free_s: dict[Tier, float] = {"disk": 0.0, "host": 0.0}
        self._loads: list[SimLoad] = []
        self._fills: list[tuple[float, PackIndex]] = []
        self._worth: Callable[[str], float] = lambda revision: 0.0
        self.copies = True

    @property
    def num_changes(self) -> int:
        """Packs that came to or left the host tier."""
        return self._host.num_changes

    @property
    def next_end_s(self) -> float | None:
        """When the next load or fill ends; None: nothing is under way."""
        ends = [load.ends_s for load in self._loads] + [end for end, _ in self._fills]
        return min(ends, default=None)

    @property
    def cold_bytes_per_s(self) -> float:
        """How fast loads from the disk have been."""
        return self._rates.bytes_per_s("disk")

    def is_warm(self, index: PackIndex) -> bool:
        """Whether a load would come from the host tier."""
        return index.revision in self._host.packs

    def estimate_s(self, index: PackIndex) -> float:
        """From rates measured, as in the product."""
        return self._rates.estimate_s(index.total_bytes, "host" if self.is_warm(index) else "disk")

    def start(
        self,
        index: PackIndex,
        pack_dir: Path,
        segment_offsets: Sequence[int],
        check_files: bool = True,
    ) -> SimLoad:
        """Queue behind the loads of the same tier."""
        tier: Tier = "host" if self.is_warm(index) else "disk"
        if tier == "host":
            self._host.packs.move_to_end(index.revision)
        factor, error = self._fault(index.revision)
        took_s = index.total_bytes / self._figures.rates[tier] + self._figures.overhead_s
        now_s = self._clock.now_s
        ends_s = max(now_s, self._free_s[tier]) + took_s * factor
        self._free_s[tier] = ends_s
        load = SimLoad(self._clock, index, tier, now_s, ends_s, error)
        self._loads.append(load)
        return load

    def finish(self, job: SimLoad, pack_dir: Path) -> Tier:
        """Raises what the load ended with."""
        self._loads.remove(job)
        if job.error is not None and not job.cancelled:
            raise job.error
        if not job.cancelled:
            self._rates.learn(job.tier, job.index.total_bytes, job.duration_s)
            if job.tier == "disk" and self.copies and self._host.capacity_bytes:
                self._fills.append((job.ends_s + job.duration_s, job.index))
        return job.tier

    def value_by(self, worth: Callable[[str], float]) -> None:
        """By revision, what keeping a pack in the host tier is worth, a byte."""
        self._worth = worth

    def warm(self, index: PackIndex, pack_dir: Path) -> None:
        """A copy from the disk, behind its loads."""
        filling = any(other.revision == index.revision for _, other in self._fills)
        if not self._host.capacity_bytes or self.is_warm(index) or filling:
            return
        took_s = index.total_bytes / self._figures.rates["disk"] + self._figures.overhead_s
        start_s = max([self._clock.now_s, self._free_s["disk"], *(end for end, _ in self._fills)])
        self._fills.append((start_s + took_s, index))

    def poll(self) -> None:
        """Fills whose time has come are in the host tier."""
        if not self._fills:
            return
        now_s = self._clock.now_s
        in_use = {load.index.revision for load in self._loads if load.tier == "host"}
        for end_s, index in [fill for fill in self._fills if fill[0] <= now_s]:
            self._fills.remove((end_s, index))
            self._host.put(index.revision, index.total_bytes, in_use, self._worth)

    def keep_only(self, revisions: Collection[str]) -> None:
        """Forget packs that no hosted model has."""
        for revision in [name for name in self._host.packs if name not in revisions]:
            self._host.drop(revision)

    def check_integrity(self) -> None:
        """Raises IntegrityError where the host tier's books are wrong."""
        host = self._host
        if host.used_bytes != sum(host.packs.values()) or host.used_bytes > host.capacity_bytes:
            raise IntegrityError(f"host tier: {host.used_bytes} of {host.capacity_bytes} bytes")

    def close(self, keep_host_tier: bool) -> None:
        """Nothing runs."""
