"""A process that is kept alive: started, waited for, restarted, ended by its pid.

A worker, or one of several gateway and dispatcher processes (process_group.py).

A worker imports for seconds before it needs to know anything, so the first one is started before
the server is put together (`start_early`) and gets its configuration when that is known.

    run: start -> wait -> (ended by itself) tell on_exit, pause, start again
                       -> (restart asked for) start again at once

The pause doubles from `backoff_s` to LONGEST_BACKOFF_S and is back at the beginning after the
process has lived for STABLE_S. Knows nothing of the worker protocol; `on_exit` is how the
connection learns at once that its peer is gone.
"""

import asyncio
import contextlib
import logging
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gateway.ipc import machine
from gateway.workers.worker_client import LossCause

logger = logging.getLogger(__name__)

LONGEST_BACKOFF_S = 30.0
STABLE_S = 60.0
WORKER_STOP_TIMEOUT_S = 5.0
"""How long an idle worker may take to end."""
WORKER_COMMAND = (sys.executable, "-m", "engine.worker.main", "--config")
DRAINED = "exit status 0"
"""Somebody has told it to end: that is nobody's fault."""
GIVEN_LATER = "-"
"""In a configuration's place: it will be written to the worker's standard input."""


class EarlyWorker(NamedTuple):
    """A worker's process that waits for its configuration, and what memory was free before it."""

    process: Process
    free_bytes: int


async def start_early(command: Sequence[str], environment: Mapping[str, str]) -> EarlyWorker:
    """Nobody keeps it alive until a `ChildProcess` gets it; where this process is gone it ends
    once its imports are done, for it reads this one's end of a pipe."""
    free_bytes = machine.free_memory_bytes()
    process = await _start([*command, GIVEN_LATER], environment, asyncio.subprocess.PIPE)
    return EarlyWorker(process, free_bytes)


class ChildProcess:
    """One process. `make_config` is asked for its last argument at every start, or for what
    `early`, the first of them, is waiting for."""

    def __init__(
        self,
        name: str,
        make_config: Callable[[], str],
        environment: Mapping[str, str],
        backoff_s: float,
        on_exit: Callable[[str, LossCause], None],
        command: Sequence[str] = WORKER_COMMAND,
        early: Process | None = None,
        *,
        is_secret: bool = False,
    ) -> None:
        """`is_secret`: the configuration is written to the process' standard input at every start,
        for every user of the machine can read a command line."""
        self._name = name
        self._make_config = make_config
        self._environment = dict(environment)
        self._backoff_s = backoff_s
        self._on_exit = on_exit
        self._command = command
        self._early = early
        self._is_secret = is_secret
        self._process: Process | None = None
        self._restart = False
        self._stopping = False
        self.num_starts = 0

    @property
    def name(self) -> str:
        """What it is called."""
        return self._name

    @property
    def pid(self) -> int | None:
        """The running process; None between two."""
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        """Keep it alive until `stop`. Raises OSError if a process cannot be started at all."""
        pause_s = self._backoff_s
        while not self._stopping:
            started_s = time.monotonic()
            reason = await self._run_once()
            is_planned = self._stopping or self._restart or reason == DRAINED
            self._on_exit(reason, "planned" if is_planned else "process")
            if self._stopping:
                return
            if self._restart:
                self._restart = False
                continue
            if time.monotonic() - started_s >= STABLE_S:
                pause_s = self._backoff_s
            logger.error(
                "process ended name=%s: %s; restart in %.1f s", self._name, reason, pause_s
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_BACKOFF_S)

    def kill(self) -> None:
        """End it hard, so that it is started anew: it hangs."""
        if self._process is not None and not self._stopping:
            self._signal(self._process, signal.SIGKILL)

    def hurry(self) -> None:
        """Say to one that is being stopped that nobody waits any more."""
        if self._process is not None:
            self._signal(self._process, signal.SIGTERM)

    def restart(self) -> None:
        """Let it drain, then start it anew with a fresh configuration."""
        if self._process is not None and not self._stopping:
            self._restart = True
            self._signal(self._process, signal.SIGTERM)

    async def stop(self, timeout_s: float) -> None:
        """Let it drain, or end it hard after `timeout_s`; returns when it is gone."""
        self._stopping = True
        process = self._process
        if process is None:
            return
        self._signal(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            logger.warning(
                "process did not stop in time and is killed name=%s pid=%d",
                self._name,
                process.pid,
            )
            self._signal(process, signal.SIGKILL)
            await process.wait()

    async def _run_once(self) -> str:
        """Start it, wait for its end, say how it ended."""
        process, self._early = self._early, None
        is_given_later = process is not None or self._is_secret
        if process is None and self._is_secret:
            command = [*self._command, GIVEN_LATER]
            process = await _start(command, self._environment, asyncio.subprocess.PIPE)
        elif process is None:
            command = [*self._command, self._make_config()]
            process = await _start(command, self._environment, asyncio.subprocess.DEVNULL)
        self._process = process
        self.num_starts += 1
        logger.info("process started name=%s pid=%d", self._name, process.pid)
        try:
            if is_given_later:
                await _configure(process, self._make_config())
            status = await process.wait()
        finally:
            if process.returncode is None:
                self._signal(process, signal.SIGKILL)
            self._process = None
        return f"killed by signal {-status}" if status < 0 else f"exit status {status}"

    def _signal(self, process: Process, number: signal.Signals) -> None:
        if process.returncode is None:
            try:
                process.send_signal(number)
            except ProcessLookupError:
                logger.debug("process has already ended name=%s", self._name)


async def _start(command: Sequence[str], environment: Mapping[str, str], stdin: int) -> Process:
    # Its own session: a terminal's Ctrl-C is for the supervisor, which stops it in order.
    return await asyncio.create_subprocess_exec(
        *command, env=environment, stdin=stdin, start_new_session=True
    )


async def _configure(process: Process, config: str) -> None:
    """One line, and no more to come. A process that has ended meanwhile is seen by who waits."""
    pipe = process.stdin
    assert pipe is not None
    if pipe.is_closing():  # So uvloop has it; on asyncio's own loop a write comes to nothing.
        return
    with contextlib.suppress(ConnectionError):
        pipe.write(f"{config}\n".encode())
        await pipe.drain()
    pipe.close()
