"""A server that is killed: started, found again, killed with all its processes, and its database.

Lives here: processes and signals. Does not: requests (ledger_violence.py), judgement.
"""

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bench.processes import free_port
from gateway.settings import Settings
from tests.postgres import PostgresServer

READY_S = 120.0


class House:
    """The server, its database, and how they are killed and brought back."""

    def __init__(
        self, settings: Settings, postgres: PostgresServer | None, rng: random.Random
    ) -> None:
        self.settings = settings
        self.port = free_port()
        self._postgres = postgres
        self._rng = rng
        self._log = (settings.data_path.parent / "server.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Of the HTTP server."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Without waiting."""
        environment = {
            **os.environ,
            "POLYHOST_DATABASE_URL": self.settings.database_url,
            "POLYHOST_LEDGER_CHECKPOINT_TOKENS": str(self.settings.ledger_checkpoint_tokens),
            "POLYHOST_LEDGER_RECOVERY_WAIT_S": "1.0",
            "POLYHOST_GATEWAY_PROCESSES": str(self.settings.gateway_processes),
        }
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gateway", "serve", "--demo", "--port", str(self.port)),
                *("--data-dir", self.settings.data_dir, "--device-budget", "64MiB"),
            ],
            stdout=self._log,
            stderr=self._log,
            env=environment,
        )

    def is_ready(self) -> bool:
        """Whether a request could be served."""
        with (
            suppress(OSError),
            urllib.request.urlopen(f"{self.url}/health/ready", timeout=2) as got,
        ):
            return bool(got.status == 200)
        return False

    async def wait_ready(self) -> None:
        """Starts it again where it has ended by itself (the database was away at a start)."""
        deadline_s = time.monotonic() + READY_S
        while not await asyncio.to_thread(self.is_ready):
            if time.monotonic() > deadline_s:
                raise RuntimeError(self.log_tail())
            if self._process is None or self._process.poll() is not None:
                self.start()
            await asyncio.sleep(0.1)

    def metric(self, name: str) -> float:
        """One figure of /metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as got:
            for line in got.read().decode().splitlines():
                if line.startswith(name + " "):
                    return float(line.split()[-1])
        raise KeyError(name)

    def log_tail(self) -> str:
        """For whoever looks for the reason."""
        return (self.settings.data_path.parent / "server.log").read_text()[-6000:]

    async def kill(self, kind: str) -> str:
        """Returns what was killed."""
        processes = self._processes()
        workers = [pid for pid, line in processes if b"engine.worker.main" in line]
        children = [pid for pid, line in processes if b"gateway" in line]
        if kind == "database":
            await self._outage()
            return kind
        if kind in ("worker", "both"):
            _kill(workers)
        if kind == "child" and children:
            _kill([self._rng.choice(children)])
        elif kind == "child":
            return "none"
        if kind in ("server", "both") and self._process is not None:
            _kill([self._process.pid, *children])
            await asyncio.to_thread(self._process.wait)
            await asyncio.sleep(self._rng.uniform(0.0, 0.5))
            self.start()
        return kind

    def stop(self) -> None:
        """In order."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(60)
        self._log.close()

    def _processes(self) -> list[tuple[int, bytes]]:
        """All below the server, with their command lines."""
        found: list[tuple[int, bytes]] = []
        todo = [] if self._process is None else [self._process.pid]
        while todo:
            parent = todo.pop()
            with suppress(FileNotFoundError, ProcessLookupError):
                below = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
                for pid in map(int, below):
                    found.append((pid, Path(f"/proc/{pid}/cmdline").read_bytes()))
                    todo.append(pid)
        return found

    async def _outage(self) -> None:
        length_s = self._rng.uniform(0.2, 2.0)
        if self._postgres is not None:
            # In this thread: the server is ended with the thread that started it.
            self._postgres.kill()
            await asyncio.sleep(length_s)
            self._postgres.start()
            return
        path = self.settings.data_path / "polyhost.db"
        blocker = sqlite3.connect(path, isolation_level=None, timeout=20)
        try:
            blocker.execute("BEGIN IMMEDIATE")
            await asyncio.sleep(length_s)
            blocker.execute("ROLLBACK")
        finally:
            blocker.close()


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
