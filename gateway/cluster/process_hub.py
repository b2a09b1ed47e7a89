"""Where a server's processes meet: one answer to /metrics, who is ready, news of workers.

    child -> parent    Here, MetricsReport, Scrape, Weights, RestartWorker
    parent -> child    Collect, Scraped, WorkerEnded

The hub is in the process that started the others (process_group.py); each of them has a `HubLink`.
All are asked every COLLECT_S, so that what one counted is not lost with it, and at each scrape; one
that does not answer within ANSWER_S counts with what it said last. One that says nothing for
`silence_s` hangs: `on_silent` is called. The connection's end tells a child that its parent is
gone, and it stops.

`merge` makes one server's figures of what every process says of itself. Counters, histograms and
gauges are summed by name and labels, for each process has its own part of the whole; MAX names the
gauges that are one thing seen by many. Counters never fall: what a process that is gone had counted
is kept by `Retired`, up to the last time it was asked.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.errors import UNAVAILABLE, ApiError
from gateway.ipc import ipc
from gateway.workers.worker_client import LossCause

MAX = frozenset(
    {
        "polyhost_ready",
        "polyhost_degraded",
        "polyhost_ledger_lag_seconds",
        "polyhost_ledger_refusing",
    }
)
_KEPT = frozenset({"counter", "histogram"})

Key = tuple[str, tuple[tuple[str, str], ...]]


class Family(msgspec.Struct, frozen=True, array_like=True):
    """A metric with its samples: (name, sorted labels, value)."""

    name: str
    text: str
    kind: str
    samples: list[tuple[str, tuple[tuple[str, str], ...], float]]


def families_of(registry: CollectorRegistry) -> list[Family]:
    """What a process tells now. When a series began is left out: of a sum it means nothing."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [
                (sample.name, tuple(sorted(sample.labels.items())), float(sample.value))
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ],
        )
        for metric in registry.collect()
    ]


def merge(parts: Iterable[Sequence[Family]]) -> list[Family]:
    """All of them as one process'."""
    heads: dict[str, Family] = {}
    values: dict[str, dict[Key, float]] = {}
    for families in parts:
        for family in families:
            heads.setdefault(family.name, family)
            found = values.setdefault(family.name, {})
            for name, labels, value in family.samples:
                before = found.get((name, labels))
                if before is None:
                    found[name, labels] = value
                elif family.name in MAX:
                    found[name, labels] = max(before, value)
                else:
                    found[name, labels] = before + value
    return [
        Family(name, head.text, head.kind, [(*key, value) for key, value in values[name].items()])
        for name, head in heads.items()
    ]


class Retired:
    """What processes had counted that are gone."""

    def __init__(self) -> None:
        self.families: list[Family] = []

    def add(self, families: Sequence[Family]) -> None:
        """The last word of one more."""
        kept = [family for family in families if family.kind in _KEPT]
        self.families = merge([self.families, kept])


class MergedMetrics(Collector):
    """Renders like a registry: `generate_latest(MergedMetrics(...))` asks for nothing else."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base: tagged arrays on the wire."""


class Here(_Message, frozen=True):
    """First message: who speaks."""

    name: str


class MetricsReport(_Message, frozen=True):
    """What the process counts, and whether it could serve a request (or grant one) now. Answer to
    Collect, and a heartbeat."""

    call: int
    families: list[Family]
    ready: bool


class Scrape(_Message, frozen=True):
    """Somebody asks for /metrics; answered by Scraped."""

    call: int


class Weights(_Message, frozen=True):
    """Bytes of each ready model's weights, from the process that reads the registry."""

    weights: dict[str, int]


class RestartWorker(_Message, frozen=True):
    """A worker is empty and is to begin anew, or it hangs: from the dispatcher's process."""

    worker_id: str
    hangs: bool


class Collect(_Message, frozen=True):
    """Answer with MetricsReport."""

    call: int


class Scraped(_Message, frozen=True):
    """Prometheus' text, of all processes."""

    call: int
    body: bytes


class WorkerEnded(_Message, frozen=True):
    """A worker process is gone: nobody has to wait for its silence."""

    worker_id: str
    reason: str
    cause: LossCause


ToParent: TypeAlias = Here | MetricsReport | Scrape | Weights | RestartWorker
ToChild: TypeAlias = Collect | Scraped | WorkerEnded

to_parent: "msgspec.msgpack.Decoder[list[ToParent]]" = msgspec.msgpack.Decoder(list[ToParent])
to_child: "msgspec.msgpack.Decoder[list[ToChild]]" = msgspec.msgpack.Decoder(list[ToChild])


logger = logging.getLogger(__name__)

COLLECT_S = 1.0
ANSWER_S = 1.0
SCRAPE_S = 5.0


class _Child:
    def __init__(self, channel: "ipc.Channel[ToParent, ToChild]") -> None:
        self.channel = channel
        self.name = ""
        self.families: list[Family] = []
        self.ready = False
        self.call = 0
        """The last Collect that it has answered."""
        self.heard_s = 0.0
        self.num_silent = 0
        """How often it was asked since anything came."""


class WorkerHomes(Protocol):
    """Who starts the workers' processes: in this process (server/local_homes.py), or beyond the hub
    (`HubLink`)."""

    def set_weights(self, weights: dict[str, int]) -> None:
        """Bytes of each ready model's weights."""

    def restart(self, worker_id: str) -> None:
        """It is empty: end its process, and start it anew."""

    def kill(self, worker_id: str) -> None:
        """Its process hangs: end it hard, and start it anew."""


class ProcessHub:
    """The parent's end. `registry` is the parent's own figures."""

    def __init__(
        self,
        registry: CollectorRegistry,
        silence_s: float,
        homes: WorkerHomes,
        on_silent: Callable[[str], None],
    ) -> None:
        self._registry = registry
        self._silence_s = silence_s
        self._homes = homes
        self._on_silent = on_silent
        self._children: set[_Child] = set()
        self._retired = Retired()
        self._call = 0
        self._answered = asyncio.Event()
        self._scraping: set[asyncio.Task[None]] = set()

    def is_ready(self, name: str) -> bool:
        """Whether this process said so when it was asked last."""
        return any(child.ready for child in self._children if child.name == name)

    def new_channel(self) -> "ipc.Channel[ToParent, ToChild]":
        """For a connection that is being made."""
        channel: ipc.Channel[ToParent, ToChild] = ipc.Channel(to_parent)
        child = _Child(channel)
        self._children.add(child)
        channel.on_message = lambda message: self._receive(child, message)
        channel.on_lost = lambda reason: self._lost(child)
        return channel

    def worker_ended(self, worker_id: str, reason: str, cause: LossCause) -> None:
        """Tell everybody."""
        for child in self._children:
            child.channel.send(WorkerEnded(worker_id, reason, cause))

    async def run(self) -> None:
        """Ask everybody, for ever."""
        while True:
            await asyncio.sleep(COLLECT_S)
            self._ask()
            for child in list(self._children):
                # In rounds, not by the clock: this process may have been the one that hung.
                is_silent = child.heard_s == child.channel.heard_s
                child.num_silent = child.num_silent + 1 if is_silent else 0
                child.heard_s = child.channel.heard_s
                if child.name and child.num_silent * COLLECT_S > self._silence_s:
                    self._on_silent(child.name)

    async def text(self) -> bytes:
        """Prometheus' text, of all processes."""
        call = self._ask()
        deadline_s = asyncio.get_running_loop().time() + ANSWER_S
        while any(child.name and child.call < call for child in self._children):
            left_s = deadline_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                break
            self._answered.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._answered.wait()
            except TimeoutError:
                break
        parts = [child.families for child in self._children]
        own = families_of(self._registry)
        return generate_latest(MergedMetrics(merge([own, self._retired.families, *parts])))

    def _ask(self) -> int:
        self._call += 1
        for child in self._children:
            if child.name:
                child.channel.send(Collect(self._call))
        return self._call

    def _receive(self, child: _Child, message: ToParent) -> None:
        if isinstance(message, Here):
            child.name = message.name
        elif isinstance(message, MetricsReport):
            child.families, child.ready, child.call = message.families, message.ready, message.call
            self._answered.set()
        elif isinstance(message, Weights):
            self._homes.set_weights(message.weights)
        elif isinstance(message, RestartWorker):
            act = self._homes.kill if message.hangs else self._homes.restart
            act(message.worker_id)
        else:
            task = asyncio.create_task(self._scrape(child, message.call))
            self._scraping.add(task)
            task.add_done_callback(self._scraping.discard)

    async def _scrape(self, child: _Child, call: int) -> None:
        child.channel.send(Scraped(call, await self.text()))

    def _lost(self, child: _Child) -> None:
        self._children.discard(child)
        self._retired.add(child.families)
        self._answered.set()


class HubLink:
    """A child's end, and what a child knows of the workers' homes (implements WorkerHomes).
    `on_worker_ended(worker_id, reason, cause)`, `on_orphaned()` are its news."""

    def __init__(
        self,
        name: str,
        registry: CollectorRegistry,
        is_ready: Callable[[], bool],
        on_worker_ended: Callable[[str, str, LossCause], None],
        on_orphaned: Callable[[], None],
    ) -> None:
        self._name = name
        self._registry = registry
        self._is_ready = is_ready
        self._on_worker_ended = on_worker_ended
        self._channel: ipc.Channel[ToChild, ToParent] = ipc.Channel(to_child)
        self._channel.on_message = self._receive
        self._channel.on_lost = lambda reason: on_orphaned()
        self._scrapes: dict[int, asyncio.Future[bytes]] = {}
        self._call = 0

    async def connect(self, path: Path) -> None:
        """Raises OSError where the parent is gone."""
        await ipc.connect(path, self._channel)
        self._channel.send(Here(self._name))

    def close(self) -> None:
        """Say nothing more; the last figures get out."""
        self._report(0)
        self._channel.close()

    def set_weights(self, weights: dict[str, int]) -> None:
        """See WorkerHomes."""
        self._channel.send(Weights(weights))

    def restart(self, worker_id: str) -> None:
        """See WorkerHomes."""
        self._channel.send(RestartWorker(worker_id, hangs=False))

    def kill(self, worker_id: str) -> None:
        """See WorkerHomes."""
        self._channel.send(RestartWorker(worker_id, hangs=True))

    async def scrape(self) -> bytes:
        """Prometheus' text, of all processes. Raises ApiError UNAVAILABLE."""
        self._call += 1
        call = self._call
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._scrapes[call] = answer
        self._channel.send(Scrape(call))
        try:
            async with asyncio.timeout(SCRAPE_S):
                return await answer
        except TimeoutError:
            text = "the process that collects metrics did not answer: try again"
            raise ApiError(UNAVAILABLE, text, retry_after_s=1.0) from None
        finally:
            del self._scrapes[call]

    def _receive(self, message: ToChild) -> None:
        if isinstance(message, Collect):
            self._report(message.call)
        elif isinstance(message, WorkerEnded):
            self._on_worker_ended(message.worker_id, message.reason, message.cause)
        else:
            answer = self._scrapes.get(message.call)
            if answer is not None and not answer.done():
                answer.set_result(message.body)

    def _report(self, call: int) -> None:
        self._channel.send(MetricsReport(call, families_of(self._registry), self._is_ready()))
