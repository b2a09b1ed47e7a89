"""Keeping a worker process alive: restarts, pauses, ends; with small Python programs as workers."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from gateway.server.child_process import ChildProcess, EarlyWorker, start_early
from gateway.workers.worker_client import LossCause

SLEEPS = "import time\ntime.sleep(600)"
IGNORES_TERM = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('deaf', flush=True)\n"
    "time.sleep(600)"
)
LISTENS = (
    "import pathlib, sys, time\n"
    "given = sys.stdin.readline() if sys.argv[-1] == '-' else sys.argv[-1]\n"
    "pathlib.Path(sys.argv[1]).open('a').write(f'{given.strip()!r}\\n')\n"
    "time.sleep(600 if given else 0)"
)
"""Writes down what it is given, and when nothing."""
DRAINS = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    "time.sleep(600)"
)


class Watched:
    """A ChildProcess whose ends are counted."""

    def __init__(
        self,
        program: str,
        backoff_s: float = 0.01,
        arguments: tuple[str, ...] = (),
        early: EarlyWorker | None = None,
        *,
        is_secret: bool = False,
    ) -> None:
        self.ends: list[str] = []
        self.causes: list[LossCause] = []
        self.configs: list[str] = []
        self.process = ChildProcess(
            "w",
            self._config,
            dict(os.environ),
            backoff_s,
            self._ended,
            command=(sys.executable, "-c", program, *arguments),
            early=early.process if early else None,
            is_secret=is_secret,
        )
        self.task = asyncio.create_task(self.process.run())

    def _ended(self, reason: str, cause: LossCause) -> None:
        self.ends.append(reason)
        self.causes.append(cause)

    async def until(self, predicate: Callable[[], bool]) -> None:
        for _ in range(20_000):
            if predicate():
                return
            assert not self.task.done(), self.task
            await asyncio.sleep(0.001)
        raise AssertionError("it did not come to that")

    async def started(self, times: int = 1) -> int:
        """The pid, once that many were started."""
        await self.until(lambda: self.process.num_starts >= times and self.process.pid is not None)
        assert self.process.pid is not None
        return self.process.pid

    def _config(self) -> str:
        self.configs.append(f"config {len(self.configs)}")
        return self.configs[-1]


async def test_a_killed_worker_is_reported_and_started_again() -> None:
    watched = Watched(SLEEPS)
    first = await watched.started()
    os.kill(first, signal.SIGKILL)
    second = await watched.started(times=2)
    assert watched.ends == ["killed by signal 9"]
    assert second != first
    await watched.process.stop(timeout_s=20.0)
    await watched.task
    assert watched.process.pid is None


async def test_a_worker_that_keeps_failing_is_tried_ever_more_slowly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched = Watched("import sys\nsys.exit(2)", backoff_s=0.001)
    await watched.until(lambda: len(watched.ends) >= 4)
    assert set(watched.causes) == {"process"}
    await watched.process.stop(timeout_s=1.0)
    watched.task.cancel()
    assert watched.ends[0] == "exit status 2"
    pauses = [record.args[-1] for record in caplog.records if "restart in" in record.msg]  # type: ignore[index]
    assert pauses[:3] == [0.001, 0.002, 0.004]


async def test_a_restart_takes_a_fresh_configuration_and_no_pause() -> None:
    watched = Watched(DRAINS, backoff_s=600.0)
    await watched.started()
    await asyncio.sleep(0.3)  # its handler must be in place, or SIGTERM ends it all the same
    watched.process.restart()
    await watched.started(times=2)
    assert watched.configs == ["config 0", "config 1"]
    assert watched.causes == ["planned"]
    await watched.process.stop(timeout_s=20.0)
    await watched.task


async def test_a_worker_that_does_not_listen_is_ended_hard() -> None:
    watched = Watched(IGNORES_TERM)
    await watched.started()
    await asyncio.sleep(0.3)
    await watched.process.stop(timeout_s=0.05)
    await watched.task
    assert watched.ends in (["killed by signal 9"], ["killed by signal 15"])


async def test_cancelling_leaves_no_process_behind() -> None:
    watched = Watched(SLEEPS)
    pid = await watched.started()
    watched.task.cancel()
    await asyncio.gather(watched.task, return_exceptions=True)
    for _ in range(20_000):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the worker is still there")


LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
"""They differ in what writing to a process that has ended does."""


def wait_unseen(pid: int) -> None:
    """Blocks until it has ended; the loop is not to notice meanwhile."""
    with contextlib.suppress(ChildProcessError):  # asyncio's own thread was quicker.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


async def early_one(program: str, *arguments: str) -> EarlyWorker:
    return await start_early((sys.executable, "-c", program, *arguments), dict(os.environ))


@LOOPS
def test_one_that_was_started_early_is_the_first(
    new_loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    told = tmp_path / "told"

    async def scene() -> None:
        early = await early_one(LISTENS, str(told))
        watched = Watched(LISTENS, arguments=(str(told),), early=early)
        assert await watched.started() == early.process.pid
        await watched.until(lambda: told.exists() and told.read_text() == "'config 0'\n")
        os.kill(early.process.pid, signal.SIGKILL)
        second = await watched.started(times=2)
        assert second != early.process.pid
        await watched.until(lambda: told.read_text() == "'config 0'\n'config 1'\n")
        await watched.process.stop(timeout_s=20.0)
        await watched.task
        assert watched.ends[0] == "killed by signal 9"

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scene())


@LOOPS
@pytest.mark.parametrize("is_seen", [False, True])
def test_one_that_ended_before_it_was_told_anything_is_started_anew(
    is_seen: bool, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Whether the loop has noticed its end by then, or not."""

    async def scene() -> None:
        early = await early_one("import sys\nsys.exit(7)")
        if is_seen:
            await early.process.wait()
            await asyncio.sleep(0.05)
        else:
            wait_unseen(early.process.pid)
        watched = Watched(SLEEPS, early=early)
        second = await watched.started(times=2)
        assert watched.ends == ["exit status 7"]
        assert second != early.process.pid
        await watched.process.stop(timeout_s=20.0)
        await watched.task

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scene())


async def test_one_that_nobody_takes_ends_with_its_pipe(tmp_path: Path) -> None:
    told = tmp_path / "told"
    early = await early_one(LISTENS, str(told))
    assert early.free_bytes > 0
    assert early.process.stdin is not None
    early.process.stdin.close()
    assert await early.process.wait() == 0
    assert told.read_text() == "''\n"


async def test_a_secret_configuration_is_on_no_command_line(tmp_path: Path) -> None:
    told = tmp_path / "told"
    watched = Watched(LISTENS, arguments=(str(told),), is_secret=True)
    for start in (1, 2):
        pid = await watched.started(times=start)
        await watched.until(lambda n=start: told.exists() and told.read_text().count("\n") == n)  # type: ignore[misc]
        assert Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[3:] == [
            str(told).encode(),
            b"-",
            b"",
        ]
        os.kill(pid, signal.SIGKILL)
    await watched.process.stop(timeout_s=20.0)
    watched.task.cancel()
    assert told.read_text().splitlines()[:2] == ["'config 0'", "'config 1'"]


async def test_what_cannot_be_started_is_an_error() -> None:
    process = ChildProcess(
        "w", str, {}, 0.01, lambda reason, cause: None, command=("/does/not/exist",)
    )
    with pytest.raises(OSError, match="exist"):
        await process.run()
