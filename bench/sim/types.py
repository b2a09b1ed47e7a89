"""The seam of the simulator: what comes in (a world and its workload) and what goes out (records).

    workloads --Arrival--> loop --Record, Sample--> report

`bench/sim/` has a module for each. Nothing here knows a trace's format, an event or a plot. Times
are simulated seconds from 0; a run is a function of its world, its workload and one seed.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

RecordOutcome = Literal["stop", "length", "abort", "timeout", "error", "refused"]
OUTCOMES: tuple[RecordOutcome, ...] = ("stop", "length", "abort", "timeout", "error", "refused")


REFUSED_COUNTER = "refused:"
"""A counter `refused:CODE` of a run says how many requests were refused for it."""


class Arrival(NamedTuple):
    """One request of a workload.

    tenant, model     places in the world's lists
    prompt            pieces (content id, tokens): pieces with the same id have the same text, so
                      requests that begin with the same pieces share a prefix
    output_tokens     what the model will say before its end of sequence; nobody in the product
                      knows it beforehand
    max_tokens        what the client asks for; the answer is `length` where it is less
    abort_after_s     the client goes away so long after sending; negative: it stays
    """

    at_s: float
    tenant: int
    model: int
    prompt: tuple[tuple[int, int], ...]
    output_tokens: int
    max_tokens: int
    abort_after_s: float = -1.0

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(tokens for _, tokens in self.prompt)


Workload = Iterable[Arrival]
"""In order of `at_s`; may be a generator: it is read once, as the simulation goes on."""


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """What a modelled device can do: a roofline.

    flops_per_s           dense products in the model's dtype
    memory_bytes_per_s    weights and KV read by a step
    copy_bytes_per_s      inside the device
    host_bytes_per_s      host tier to device (PCIe)
    disk_bytes_per_s      disk to device
    step_overhead_s       launches and sampling, per step
    row_overhead_s        per row of a step, host work included
    load_overhead_s       per load: opening, binding
    memory_bytes          the arena
    host_bytes            the host tier
    source                where the figures come from, for the report

    Figures that only a measured device has are explained at `bench.sim.device.Roofline`.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    copy_bytes_per_s: float
    host_bytes_per_s: float
    disk_bytes_per_s: float
    step_overhead_s: float
    row_overhead_s: float
    load_overhead_s: float
    memory_bytes: int
    host_bytes: int
    cost_per_hour: float = 0.0
    source: str = ""
    flops_by_dtype: dict[str, float] = field(default_factory=dict)
    exposed: float = 0.0
    attention_flops_per_s: float = 0.0
    attention_bytes_per_s: float = 0.0
    packing_bytes_per_s: float = 0.0
    layer_overhead_s: float = 0.0
    chunk_overhead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SimModel:
    """A hosted model: `shape` names one of bench/model_shapes.json; `dtype` bfloat16 or float32."""

    name: str
    shape: str
    dtype: str = "bfloat16"
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class SimTenant:
    """A tenant with one key."""

    name: str
    weight: float = 1.0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    is_batch: bool = False
    """All its requests are of class batch."""


@dataclass(frozen=True, slots=True)
class World:
    """Everything but the requests."""

    workers: int
    device: DeviceFigures
    models: tuple[SimModel, ...]
    tenants: tuple[SimTenant, ...]
    seed: int = 0
    settings: dict[str, object] = field(default_factory=dict)
    """Gateway settings and EngineConfig fields that differ from their defaults, by name."""
    policies: dict[str, str] = field(default_factory=dict)
    """`evict`, `share`, `place`: names of baselines in place of ours."""


@dataclass(slots=True)
class Records:
    """A row per ended request, in columns: a million of them must stay small.

    first_token_s is NaN where none came. worker is -1 where none had it. cost_s is the service
    that the engine charged.
    """

    tenant: "array[int]" = field(default_factory=lambda: array("i"))
    model: "array[int]" = field(default_factory=lambda: array("i"))
    worker: "array[int]" = field(default_factory=lambda: array("i"))
    outcome: "array[int]" = field(default_factory=lambda: array("b"))
    arrival_s: "array[float]" = field(default_factory=lambda: array("d"))
    granted_s: "array[float]" = field(default_factory=lambda: array("d"))
    first_token_s: "array[float]" = field(default_factory=lambda: array("d"))
    ended_s: "array[float]" = field(default_factory=lambda: array("d"))
    prompt_tokens: "array[int]" = field(default_factory=lambda: array("i"))
    cached_tokens: "array[int]" = field(default_factory=lambda: array("i"))
    output_tokens: "array[int]" = field(default_factory=lambda: array("i"))
    service_s: "array[float]" = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.tenant)


@dataclass(frozen=True, slots=True)
class Swap:
    """A load or an eviction that ended at `at_s` on `worker`."""

    at_s: float
    worker: int
    model: int
    kind: Literal["load", "evict"]
    tier: str
    duration_s: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The world at one moment, taken every `Run.sample_s`.

    pages          pages by owner over all workers: "free", "weights", "kv", "cached"
    waiting        tickets in the dispatcher
    running        requests on workers
    busy_s         device seconds so far, over all workers
    service_s      service so far by tenant: only tenants that had some since the last sample
    backlogged     tenants with a waiting ticket now
    """

    at_s: float
    pages: dict[str, int]
    waiting: int
    running: int
    busy_s: float
    service_s: dict[int, float]
    backlogged: tuple[int, ...]


@dataclass(slots=True)
class Run:
    """What a simulation leaves."""

    world: World
    records: Records = field(default_factory=Records)
    swaps: list[Swap] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    sample_s: float = 1.0
    simulated_s: float = 0.0
    wall_s: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)
    """Events, steps, macro-steps, messages, preemptions, prefix tokens looked up and found, ..."""

    def rows(self) -> Iterator[int]:
        """Places of the records, in the order in which requests ended."""
        return iter(range(len(self.records)))
