"""A real Polyhost server for tests: the product's own commands, a free port, its own folder."""

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.cli.main import main

START_TIMEOUT_S = 120.0


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def polyhost(data_dir: Path, *arguments: str) -> Done:
    """Run the command line to its end, in this process: one of its own is a second of imports."""
    # Exports write bytes: standard output has to be a stream of text over one.
    raw, err = io.BytesIO(), io.StringIO()
    with (
        io.TextIOWrapper(raw, encoding="utf-8", newline="", write_through=True) as out,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = main([*arguments, "--data-dir", str(data_dir)])
        told = raw.getvalue().decode()
    return Done(status, told, err.getvalue())


def polyhost_process(data_dir: Path, *arguments: str) -> Done:
    """The same in a process of its own, as a user's shell does it."""
    done = subprocess.run(
        [sys.executable, "-m", "gateway", *arguments, "--data-dir", str(data_dir)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def polyhost_json(data_dir: Path, *arguments: str) -> Any:
    """Run a command that must succeed, and read what its --json says."""
    done = polyhost(data_dir, *arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def usage_rows(
    data_dir: Path, command: Callable[..., Done] = polyhost, tenant: str = ""
) -> list[dict[str, Any]]:
    """What was posted, of all tenants or of one."""
    done = command(data_dir, "usage", "export", "--format", "jsonl")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return [row for row in rows if tenant in ("", row["tenant_name"])]


@dataclass(slots=True)
class Server:
    """A running server. `log` is what it printed."""

    data_dir: Path
    port: int
    log: Path
    process: subprocess.Popen[bytes] = field(repr=False)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, key: str = "") -> tuple[int, str]:
        """Status and body of a GET."""
        request = urllib.request.Request(self.url + path)
        if key:
            request.add_header("authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def is_ready(self) -> bool:
        """Whether /health/ready says 200."""
        with contextlib.suppress(OSError):
            return self.get("/health/ready")[0] == 200
        return False

    def wait_ready(self) -> None:
        """Block until a request could be served."""
        self.wait_until(self.is_ready)

    def wait_until(self, condition: Any, timeout_s: float = START_TIMEOUT_S) -> None:
        """Poll a condition; fails with the server's log when the server ends or time is up."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"server ended: {ended}\n{self.log.read_text()[-6000:]}")
            time.sleep(0.05)

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics by name and labels."""
        status, text = self.get("/metrics")
        assert status == 200
        pairs = re.findall(r"^([a-z_]+(?:\{[^\n]*\})?) (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in pairs}

    def has_posted(self) -> bool:
        """Whether every posting is in the database."""
        return self.metrics()["polyhost_ledger_pending"] == 0

    def owned_pages(self) -> float:
        """Pages of the arena that are not free."""
        pages = {k: v for k, v in self.metrics().items() if k.startswith("polyhost_arena_pages")}
        assert sum(pages.values()) > 0
        return sum(value for key, value in pages.items() if "free" not in key)

    def worker_pids(self) -> list[int]:
        """Processes of the engine that this server started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        pids = [int(pid) for pid in children.read_text().split()]
        found = []
        for pid in pids:
            with contextlib.suppress(FileNotFoundError):
                if b"engine.worker.main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def stop(self) -> int:
        """SIGTERM, wait, exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def serving(data_dir: Path, *arguments: str, **environment: str) -> Iterator[Server]:
    """`polyhost serve` until the block ends."""
    port = free_port()
    log = data_dir.parent / f"{data_dir.name}-server.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gateway", "serve"),
                *("--data-dir", str(data_dir), "--port", str(port), *arguments),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
    server = Server(data_dir, port, log, process)
    try:
        server.wait_ready()
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
