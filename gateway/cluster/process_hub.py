"""Where a server's processes meet: one answer to /metrics, who is ready, news of workers.

    child -> parent    Here, MetricsReport, Scrape, Weights, RestartWorker
    parent -> child    Collect, Scraped, WorkerEnded

The hub is in the process that started the others (process_group.py); each of them has a `HubLink`.
All are asked every COLLECT_S, so that what one counted is not lost with it, and at each scrape; one
that does not answer within ANSWER_S counts with what it said last. One that says nothing for
`silence_s` hangs: `on_silent` is called. The connection's end tells a child that its parent is
gone, and it stops.

Figures are copied on the event loop, and made into messages and text in a thread of their own
(gateway/metrics/families.py has how those of several processes become one server's). Counters never
fall: what a process that is gone had counted is kept, up to the last time it was asked.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec

from gateway.errors import UNAVAILABLE, ApiError
from gateway.ipc import ipc
from gateway.metrics.families import Family, MetricsRegistry, MetricsText, Retired, merge
from gateway.workers.worker_client import LossCause


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base: tagged arrays on the wire."""


class Here(_Message, frozen=True):
    """First message: who speaks."""

    name: str


class MetricsReport(_Message, frozen=True):
    """What the process counts, and whether it could serve a request (or grant one) now. Answer to
    Collect, and a heartbeat."""

    call: int
    figures: bytes
    """list[Family], encoded: most are never looked at."""
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

_families: "msgspec.msgpack.Decoder[list[Family]]" = msgspec.msgpack.Decoder(list[Family])
_NOTHING = msgspec.msgpack.encode([])
COLLECT_S = 1.0
ANSWER_S = 1.0
SCRAPE_S = 5.0


class _Child:
    def __init__(self, channel: "ipc.Channel[ToParent, ToChild]") -> None:
        self.channel = channel
        self.name = ""
        self.figures = _NOTHING
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
    """The parent's end. `registry` is the parent's own figures. `silent_s`: see MetricsText."""

    def __init__(
        self,
        registry: MetricsRegistry,
        silent_s: float,
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
        self._lost_figures: list[bytes] = []
        """Of processes that are gone, until the next scrape."""
        self._making: asyncio.Future[bytes] | None = None
        self._format = MetricsText(silent_s)
        self._thread = ThreadPoolExecutor(1, "metrics")
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
        """Prometheus' text, of all processes. Who asks while it is made gets the same."""
        if self._making is None or self._making.done():
            self._making = asyncio.ensure_future(self._text())
        return await asyncio.shield(self._making)

    async def _text(self) -> bytes:
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
        build, lost = self._registry.take(), self._lost_figures
        figures = [child.figures for child in self._children]
        self._lost_figures = []
        loop = asyncio.get_running_loop()
        now_s = loop.time()

        def text() -> bytes:
            for part in lost:
                self._retired.add(_families.decode(part))
            parts = [_families.decode(part) for part in figures]
            return self._format.text(merge([build(), self._retired.families, *parts]), now_s)

        return await loop.run_in_executor(self._thread, text)

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
            child.figures, child.ready, child.call = message.figures, message.ready, message.call
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
        self._lost_figures.append(child.figures)
        self._answered.set()


class HubLink:
    """A child's end, and what a child knows of the workers' homes (implements WorkerHomes).
    `on_worker_ended(worker_id, reason, cause)`, `on_orphaned()` are its news."""

    def __init__(
        self,
        name: str,
        registry: MetricsRegistry,
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
        # Of its own: behind other work of threads it would be taken for a process that hangs.
        self._thread = ThreadPoolExecutor(1, "metrics")
        self._report_task: asyncio.Task[None] | None = None
        self._newest = 0

    async def connect(self, path: Path) -> None:
        """Raises OSError where the parent is gone."""
        await ipc.connect(path, self._channel)
        self._channel.send(Here(self._name))

    def close(self) -> None:
        """Say nothing more; the last figures get out."""
        if self._report_task is not None:
            self._report_task.cancel()
        self._send(0, _encoded(self._registry.take()))
        self._channel.close()
        self._thread.shutdown(wait=False)

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
            self._newest = message.call
            if self._report_task is None or self._report_task.done():
                self._report_task = asyncio.create_task(self._report())
        elif isinstance(message, WorkerEnded):
            self._on_worker_ended(message.worker_id, message.reason, message.cause)
        else:
            answer = self._scrapes.get(message.call)
            if answer is not None and not answer.done():
                answer.set_result(message.body)

    async def _report(self) -> None:
        """Until the newest call is answered; those before it are by that."""
        loop, answered = asyncio.get_running_loop(), 0
        while answered < self._newest:
            answered, build = self._newest, self._registry.take()
            self._send(answered, await loop.run_in_executor(self._thread, _encoded, build))

    def _send(self, call: int, figures: bytes) -> None:
        self._channel.send(MetricsReport(call, figures, self._is_ready()))


def _encoded(build: Callable[[], list[Family]]) -> bytes:
    return msgspec.msgpack.encode(build())
