"""A worker that serves by rate: for fleets too large for the product's engine (fleet mode).

What a dispatcher sees of a worker is true to the product: leases, residency, loads by size and
tier, refusals, usage, statuses on time and at changes. What is inside is not: there are no steps
and no pages. All that runs shares the device evenly,

    tokens a second of each request = 1 / (models at work * step_s + requests * row_s)

a prompt takes as long as `prefill_s` a token at the same rate, and memory is a count of bytes.
Its worst case is held from a request's beginning, so nothing is ever preempted. A request costs
two events, its first token and its end, however long it is. No prefix cache.

Models leave for a load by the longest unused, idle ones first; a busy one only for a load that is
`forced`, and after it has drained. This is simpler than the engine's rules on purpose: `bench/sim`
with the engine says what those are worth.
"""

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from bench.sim.loop import Event, Loop
from engine.protocol import (
    Abort,
    Finish,
    FinishReason,
    Lease,
    LoadModel,
    ModelStatus,
    RefusalCode,
    Refused,
    ResidencyState,
    Submit,
    SwapRecord,
    TokenDelta,
    ToWorker,
    UnloadModel,
    Usage,
    WarmModel,
    WorkerStatus,
)
from gateway.workers.worker_client import LossCause, WorkerListener, WorkerUnavailable

PLAIN_TOKEN = 3
STATUS_GAP_S = 0.02
"""Changes within this time share a status."""
LEASE_TTLS = 4.0
"""A lease outlives so many statuses."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device can do; the defaults are an 80 GB accelerator with models of some 8B."""

    step_s: float = 0.012
    row_s: float = 0.0003
    prefill_s: float = 5e-5
    max_requests: int = 64
    arena_bytes: int = 70 << 30
    kv_bytes_per_token: int = 131_072
    disk_bytes_per_s: float = 5e9
    host_bytes_per_s: float = 25e9
    load_overhead_s: float = 0.1
    status_interval_s: float = 1.0


@dataclass(slots=True, eq=False)
class _Run:
    submit: Submit
    begin: float  # of its tokens, in the device's progress
    service_from_s: float
    kv_bytes: int
    has_token: bool = False
    is_aborted: bool = False


@dataclass(slots=True, eq=False)
class _Held:
    """A model with bytes here. `used_s`: when it last had a request."""

    state: ResidencyState
    used_s: float
    loads_from: Literal["disk", "host"] = "host"
    num_running: int = 0
    kv_bytes: int = 0
    forced: bool = False


@dataclass(slots=True)
class RateCounts:
    """What a worker has done."""

    tokens: int = 0
    requests: int = 0
    loads: int = 0
    load_s: float = 0.0
    reloads: int = 0
    reload_s: float = 0.0
    """Of these, loads of what its process had before."""
    refused: int = 0
    statuses: int = 0


@dataclass(eq=False)
class Observer:
    """The dispatcher's connection. Implements gateway.workers.worker_client.WorkerClient."""

    worker: "RateWorker"
    listener: WorkerListener | None = None

    @property
    def worker_id(self) -> str:
        """Its name in the dispatcher."""
        return self.worker.worker_id

    def start(self, listener: WorkerListener) -> None:
        """Hear the process that begins when the gateway connects, too."""
        self.listener = listener

    def send(self, message: ToWorker) -> None:
        """Raises WorkerUnavailable."""
        self.worker.send(message)

    def lose(self, reason: str, cause: LossCause) -> None:
        """The worker tells both of its ends."""

    def close(self) -> None:
        """The gateway's closes first."""


@dataclass(eq=False)
class RateWorker:
    """Implements gateway.workers.worker_client.WorkerClient: worker and the gateway's connection in
    one; `observing` is the dispatcher's, which is started first."""

    worker_id: str
    loop: Loop
    rates: Rates
    sizes: Mapping[str, int]
    """Bytes of the weights, by model."""
    counts: RateCounts = field(default_factory=RateCounts)

    def __post_init__(self) -> None:
        self.observing = Observer(self)
        self._listener: WorkerListener | None = None
        self._epoch = ""
        self._num_epochs = 0
        self._clear()

    def _clear(self) -> None:
        self._models: dict[str, _Held] = {}
        self._runs: dict[tuple[str, int], _Run] = {}
        self._due: list[tuple[float, int, tuple[str, int]]] = []  # by progress
        self._progress = 0.0  # tokens that a request has had which runs from the beginning on
        self._service_s = 0.0  # the same in seconds of the device
        self._at_s = self.loop.now_s
        self._num_at_work = 0  # models
        self._had: set[str] = set()
        self._used_bytes = 0
        self._loads: list[str] = []
        self._swaps: list[SwapRecord] = []
        self._taken: list[tuple[str, int]] = []
        self._next: Event | None = None
        self._load_end: Event | None = None
        self._status_event: Event | None = None
        self._status_soon = False
        self._sent_s = -math.inf

    # WorkerClient.

    def start(self, listener: WorkerListener) -> None:
        """Connect: the first process begins now."""
        self._listener = listener
        self.restart()

    def send(self, message: ToWorker) -> None:
        """Taken in at once; what comes of it comes later. Raises WorkerUnavailable."""
        if not self._epoch:
            raise WorkerUnavailable(self.worker_id)
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, LoadModel):
            self._ask_load(message)
        elif isinstance(message, UnloadModel):
            held = self._models.get(message.model_id)
            if held is not None and held.state == "resident" and not held.num_running:
                self._evict(message.model_id, held)
        elif isinstance(message, WarmModel):
            self._models.setdefault(message.model_id, _Held("warm", self.loop.now_s))
        elif isinstance(message, Abort):
            self._abort((message.request_id, message.attempt))

    def lose(self, reason: str, cause: LossCause) -> None:
        """The process ended."""
        self._stop()
        epoch, self._epoch = self._epoch, ""
        for end in self._ends():
            end.on_lost(self.worker_id, epoch, reason, cause)

    def close(self) -> None:
        """Say nothing more."""
        self._stop()
        self._epoch = ""

    def restart(self) -> None:
        """A new process answers, with nothing loaded; its host tier is empty, too."""
        self._clear()
        self._num_epochs += 1
        self._epoch = f"{self.worker_id}.{self._num_epochs}"
        for end in self._ends():
            end.on_connected(self.worker_id, self._epoch)
        self._change()

    def preload(self, names: Iterable[str]) -> None:
        """Have the first of these resident, as many as fit, as if loaded long ago."""
        for name in names:
            self._models[name] = _Held("resident", self.loop.now_s)
            self._had.add(name)
            self._used_bytes += self.sizes[name]
            if self.free_bytes < max(self.sizes.values()):
                break
        self._change()

    @property
    def num_running(self) -> int:
        """Requests inside."""
        return len(self._runs)

    @property
    def resident(self) -> list[str]:
        """Models that serve."""
        return [name for name, held in self._models.items() if held.state == "resident"]

    def _stop(self) -> None:
        for event in (self._next, self._load_end, self._status_event):
            if event is not None:
                event.cancel()

    # Requests.

    def _submit(self, submit: Submit) -> None:
        self._taken.append((submit.request_id, submit.attempt))
        held = self._models.get(submit.model_id)
        kv_bytes = (len(submit.prompt_token_ids) + submit.max_tokens) * (
            self.rates.kv_bytes_per_token
        )
        fits = len(self._runs) < self.rates.max_requests and (
            kv_bytes <= self.free_bytes or (held is not None and not held.num_running)
        )
        if held is None or held.state != "resident" or not fits:
            self.counts.refused += 1
            is_resident = held is not None and held.state == "resident"
            code: RefusalCode = "overloaded" if is_resident else "not_resident"
            refused = Refused(
                self._epoch, submit.request_id, submit.attempt, code, "no room", retryable=True
            )
            self.loop.after(0.0, lambda: self._say_refused(refused))
            return
        self._advance()
        run = _Run(submit, self._progress, self._service_s, kv_bytes)
        key = (submit.request_id, submit.attempt)
        self._runs[key] = run
        self._hold(held, 1, kv_bytes)
        prefill = len(submit.prompt_token_ids) * self.rates.prefill_s / self.rates.step_s
        self._push(run.begin + prefill + 1.0, key)
        self._plan()

    def _hold(self, held: _Held, number: int, kv_bytes: int) -> None:
        was_at_work = held.num_running > 0
        held.num_running += number
        held.kv_bytes += number * kv_bytes
        held.used_s = self.loop.now_s
        self._used_bytes += number * kv_bytes
        self._num_at_work += (held.num_running > 0) - was_at_work

    def _push(self, progress: float, key: tuple[str, int]) -> None:
        heapq.heappush(self._due, (progress, len(self._due), key))

    def _token_s(self) -> float:
        return self._num_at_work * self.rates.step_s + len(self._runs) * self.rates.row_s

    def _advance(self) -> None:
        """Have the progress as of now."""
        passed_s = self.loop.now_s - self._at_s
        self._at_s = self.loop.now_s
        if self._runs and passed_s > 0:
            self._progress += passed_s / self._token_s()
            self._service_s += passed_s / len(self._runs)

    def _plan(self) -> None:
        """Wake when the next request has a first token or its end."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._due:
            left = max(0.0, self._due[0][0] - self._progress)
            self._next = self.loop.after(left * self._token_s(), self._reach)

    def _reach(self) -> None:
        self._next = None
        self._advance()
        deltas = []
        while self._due and self._due[0][0] <= self._progress + 1e-6:
            due, _, key = heapq.heappop(self._due)
            run = self._runs.get(key)
            if run is None:
                continue
            if run.has_token or run.submit.max_tokens <= 1:
                deltas.append(self._end(key, run, "length"))
            else:
                run.has_token = True
                self._push(due + run.submit.max_tokens - 1, key)
                deltas.append(TokenDelta(*key, [PLAIN_TOKEN]))
        self._plan()
        if deltas:
            assert self._listener is not None
            self._listener.on_deltas(self.worker_id, self._epoch, deltas)

    def _end(self, key: tuple[str, int], run: _Run, reason: FinishReason) -> TokenDelta:
        del self._runs[key]
        submit = run.submit
        held = self._models[submit.model_id]
        self._hold(held, -1, run.kv_bytes)
        if held.state == "draining" and not held.num_running:
            self._evict(submit.model_id, held)
        service_s = self._service_s - run.service_from_s
        num_tokens = submit.max_tokens if reason == "length" else int(run.has_token)
        self.counts.tokens += num_tokens
        self.counts.requests += 1
        usage = Usage(len(submit.prompt_token_ids), 0, num_tokens, service_s, service_s)
        self._next_load()
        self._change()
        token_ids = [] if run.has_token or reason == "abort" else [PLAIN_TOKEN]
        return TokenDelta(*key, token_ids, Finish(reason, usage))

    def _abort(self, key: tuple[str, int]) -> None:
        run = self._runs.get(key)
        if run is None or run.is_aborted:
            return
        run.is_aborted = True

        def end() -> None:
            if self._runs.get(key) is run:
                self._advance()
                delta = self._end(key, run, "abort")
                self._plan()
                assert self._listener is not None
                self._listener.on_deltas(self.worker_id, self._epoch, [delta])

        self.loop.after(self.rates.step_s, end)

    def _say_refused(self, refused: Refused) -> None:
        if refused.epoch == self._epoch:
            assert self._listener is not None
            self._listener.on_refused(self.worker_id, refused)

    # Models.

    @property
    def free_bytes(self) -> int:
        """Of the arena."""
        return self.rates.arena_bytes - self._used_bytes

    def _ask_load(self, message: LoadModel) -> None:
        name = message.model_id
        held = self._models.get(name)
        if held is not None and held.state in ("resident", "loading", "draining"):
            held.forced |= message.forced
        else:
            tier: Literal["disk", "host"] = "disk" if held is None else "host"
            self._models[name] = _Held("loading", self.loop.now_s, tier, forced=message.forced)
            self._loads.append(name)
        self._next_load()
        self._change()

    def _next_load(self) -> None:
        """Begin the first load that has room, if none is under way."""
        if self._load_end is not None or not self._loads:
            return
        name = self._loads[0]
        held, size = self._models[name], self.sizes[name]
        if not self._make_room(size, held.forced):
            return
        self._loads.pop(0)
        self._used_bytes += size
        rate = self.rates.host_bytes_per_s
        if held.loads_from == "disk":
            rate = self.rates.disk_bytes_per_s
        took_s = self.rates.load_overhead_s + size / rate
        self._load_end = self.loop.after(took_s, lambda: self._loaded(name, took_s))

    def _make_room(self, size: int, forced: bool) -> bool:
        """Evict idle models, the longest unused first; let a busy one drain for a forced load."""
        by_use = sorted(
            (held.used_s, name)
            for name, held in self._models.items()
            if held.state in ("resident", "draining")
        )
        for _, name in by_use:
            if self.free_bytes >= size:
                break
            if not self._models[name].num_running:
                self._evict(name, self._models[name])
        lacking = size - self.free_bytes
        for _, name in by_use:
            held = self._models[name]
            if lacking <= 0 or not forced:
                break
            if held.num_running:
                held.state = "draining"
                lacking -= self.sizes[name] + held.kv_bytes
        return self.free_bytes >= size

    def _evict(self, name: str, held: _Held) -> None:
        held.state, held.loads_from = "warm", "host"
        self._used_bytes -= self.sizes[name]
        self._swaps.append(SwapRecord(name, "evict", "none", self.sizes[name], 0.0))
        self._change()

    def _loaded(self, name: str, took_s: float) -> None:
        self._load_end = None
        held = self._models[name]
        self.counts.loads += 1
        self.counts.load_s += took_s
        if name in self._had:
            self.counts.reloads += 1
            self.counts.reload_s += took_s
        self._had.add(name)
        swap = SwapRecord(name, "load", held.loads_from, self.sizes[name], took_s)
        self._swaps.append(swap)
        held.state, held.used_s, held.loads_from = "resident", self.loop.now_s, "host"
        self._next_load()
        self._change()

    # Statuses.

    def _change(self) -> None:
        """Something is not as it was told: a status soon."""
        if self._status_soon:
            return
        self._status_soon = True
        self._status_at(max(self.loop.now_s, self._sent_s + STATUS_GAP_S))

    def _status_at(self, time_s: float) -> None:
        if self._status_event is not None:
            self._status_event.cancel()
        self._status_event = self.loop.at(time_s, self._say_status)

    def _say_status(self) -> None:
        self._status_event, self._status_soon = None, False
        self._sent_s = self.loop.now_s
        self.counts.statuses += 1
        status = self.status()
        self._swaps, self._taken = [], []
        self._status_at(self.loop.now_s + self.rates.status_interval_s)
        for end in self._ends():
            end.on_status(self.worker_id, status)

    def _ends(self) -> list[WorkerListener]:
        return [end for end in (self._listener, self.observing.listener) if end is not None]

    def status(self) -> WorkerStatus:
        """What a heartbeat says now."""
        rates, free = self.rates, self.free_bytes
        bpt = rates.kv_bytes_per_token
        free_requests = max(0, rates.max_requests - len(self._runs))
        models, leases, pages = [], [], {"free": free}
        for name, held in self._models.items():
            size = self.sizes[name]
            rate = rates.disk_bytes_per_s if held.loads_from == "disk" else rates.host_bytes_per_s
            load_s = rates.load_overhead_s + size / rate
            row = (name, held.state, size, held.kv_bytes, held.num_running, 0, load_s)
            models.append(ModelStatus(*row))
            if held.state != "warm" and name not in self._loads:
                pages[f"{name}/weights"] = size
            if held.state == "resident":
                leases.append(Lease(name, free_requests, max(0, free) // bpt, bpt))
        return WorkerStatus(
            epoch=self._epoch,
            worker_id=self.worker_id,
            free_requests=free_requests,
            free_kv_bytes=max(0, free),
            lease_ttl_s=LEASE_TTLS * rates.status_interval_s,
            page_bytes=1,
            num_pages=rates.arena_bytes,
            pages=pages,
            models=models,
            leases=leases,
            swaps=self._swaps,
            counters={},
            cold_bytes_per_s=rates.disk_bytes_per_s,
            taken=self._taken,
        )
