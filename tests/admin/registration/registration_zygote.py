"""Registrations whose processes can be killed, begun in milliseconds: a process that forks them.

Importing torch takes seconds, so a test that kills a registration many times starts this once, and
each registrar and its registering subprocess are forks of it: the product's code in processes of
their own, only not by exec. Lines in (JSON): data_dir, verb ("begin" or "retry"), name, source.
Lines out: "registrar PID", "subprocess PID", "ended STATE".
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import torch

from admin.context.operator_context import open_context
from admin.operations import models
from admin.registration import register_process, registrar
from engine.registration import main as register
from gateway.settings.settings import Settings


class Forked:
    """What the registrar uses of subprocess.Popen."""

    def __init__(self, pid: int, stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._ended(pid, status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        if timeout is not None:
            # Nothing here waits long: what is left is for the kill that follows.
            signal.sigtimedwait([signal.SIGCHLD], timeout)
            if self.poll() is None:
                raise subprocess.TimeoutExpired("fork", timeout)
        elif self.returncode is None:
            self._ended(*os.waitpid(self.pid, 0))
        return self.returncode

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def _ended(self, pid: int, status: int) -> None:
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)


@contextmanager
def forked(
    command: Sequence[str], settings: Settings, errors: IO[bytes], lock: int | None = None
) -> Iterator[Any]:
    """`register_process.started` by fork."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        os.dup2(errors.fileno(), 2)
        with os.fdopen(write, "w") as out:
            try:
                register.main(list(command[3:]), out)
            finally:
                os._exit(0)
    os.close(write)
    say(f"subprocess {pid}")
    with os.fdopen(read, "rb") as stdout:
        process = Forked(pid, stdout)
        try:
            yield process
            process.wait()
        finally:
            register_process.stop(process)  # type: ignore[arg-type]


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def registrar_process(job: dict[str, str]) -> None:
    settings = Settings(data_dir=job["data_dir"])
    with open_context(settings, "test") as context:
        if job["verb"] == "begin":
            model = models.begin_registration(context, job["name"], job["source"])
        else:
            model = models.retry_registration(context, job["name"])
        (ended,) = registrar.run(context, [model])
    say(f"ended {ended.state}")


def main() -> None:
    torch.set_num_threads(1)
    register_process.started = forked
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    say("ready")
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
            try:
                registrar_process(json.loads(line))
            finally:
                os._exit(0)
        say(f"registrar {pid}")


if __name__ == "__main__":
    main()
