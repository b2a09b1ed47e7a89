"""A real Polyhost server for tests: the product's own commands, a free port, its own folder."""

import contextlib
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 120.0
DEMO_MODELS = Path(__file__).parents[2] / "gateway" / "demo_models"
NAMES = ("shakespeare", "sherlock", "python")


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def polyhost(data_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(
        [sys.executable, "-m", "gateway", *arguments, "--data-dir", str(data_dir)],
        capture_output=True,
        text=True,
        timeout=300,
    )


def polyhost_json(data_dir: Path, *arguments: str) -> Any:
    """Run a command that must succeed, and read what its --json says."""
    done = polyhost(data_dir, *arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


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

    def worker_pids(self) -> list[int]:
        """Processes of the engine that this server started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        pids = [int(pid) for pid in children.read_text().split()]
        found = []
        for pid in pids:
            with contextlib.suppress(FileNotFoundError):
                if b"engine.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
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
