"""HTTP load for `bench.gateway`, in a process of its own: `python -m bench.gateway_load`.

Reads a `Plan` as JSON from its standard input and writes `Found` to its standard output. Requests
are bytes made beforehand and answers are only searched for their end, so that the client costs
little beside what it measures, and keeps time.

    closed loop   `rate` 0: each of `connections` asks again when it has been answered
    open loop     `rate` requests a second whatever the server does; the time counts from when a
                  request was due, and a free connection is taken or a new one made

A streamed answer ends with its last chunk, not with the connection. The clock of the CPU is read
by whoever starts this process, from the server's.
"""

import asyncio
import collections
import sys
import time
from typing import cast

import msgspec
import uvloop

SPIN_S = 0.0005


class Plan(msgspec.Struct, frozen=True):
    """What is sent. `bodies` and `keys` take turns. `path` "": the server's own default."""

    host: str
    port: int
    bodies: list[str]
    keys: list[str]
    requests: int
    connections: int = 16
    rate: float = 0.0
    path: str = "/v1/chat/completions"


class Found(msgspec.Struct):
    """Seconds from due to the first byte and to the end, by request; answers by status."""

    first_s: list[float]
    done_s: list[float]
    statuses: dict[str, int]
    wall_s: float = 0.0
    client_cpu_s: float = 0.0
    num_events: int = 0


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, load: "Load") -> None:
        self._load = load
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._due_s = self._first_s = 0.0
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready."""
        self._transport = cast(asyncio.Transport, transport)

    def ask(self, request: bytes, due_s: float) -> None:
        """Send; `Load.answered` is called at the end."""
        assert self._transport is not None
        self._due_s, self._first_s, self._busy = due_s, 0.0, True
        self._buffer.clear()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """A part of an answer."""
        if not self._first_s:
            self._first_s = time.perf_counter()
        self._buffer += data
        if _is_whole(self._buffer):
            self._busy = False
            self._load.answered(self, bytes(self._buffer), self._due_s, self._first_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Counted where somebody waited."""
        if self._busy:
            self._busy = False
            self._load.answered(None, b"HTTP/1.1 000", self._due_s, time.perf_counter())
        else:
            self._load.lost(self)

    def close(self) -> None:
        """No more."""
        if self._transport is not None:
            self._transport.close()


def _is_whole(buffer: bytearray) -> bool:
    head = buffer.find(b"\r\n\r\n")
    if head < 0:
        return False
    at = buffer.find(b"ontent-", 0, head)
    while at >= 0:
        line = buffer[at : buffer.find(b"\r\n", at)].lower()
        if line.startswith(b"ontent-length:"):
            return len(buffer) >= head + 4 + int(line.partition(b":")[2])
        at = buffer.find(b"ontent-", at + 1, head)
    return buffer.endswith(b"0\r\n\r\n")


class Load:
    """One plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._requests = [
            _request(plan, body, plan.keys[n % len(plan.keys)])
            for n, body in enumerate(plan.bodies)
        ]
        self._free: collections.deque[Connection] = collections.deque()
        self._num_sent = self._num_done = 0
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asking: set[asyncio.Task[None]] = set()
        self.found = Found([], [], {})

    async def run(self) -> Found:
        """To the last answer."""
        plan = self._plan
        for _ in range(plan.connections):
            self._free.append(await self._connect())
        start_s, cpu_s = time.perf_counter(), time.process_time()
        if plan.rate:
            await self._open_loop(start_s)
        else:
            for connection in [self._free.popleft() for _ in range(plan.connections)]:
                self._ask(connection, time.perf_counter())
        await self._over
        self.found.wall_s = time.perf_counter() - start_s
        self.found.client_cpu_s = time.process_time() - cpu_s
        for connection in self._free:
            connection.close()
        return self.found

    def answered(
        self, connection: Connection | None, answer: bytes, due_s: float, first_s: float
    ) -> None:
        """An answer has ended; None: with its connection."""
        found = self.found
        found.done_s.append(time.perf_counter() - due_s)
        found.first_s.append(first_s - due_s)
        status = answer[9:12].decode()
        found.statuses[status] = found.statuses.get(status, 0) + 1
        found.num_events += answer.count(b"data: ")
        self._num_done += 1
        if self._num_done >= self._plan.requests:
            if not self._over.done():
                self._over.set_result(None)
        elif connection is None:
            if not self._plan.rate:
                self._spawn(time.perf_counter())
            return
        elif not self._plan.rate and self._num_sent < self._plan.requests:
            self._ask(connection, time.perf_counter())
            return
        if connection is not None:
            self._free.append(connection)

    def lost(self, connection: Connection) -> None:
        """A connection that nobody waited on."""
        if connection in self._free:
            self._free.remove(connection)

    async def _open_loop(self, start_s: float) -> None:
        for n in range(self._plan.requests):
            due_s = start_s + n / self._plan.rate
            # The loop's timers are late by a millisecond: the last half is waited for.
            pause_s = due_s - time.perf_counter() - SPIN_S
            if pause_s > 0:
                await asyncio.sleep(pause_s)
            await _spin_until(due_s)
            if self._free:
                self._ask(self._free.popleft(), due_s)
            else:
                self._spawn(due_s)

    def _spawn(self, due_s: float) -> None:
        async def ask() -> None:
            self._ask(await self._connect(), due_s)

        task = asyncio.create_task(ask())
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    def _ask(self, connection: Connection, due_s: float) -> None:
        request = self._requests[self._num_sent % len(self._requests)]
        self._num_sent += 1
        connection.ask(request, due_s)

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        make = loop.create_connection(lambda: Connection(self), self._plan.host, self._plan.port)
        return (await make)[1]


async def _spin_until(due_s: float) -> None:
    while time.perf_counter() < due_s:  # noqa: ASYNC110  nothing tells when it is time
        await asyncio.sleep(0)


def _request(plan: Plan, body: str, key: str) -> bytes:
    """As the openai SDK's, with the headers that it sends."""
    data = body.encode()
    head = (
        f"POST {plan.path} HTTP/1.1\r\nHost: {plan.host}:{plan.port}\r\n"
        "Accept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\nAccept: application/json\r\n"
        "Content-Type: application/json\r\nUser-Agent: OpenAI/Python 3.52.0\r\n"
        "X-Stainless-Lang: python\r\nX-Stainless-Package-Version: 3.52.0\r\n"
        "X-Stainless-OS: Linux\r\nX-Stainless-Arch: x64\r\nX-Stainless-Runtime: CPython\r\n"
        "X-Stainless-Runtime-Version: 3.12.0\r\nx-stainless-retry-count: 0\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def _main(plan: Plan) -> Found:
    return await Load(plan).run()


if __name__ == "__main__":
    wanted = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(_main(wanted))))
