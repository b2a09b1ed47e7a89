"""Where a server's processes meet: one answer to /metrics, who is ready, news of workers.

Held by the process that started them (process_group.py); each of them has a `HubLink` here. All are
asked every COLLECT_S, so that what one counted is not lost with it, and at each scrape; one that
does not answer within ANSWER_S counts with what it told last. One that says nothing for
`silence_s` hangs: `on_silent` is told.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from gateway.errors import UNAVAILABLE, ApiError
from gateway.metrics.metrics_merge import Family, Merged, Retired, families_of, merge
from gateway.server import ipc
from gateway.server.hub_protocol import (
    Collect,
    Here,
    Scrape,
    Scraped,
    ToChild,
    Told,
    ToParent,
    Weights,
    WorkerEnded,
    to_child,
    to_parent,
)

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


class Hub:
    """The parent's end. `registry` is the parent's own figures."""

    def __init__(
        self,
        registry: CollectorRegistry,
        silence_s: float,
        on_weights: Callable[[dict[str, int]], None],
        on_silent: Callable[[str], None],
    ) -> None:
        self._registry = registry
        self._silence_s = silence_s
        self._on_weights = on_weights
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

    def worker_ended(self, worker_id: str, reason: str) -> None:
        """Tell everybody."""
        for child in self._children:
            child.channel.send(WorkerEnded(worker_id, reason))

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
        return generate_latest(Merged(merge([own, self._retired.families, *parts])))

    def _ask(self) -> int:
        self._call += 1
        for child in self._children:
            if child.name:
                child.channel.send(Collect(self._call))
        return self._call

    def _receive(self, child: _Child, message: ToParent) -> None:
        if isinstance(message, Here):
            child.name = message.name
        elif isinstance(message, Told):
            child.families, child.ready, child.call = message.families, message.ready, message.call
            self._answered.set()
        elif isinstance(message, Weights):
            self._on_weights(message.weights)
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
    """A child's end. `on_worker_ended(worker_id, reason)`, `on_orphaned()` are its news."""

    def __init__(
        self,
        name: str,
        registry: CollectorRegistry,
        is_ready: Callable[[], bool],
        on_worker_ended: Callable[[str, str], None],
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
        self._tell(0)
        self._channel.close()

    def tell_weights(self, weights: dict[str, int]) -> None:
        """Of the models that are ready."""
        self._channel.send(Weights(weights))

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
            text = "the process that asks all others does not answer: try again"
            raise ApiError(UNAVAILABLE, text, retry_after_s=1.0) from None
        finally:
            del self._scrapes[call]

    def _receive(self, message: ToChild) -> None:
        if isinstance(message, Collect):
            self._tell(message.call)
        elif isinstance(message, WorkerEnded):
            self._on_worker_ended(message.worker_id, message.reason)
        else:
            answer = self._scrapes.get(message.call)
            if answer is not None and not answer.done():
                answer.set_result(message.body)

    def _tell(self, call: int) -> None:
        self._channel.send(Told(call, families_of(self._registry), self._is_ready()))
