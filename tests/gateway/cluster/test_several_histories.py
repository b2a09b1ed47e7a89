"""Random histories of several gateway processes: whatever dies, each request ends, once.

After every step everybody's books agree. Messages are on their way for as long as chance wants. At
the end everything is let run out.
"""

import asyncio
import random

import pytest

from gateway.dispatch.tickets import RequestStream
from gateway.errors import ApiError, WorkerLost
from gateway.settings.settings import Settings
from tests.gateway.cluster.several_kit import Several, tokens_upto

NUM_GATEWAYS = 3
NUM_REQUESTS = 3
STEPS = 250


class History:
    """One run. `streams` are those of gateway processes that live."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        settings = Settings(max_queue_per_tenant=30, max_queue_total=60)
        self.several = Several(NUM_GATEWAYS, NUM_REQUESTS, settings)
        self.streams: dict[str, RequestStream] = {}
        self.num_asked = 0
        self.loaded_s = 0.0
        self.greeted = True

    def step(self) -> None:
        """Anything."""
        choices = [
            (8, self.ask),
            (12, self.some_messages),
            (4, self.several.worker.status),
            (5, self.token),
            (4, self.finish),
            (2, self.abort),
            (0.3, self.kill_dispatcher),
            (0.2, self.kill_gateway),
            (0.2, self.kill_worker),
            (0.2, self.lose_worker),
            (0.4, self.move),
            (0.2, self.cut),
            (1, self.time),
            (2, self.greet),
            (1, self.load),
        ]
        weights = [weight for weight, _ in choices]
        self.random.choices([act for _, act in choices], weights)[0]()
        self.several.check()

    def ask(self) -> None:
        gateway = self.random.choice(self.several.gateways)
        self.num_asked += 1
        request_id = f"r{self.num_asked}"
        try:
            stream = gateway.ask(request_id, self.random.choice("abc"))
        except ApiError:
            return
        self.streams[request_id] = stream

    def some_messages(self) -> None:
        links = [gateway.link for gateway in self.several.gateways]
        for _ in range(self.random.randrange(8)):
            link = self.random.choice(links)
            self.random.choice((link.deliver_in, link.deliver_out))()

    def token(self) -> None:
        if self.several.worker.running:
            self.several.worker.tokens(*self.random.choice(list(self.several.worker.running)))

    def finish(self) -> None:
        if self.several.worker.running:
            self.several.worker.finish(*self.random.choice(list(self.several.worker.running)))

    def abort(self) -> None:
        if self.streams:
            self.random.choice(list(self.streams.values())).abort()

    def load(self) -> None:
        self.loaded_s += 2.0
        self.several.worker.load(2.0)

    def kill_dispatcher(self) -> None:
        """The standby is active a moment later."""
        self.several.kill_dispatcher()
        for _ in range(self.random.randrange(6)):
            self.random.choice((self.ask, self.token, self.finish, self.abort))()
        self.greeted = self.random.random() < 0.5
        self.several.new_dispatcher(greeted=self.greeted)
        for gateway in self.several.gateways:
            gateway.link.connect(self.several.server)

    def kill_gateway(self) -> None:
        index = self.random.randrange(NUM_GATEWAYS)
        old = self.several.gateways[index]
        for request_id in old.streams:
            self.streams.pop(request_id, None)
        self.several.kill_gateway(index)

    def kill_worker(self) -> None:
        names = list(self.several.worker.peers)
        self.random.shuffle(names)
        self.several.worker.die(*names)
        self.some_messages()
        self.several.worker.start()
        self.greeted = True

    def lose_worker(self) -> None:
        """The dispatcher alone does not hear it for a while."""
        if self.greeted:
            several = self.several
            several.dispatcher.on_lost("w", several.worker.epoch, "silent", "silence")
            self.greeted = False

    def move(self) -> None:
        """The worker is to be emptied; it is the only one, and takes them again."""
        self.several.dispatcher.move_off("w")

    def cut(self) -> None:
        self.random.choice(self.several.gateways).link.connect(self.several.server)

    def greet(self) -> None:
        """The worker answers a dispatcher that it did not know."""
        if not self.greeted:
            self.greeted = True
            self.several.worker.greet(self.several.worker.peers["dispatcher"])

    def time(self) -> None:
        self.several.clock.now_s += 0.2
        self.several.dispatcher.tick()
        self.several.server.tick()

    def run_out(self) -> None:
        """Nothing dies any more."""
        self.greet()
        self.several.deliver()
        for _ in range(400):
            for key in list(self.several.worker.running):
                self.several.worker.finish(*key)
            self.several.settle()
            if not any(stream._end is None for stream in self.streams.values()):
                break
            # Models that were held to have crashed workers are served again.
            self.several.clock.now_s += 0.1
            self.several.dispatcher.tick()
            self.several.deliver()


@pytest.mark.parametrize("seed", range(40))
async def test_each_request_ends_once_whatever_dies(seed: int) -> None:
    history = History(seed)
    for _ in range(STEPS):
        history.step()
    history.run_out()
    billed_s = 0.0
    for request_id, stream in history.streams.items():
        try:
            async with asyncio.timeout(1.0):
                tokens: list[int] = []
                async for event in stream:
                    tokens += event.token_ids
                    if event.finish is not None:
                        billed_s += event.finish.usage.load_s
                        assert event.finish.usage.generated_tokens == len(tokens)
        except (ApiError, WorkerLost):
            pass
        except TimeoutError:
            raise AssertionError(f"{request_id} has no end") from None
        assert tokens == tokens_upto(len(tokens)), request_id
    assert billed_s <= history.loaded_s + 1e-9
    several = history.several
    assert len(several.worker.submitted) == len(set(several.worker.submitted))
    assert several.worker.most_running <= NUM_REQUESTS
    several.settle()
    snapshot = several.dispatcher.snapshot()
    assert (snapshot.num_waiting, snapshot.num_running) == (0, 0)
    for worker in several.dispatcher._fleet:
        assert worker.num_running() == 0
        assert worker._kv_bytes_under_way == 0
