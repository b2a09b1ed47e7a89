"""A worker loop on a real ipc socket, ticked by the test, and gateways that talk to it."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import zmq

from engine.config import EngineConfig, WorkerConfig
from engine.protocol import (
    PROTOCOL_VERSION,
    Finish,
    FromWorker,
    Hello,
    SamplingParams,
    StepOutput,
    Submit,
    ToWorker,
    WorkerStatus,
    decode_from_worker,
    encode,
)
from engine.worker.worker_link import WorkerLink
from engine.worker.worker_loop import Worker
from tests.engine.scripted_engine import ScriptedEngine

Message = TypeVar("Message", bound=FromWorker)
EPOCH = "epoch-1"
PATIENCE_S = 10.0


def worker_config(directory: str, **changes: Any) -> WorkerConfig:
    """A small worker on a socket in `directory`."""
    settings: dict[str, Any] = {
        "worker_id": "w0",
        "endpoint": f"ipc://{directory}/worker.sock",
        "engine": EngineConfig(arena_bytes=1 << 20, shm_prefix="test"),
        "status_interval_s": 0.02,
        "shutdown_timeout_s": 0.05,
    }
    return WorkerConfig(**{**settings, **changes})


def submit(request_id: str, max_tokens: int = 3, attempt: int = 1, model: str = "m") -> Submit:
    """A request for two prompt tokens and `max_tokens` more."""
    return Submit(request_id, attempt, "t", model, [7, 8], max_tokens, SamplingParams(), [])


@dataclass
class Gateway:
    """A DEALER with everything it has received."""

    socket: zmq.Socket[bytes]
    gateway_id: str
    received: list[FromWorker] = field(default_factory=list)

    def send(self, message: ToWorker) -> None:
        self.socket.send(encode(message))

    def hello(self, *, observes: bool = False, epoch: int = 0) -> None:
        self.send(Hello(PROTOCOL_VERSION, self.gateway_id, observes, epoch))

    def pump(self) -> None:
        """Take in what has arrived."""
        while self.socket.poll(0):
            self.received.append(decode_from_worker(self.socket.recv()))

    def all(self, kind: type[Message]) -> list[Message]:
        """Received messages of one kind, oldest first."""
        return [message for message in self.received if isinstance(message, kind)]

    def tokens(self, request_id: str) -> list[int]:
        """Tokens of one request, over all its deltas."""
        outputs = self.all(StepOutput)
        return [
            t for o in outputs for d in o.deltas if d.request_id == request_id for t in d.token_ids
        ]

    def finishes(self, request_id: str) -> list[Finish]:
        """Finishes of one request: one, and one more each time it was told again."""
        outputs = self.all(StepOutput)
        return [
            d.finish for o in outputs for d in o.deltas if d.request_id == request_id and d.finish
        ]

    @property
    def status(self) -> WorkerStatus:
        """The last status."""
        return self.all(WorkerStatus)[-1]

    def close(self) -> None:
        self.socket.close(linger=0)


@dataclass
class Rig:
    """The loop under test."""

    worker: Worker
    engine: ScriptedEngine
    context: zmq.Context[zmq.Socket[bytes]]
    config: WorkerConfig
    gateways: list[Gateway] = field(default_factory=list)

    def connect(self, gateway_id: str, hello: bool = True, **options: int) -> Gateway:
        """A gateway; with `hello` it has been welcomed. `options`: zmq socket options by name."""
        socket = self.context.socket(zmq.DEALER)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.connect(self.config.endpoint)
        gateway = Gateway(socket, gateway_id)
        self.gateways.append(gateway)
        if hello:
            gateway.hello()
            self.until(lambda: bool(gateway.all(WorkerStatus)))
        return gateway

    def until(self, condition: Callable[[], bool]) -> None:
        """Tick and pump until `condition` holds."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for gateway in self.gateways:
                if not gateway.socket.closed:
                    gateway.pump()
            if condition():
                return
            assert time.monotonic() < deadline, "the condition never held"
            self.worker.tick()


@contextmanager
def rig(engine: ScriptedEngine | None = None, **changes: Any) -> Iterator[Rig]:
    """A worker with model `m` resident. `changes`: fields of WorkerConfig."""
    engine = engine or ScriptedEngine(states={"m": "resident"})
    # Not pytest's tmp_path: a socket's path holds about 100 characters.
    with tempfile.TemporaryDirectory(prefix="ph-") as directory:
        config = worker_config(directory, **changes)
        context = zmq.Context()
        link = WorkerLink(context, config)
        worker = Worker(config, engine, link, epoch=EPOCH, device="scripted")
        made = Rig(worker, engine, context, config)
        try:
            yield made
        finally:
            for gateway in made.gateways:
                gateway.close()
            worker.close()
            context.destroy(linger=0)
