"""The worker client over a real ZeroMQ socket, with a peer that says what the test wants."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, TypeAlias, get_args

import pytest
import uvloop
import zmq

from engine.protocol import (
    PROTOCOL_VERSION,
    Abort,
    FromWorker,
    Hello,
    Refused,
    StepOutput,
    TokenDelta,
    ToWorker,
    Welcome,
    WorkerStatus,
    decode_to_worker,
    encode,
)
from gateway.errors import IllegalTransition
from gateway.workers.curve_keys import WorkerAddress
from gateway.workers.worker_client import (
    REFUSED_AGAIN_S,
    START_S,
    TRANSITIONS,
    ClientEvent,
    ClientState,
    LossCause,
    WorkerConnection,
    WorkerUnavailable,
    ZmqWorkerClient,
)

STATUS = WorkerStatus("e1", "w", 0, 0, 2.0, 1, 1, {}, [], [], [], {})


class Recorder:
    """A listener that remembers, and wakes whoever waits."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.deltas: list[TokenDelta] = []
        self._changed = asyncio.Event()

    def on_connected(self, worker_id: str, epoch: str) -> None:
        self._add(f"connected {epoch}")

    def on_status(self, worker_id: str, status: WorkerStatus) -> None:
        self._add(f"status {status.epoch}")

    def on_deltas(self, worker_id: str, epoch: str, deltas: Sequence[TokenDelta]) -> None:
        self.deltas.extend(deltas)
        self._add(f"deltas {epoch}")

    def on_refused(self, worker_id: str, refused: Refused) -> None:
        self._add(f"refused {refused.request_id}")

    def on_lost(self, worker_id: str, epoch: str, reason: str, cause: LossCause) -> None:
        self._add(f"lost {epoch}: {reason} ({cause})")

    async def until(self, predicate: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not predicate():
                self._changed.clear()
                await self._changed.wait()

    async def saw(self, word: str, times: int = 1) -> None:
        await self.until(lambda: sum(e.startswith(word) for e in self.events) >= times)

    def _add(self, text: str) -> None:
        self.events.append(text)
        self._changed.set()


class Peer:
    """A worker's socket. `welcomes`: answers Hello by itself."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._context = context
        self._endpoint = endpoint
        self.epoch = "e1"
        self.version = PROTOCOL_VERSION
        self.welcomes = True
        self.identity = b""
        self.received: list[ToWorker] = []
        self.socket = self._bind()

    def restart(self, epoch: str) -> None:
        """Another process takes the address."""
        self.socket.close(linger=0)
        self.epoch = epoch
        self.socket = self._bind()

    def send(self, message: FromWorker) -> None:
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        self.socket.send_multipart([self.identity, frame])

    async def serve(self) -> None:
        """Take in messages for ever; a poll every millisecond is good enough for a test."""
        while True:
            while not self.socket.closed and self.socket.poll(0):
                self.identity, frame = self.socket.recv_multipart()
                message = decode_to_worker(frame)
                self.received.append(message)
                if isinstance(message, Hello) and self.welcomes:
                    self.send(Welcome(self.version, "w", self.epoch, "cpu"))
            await asyncio.sleep(0.001)

    def _bind(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.bind(self._endpoint)
        return socket


class Pair(NamedTuple):
    """A client and its peer, both running."""

    peer: Peer
    client: ZmqWorkerClient
    heard: Recorder


@asynccontextmanager
async def pair(
    context: zmq.Context[zmq.Socket[bytes]],
    folder: Path,
    heartbeat_timeout_s: float = 60.0,
    version: int = PROTOCOL_VERSION,
) -> AsyncIterator[Pair]:
    endpoint = f"ipc://{folder / 'w.sock'}"
    client = ZmqWorkerClient(context, WorkerAddress("w", endpoint), "g", heartbeat_timeout_s)
    both = Pair(Peer(context, endpoint), client, Recorder())
    both.peer.version = version
    serving = asyncio.create_task(both.peer.serve())
    both.client.start(both.heard)
    try:
        yield both
    finally:
        both.client.close()
        serving.cancel()
        both.peer.socket.close(linger=0)


Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]
Scene: TypeAlias = Callable[[Context, Path], Coroutine[None, None, None]]


def on_both_loops(scene: Scene) -> Callable[..., None]:
    """The scene as a test, once on asyncio's own loop and once on uvloop."""

    @pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
    def test(
        make_loop: Callable[[], asyncio.AbstractEventLoop], context: Context, tmp_path: Path
    ) -> None:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(scene(context, tmp_path))

    test.__name__ = scene.__name__
    return test


def test_a_status_has_the_name_that_the_worker_has_here() -> None:
    """The first worker of every machine calls itself worker-0."""
    named: list[tuple[str, str]] = []

    class Names(Recorder):
        def on_status(self, worker_id: str, status: WorkerStatus) -> None:
            named.append((worker_id, status.worker_id))

    connection = WorkerConnection("worker-7", "g", 10.0, NoWire(), lambda: 0.0)
    connection.start(Names())
    connection.receive(Welcome(PROTOCOL_VERSION, "w", "e1", "cpu"))
    connection.receive(STATUS)
    assert named == [("worker-7", "worker-7")]


def test_a_refused_worker_is_asked_again() -> None:
    """On another machine nobody says when a process of another release has taken its place."""
    now = [0.0]
    connection = WorkerConnection("w", "g", 10.0, NoWire(), lambda: now[0])
    heard = Recorder()
    connection.start(heard)
    connection.receive(Welcome(PROTOCOL_VERSION + 1, "w", "e1", "cpu"))
    now[0] = REFUSED_AGAIN_S - 1.0
    connection.check()
    assert connection.state == "refused"
    now[0] = REFUSED_AGAIN_S + 1.0
    connection.check()
    connection.receive(Welcome(PROTOCOL_VERSION, "w", "e2", "cpu"))
    assert heard.events == ["connected e2"]


class NoWire:
    """A wire that takes everything and brings nothing."""

    def open(self) -> None:
        pass

    def send(self, message: ToWorker) -> bool:
        return True

    def drop(self) -> None:
        pass


@pytest.mark.parametrize("state", get_args(ClientState))
@pytest.mark.parametrize("event", get_args(ClientEvent))
def test_a_state_changes_by_the_table_or_not_at_all(state: ClientState, event: ClientEvent) -> None:
    connection = WorkerConnection("w", "g", 1.0, NoWire(), lambda: 0.0)
    connection.state = state
    if event in TRANSITIONS[state]:
        assert connection._on(event) == (state == "connected")
        assert connection.state == TRANSITIONS[state][event]
        return
    with pytest.raises(IllegalTransition, match=f"worker w: '{event}' while {state}"):
        connection._on(event)
    assert connection.state == state


def test_a_worker_hangs_that_stays_silent_and_has_not_ended() -> None:
    """After one time-out it is lost, after a second one it is called hung, once in each."""
    now = [0.0]
    connection = WorkerConnection("w", "g", 10.0, NoWire(), lambda: now[0])
    heard = Recorder()
    connection.start(heard)

    def wait(seconds: float) -> bool:
        now[0] += seconds
        connection.check()
        return connection.hangs()

    connection.receive(Welcome(PROTOCOL_VERSION, "w", "e1", "cpu"))
    assert not wait(9.0)
    assert not wait(2.0)
    assert heard.events[-1] == "lost e1: silent for 11.0 s (silence)"
    assert not wait(9.0)
    assert wait(2.0)
    assert not wait(9.0)
    assert wait(2.0)
    connection.lose("its process ended", "process")
    assert not wait(START_S - 1.0)  # its successor may take its time
    assert wait(2.0)  # but not for ever
    connection.receive(Welcome(PROTOCOL_VERSION, "w", "e2", "cpu"))
    assert not wait(11.0)  # lost again
    connection.receive(Welcome(PROTOCOL_VERSION, "w", "e2", "cpu"))
    assert not wait(9.0)  # it came back by itself
    assert not wait(9.0)


@on_both_loops
async def test_hello_welcome_and_messages_both_ways(context: Context, tmp_path: Path) -> None:
    async with pair(context, tmp_path) as it:
        await it.heard.saw("connected e1")
        assert isinstance(it.peer.received[0], Hello)
        it.client.send(Abort("a", 1))
        it.peer.send(STATUS)
        it.peer.send(StepOutput("e1", [TokenDelta("a", 1, [5])]))
        it.peer.send(Refused("e1", "b", 1, "overloaded", "full", True))
        await it.heard.saw("refused b")
        assert it.heard.events == ["connected e1", "status e1", "deltas e1", "refused b"]
        await eventually(lambda: it.peer.received[-1] == Abort("a", 1))


@on_both_loops
async def test_a_flood_arrives_whole_and_in_order(context: Context, tmp_path: Path) -> None:
    """More than one drain's worth, while the client itself keeps sending: no edge is missed."""
    async with pair(context, tmp_path) as it:
        await it.heard.saw("connected")
        for i in range(3000):
            it.peer.send(StepOutput("e1", [TokenDelta("a", 1, [i])]))
            if i % 100 == 0:
                it.client.send(Abort(f"r{i}", 1))
        await it.heard.until(lambda: len(it.heard.deltas) == 3000)
        assert [delta.token_ids[0] for delta in it.heard.deltas] == list(range(3000))


@on_both_loops
async def test_nothing_can_be_sent_before_the_welcome(context: Context, tmp_path: Path) -> None:
    async with pair(context, tmp_path) as it:
        with pytest.raises(WorkerUnavailable, match="connecting"):
            it.client.send(Abort("a", 1))
        await it.heard.saw("connected")
        it.client.close()
        with pytest.raises(WorkerUnavailable, match="closed"):
            it.client.send(Abort("a", 1))


@on_both_loops
async def test_silence_is_a_loss_and_a_new_connection_follows(
    context: Context, tmp_path: Path
) -> None:
    async with pair(context, tmp_path, heartbeat_timeout_s=0.2) as it:
        await it.heard.saw("connected")
        await it.heard.saw("lost e1: silent")
        await it.heard.saw("connected", times=2)
        first, second = (m for m in it.peer.received[:2])
        assert isinstance(first, Hello)
        assert isinstance(second, Hello)


@on_both_loops
async def test_a_process_known_dead_is_left_at_once(context: Context, tmp_path: Path) -> None:
    async with pair(context, tmp_path) as it:
        await it.heard.saw("connected e1")
        it.peer.restart("e2")
        it.client.lose("killed by signal 9", "process")
        assert it.heard.events[-1] == "lost e1: killed by signal 9 (process)"
        await it.heard.saw("connected e2")


@on_both_loops
async def test_another_process_behind_the_same_address_is_noticed(
    context: Context, tmp_path: Path
) -> None:
    async with pair(context, tmp_path) as it:
        await it.heard.saw("connected e1")
        it.peer.send(StepOutput("e2", [TokenDelta("a", 1, [1])]))
        it.peer.epoch = "e2"
        await it.heard.saw("lost e1: another process")
        await it.heard.saw("connected e2")
        assert it.heard.deltas == []


@on_both_loops
async def test_a_worker_that_is_not_there_yet_is_waited_for(
    context: Context, tmp_path: Path
) -> None:
    async with pair(context, tmp_path) as it:
        it.peer.welcomes = False
        await asyncio.sleep(0)
        it.peer.welcomes = True
        it.peer.restart("e9")
        await it.heard.saw("connected e9")


@on_both_loops
async def test_another_protocol_version_ends_it(context: Context, tmp_path: Path) -> None:
    async with pair(context, tmp_path, version=PROTOCOL_VERSION + 1) as it:
        await eventually(lambda: it.client.state == "refused")
        assert it.heard.events == []
        with pytest.raises(WorkerUnavailable, match="refused"):
            it.client.send(Abort("a", 1))
        it.peer.version = PROTOCOL_VERSION
        it.client.lose("its process ended", "process")  # the next one may be of our build
        await it.heard.saw("connected")


@on_both_loops
async def test_what_is_no_message_ends_it(context: Context, tmp_path: Path) -> None:
    async with pair(context, tmp_path) as it:
        await it.heard.saw("connected")
        it.peer.send_frame(b"\xff\x00nonsense")
        await it.heard.saw("lost e1: it sends what is no message")
        assert it.client.state == "refused"


@on_both_loops
async def test_a_worker_that_does_not_read_is_lost(context: Context, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.workers.zmq_wire.SEND_HIGH_WATER", 1)
        async with pair(context, tmp_path) as it:
            await it.heard.saw("connected")
            it.peer.socket.close(linger=0)
            with pytest.raises(WorkerUnavailable, match="does not read"):
                send_without_end(it.client)
            await it.heard.saw("lost e1: it does not read")
            it.peer.restart("e2")
            await it.heard.saw("connected e2")


async def eventually(predicate: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if predicate():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come to that")


def send_without_end(client: ZmqWorkerClient) -> None:
    for _ in range(10_000):
        client.send(Abort("a" * 1000, 1))
