"""Servers as child processes: started on a free port, waited for, always stopped; what they use.

Lives here: one process's life and its log, the processes below it, their CPU seconds and memory.
Does not: which server, which arguments (`servers.py`), memory that several share
(`process_memory.py`).

A server runs in a session of its own, so that an interrupt of the benchmark reaches the benchmark,
which then stops the servers it started, by their process ids.
"""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

LOG_TAIL_CHARS = 4000
POLL_S = 0.02
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class ServerFailed(Exception):
    """A server did not start, or ended on its own; the message carries the end of its log."""


class ServerProcess:
    """One server. Use as a context manager: leaving it stops the process."""

    def __init__(
        self, name: str, argv: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._log_path = log_path
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id, for looking at its memory and CPU time."""
        return self._process.pid

    def wait_ready(self, url: str, timeout_s: float) -> float:
        """Poll `url` until it answers 200; returns the seconds since the call.

        Raises ServerFailed if the process ends or the time is up.
        """
        start = time.monotonic()
        while time.monotonic() - start < timeout_s:
            if self.has_ended:
                raise ServerFailed(f"{self.name} ended with {self._process.returncode}\n{self.log}")
            if _answers(url):
                return time.monotonic() - start
            time.sleep(POLL_S)
        raise ServerFailed(f"{self.name} not ready after {timeout_s:.0f} s\n{self.log}")

    @property
    def has_ended(self) -> bool:
        """By itself or killed."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """SIGKILL to the process alone, which has ended then."""
        self._process.kill()
        self._process.wait()

    def stop(self, grace_s: float = 30.0) -> int:
        """SIGTERM, then SIGKILL to what is left of the session it leads; the exit status.

        Safe to call twice."""
        if not self.has_ended:
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    @property
    def log(self) -> str:
        """The end of what the server printed."""
        return self.read_log()[-LOG_TAIL_CHARS:]

    def read_log(self) -> str:
        """Everything the server printed."""
        return self._log_path.read_text(encoding="utf-8", errors="replace")


def free_port() -> int:
    """A TCP port that was free on the loopback address a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def exit_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit, so that `with` blocks stop the servers then, too."""

    def leave(_signal: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)


def below(pid: int, without: Sequence[str] = ()) -> dict[int, str]:
    """The processes that it started, and those that they did, with their command lines.

    Those with one of the words `without` are left out, with all that they started.
    """
    found: dict[int, str] = {}
    with suppress(OSError):
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        for child in [int(word) for task in tasks for word in _read(task / "children").split()]:
            command = _read(Path(f"/proc/{child}/cmdline")).replace(b"\0", b" ").decode()
            if command and not any(word in command for word in without):
                found |= {child: command, **below(child, without)}
    return found


def cpu_s(pids: Iterable[int]) -> tuple[float, float]:
    """User and system seconds of these processes so far."""
    user = system = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        user += int(fields[11])
        system += int(fields[12])
    return user * _TICK_S, system * _TICK_S


def rss_mib(pids: Iterable[int]) -> float:
    """Resident memory now."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def peak_bytes(pid: int) -> int:
    """The most that a process has had in memory; 0 where it has ended.

    (What wait4 tells counts what its parent had, too.)
    """
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    return 0


def _read(path: Path) -> bytes:
    """Nothing of a process that has ended meanwhile."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
