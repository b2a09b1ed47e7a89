"""A server that is killed: started, found again, killed with all its processes, and its database.

Lives here: processes and signals. Does not: requests (violence.py), judgement.
"""

import asyncio
import os
import random
import signal
import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress

from bench.processes import below, free_port
from bench.servers import WORKER_MODULE, Polyhost, Server
from gateway.settings.settings import Settings
from tests.postgres import PostgresServer

READY_S = 120.0


class House:
    """The server, its database, and how they are killed and brought back."""

    def __init__(
        self, settings: Settings, postgres: PostgresServer | None, rng: random.Random
    ) -> None:
        self.settings = settings
        self._postgres = postgres
        self._rng = rng
        given = {
            "database_url": settings.database_url,
            "ledger_checkpoint_tokens": settings.ledger_checkpoint_tokens,
            "ledger_recovery_wait_s": 1.0,
            "gateway_processes": settings.gateway_processes,
        }
        self._polyhost = Polyhost(settings.data_path, given)
        self._port = free_port()
        self.server = self.start()

    def start(self) -> Server:
        """Without waiting; each time at the same address."""
        arguments = ("--demo", "--device-budget", "64MiB")
        self.server = self._polyhost.start(*arguments, port=self._port)
        return self.server

    async def wait_ready(self) -> None:
        """Starts it again where it has ended by itself (the database was away at a start)."""
        deadline_s = time.monotonic() + READY_S
        while not await asyncio.to_thread(self.server.is_ready):
            if time.monotonic() > deadline_s:
                raise RuntimeError(self.server.process.log)
            if self.server.process.has_ended:
                self.start()
            await asyncio.sleep(0.1)

    async def kill(self, kind: str) -> str:
        """Returns what was killed."""
        processes = below(self.server.process.pid)
        workers = [pid for pid, line in processes.items() if WORKER_MODULE in line]
        children = [pid for pid, line in processes.items() if "gateway" in line]
        if kind == "database":
            await self._outage()
            return kind
        if kind in ("worker", "both"):
            _kill(workers)
        if kind == "child" and children:
            _kill([self._rng.choice(children)])
        elif kind == "child":
            return "none"
        if kind in ("server", "both"):
            _kill([self.server.process.pid, *children])
            await asyncio.to_thread(self.server.process.kill)
            await asyncio.sleep(self._rng.uniform(0.0, 0.5))
            self.start()
        return kind

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
