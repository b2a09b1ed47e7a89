"""The servers a benchmark measures: Polyhost and its peer, on loopback, from one model folder.

Lives here: how each is started, given a model and told apart (arguments, environment, readiness).
Does not: processes as such (`processes.py`), load, results.

    polyhost       python -m gateway serve, models registered through its own CLI, one tenant and
                   key made for the benchmark; the response cache is off, as it is by default
    transformers   transformers serve --continuous-batching, by the Python of its own environment
    vllm           vLLM's server (its build for a CPU), by the Python of its own environment
"""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bench.client import Target
from bench.processes import ServerFailed, ServerProcess, below, free_port
from bench.prompts import PromptMaker
from gateway.settings.http_settings import OPEN

OURS = "polyhost"
PEER = "transformers"
VLLM = "vllm"
TENANT = "bench"
WORKER_MODULE = "engine.worker.main"
REGISTER_TIMEOUT_S = 1800.0
START_TIMEOUT_S = 300.0
PEER_PACKAGES = ("transformers", "torch", "accelerate", "fastapi", "uvicorn")
_SERIES = re.compile(r"^polyhost_(\w+(?:\{[^\n]*\})?) (\S+)$", re.MULTILINE)


@dataclass(slots=True)
class Server:
    """A running server and what is needed to talk to it."""

    process: ServerProcess
    port: int
    api_key: str = ""
    data_dir: Path = Path()
    ready_s: float = 0.0

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def target(self, name: str, model: str, prompts: PromptMaker | None = None) -> Target:
        """Where to send load for `model`."""
        count = None if prompts is None else prompts.count
        return Target(name, self.url, model, self.api_key, count)

    def wait_ready(self, path: str = "/health/ready") -> Self:
        """Until `path` says 200. Raises ServerFailed, and stops it, where it never does."""
        try:
            self.ready_s = self.process.wait_ready(self.url + path, START_TIMEOUT_S)
        except BaseException:
            self.process.stop()
            raise
        return self

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
        """Whether a request could be served now."""
        with suppress(OSError):
            return self.get("/health/ready")[0] == 200
        return False

    def metrics(self) -> dict[str, float]:
        """Every series of our /metrics, by name and labels without the prefix."""
        return metrics(self.url)

    def has_posted(self) -> bool:
        """Whether every posting is in the database."""
        return self.metrics()["ledger_pending"] == 0

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
        """Poll a condition. Raises ServerFailed when the server ends or time is up."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if self.process.has_ended or time.monotonic() > deadline_s:
                ended = self.process.has_ended
                raise ServerFailed(f"it never came, server ended: {ended}\n{self.process.log}")
            time.sleep(0.05)

    def worker_pids(self) -> list[int]:
        """Processes of the engine that this server started."""
        return [p for p, command in below(self.process.pid).items() if WORKER_MODULE in command]

    def stop(self) -> int:
        """SIGTERM, wait, exit status."""
        return self.process.stop(60)


class Polyhost:
    """One data folder of Polyhost: its CLI, and its server."""

    def __init__(self, data_dir: Path, settings: Mapping[str, object] | None = None) -> None:
        """`settings` are fields of `gateway.settings.settings.Settings`, handed over in the
        environment; /metrics is open where they do not say otherwise."""
        self._data_dir = data_dir
        given = {"metrics_token": OPEN, **(settings or {})}
        self._env = {f"POLYHOST_{name.upper()}": str(value) for name, value in given.items()}

    def add_model(self, name: str, folder: Path, dtype: str = "auto") -> None:
        """Register `folder` and wait until it is ready. Raises ServerFailed where it is refused."""
        self._cli("models", "add", name, "--source", str(folder), "--dtype", dtype)

    def new_key(self, tenant: str = TENANT) -> str:
        """A key of a tenant of its own, without limits."""
        self._cli("tenants", "add", tenant)
        return self._cli("keys", "create", "--tenant", tenant, "--name", tenant).strip()

    def pin(self, name: str, pinned: bool) -> None:
        """Keep a model resident, or let it go again."""
        self._cli("models", "pin" if pinned else "unpin", name)

    def usage(self) -> list[dict[str, Any]]:
        """Every posting, as `usage export` gives it."""
        lines = self._cli("usage", "export", "--format", "jsonl").splitlines()
        return [json.loads(line) for line in lines]

    def start(
        self,
        *arguments: str,
        api_key: str = "",
        module: Sequence[str] = ("gateway",),
        port: int = 0,
    ) -> Server:
        """Start it, by default on a free port, and do not wait.

        `module` runs in the product's place, its own arguments behind it.
        """
        port = port or free_port()
        argv = [
            *(sys.executable, "-m", *module, "serve"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--data-dir", str(self._data_dir)),
            *arguments,
        ]
        self._data_dir.mkdir(parents=True, exist_ok=True)
        process = ServerProcess(OURS, argv, self._data_dir / "server.log", self._env)
        return Server(process, port, api_key, self._data_dir)

    def serve(
        self, api_key: str = "", *arguments: str, module: Sequence[str] = ("gateway",)
    ) -> Server:
        """Start it on a free port and wait until it can answer requests."""
        return self.start(*arguments, api_key=api_key, module=module).wait_ready()

    def run(self, *arguments: str) -> str:
        """Any other command of its CLI; what it prints."""
        return self._cli(*arguments)

    def _cli(self, *arguments: str) -> str:
        return _output(
            [sys.executable, "-m", "gateway", *arguments, "--data-dir", str(self._data_dir)],
            self._env,
        )


def start_transformers(
    python: Path, folder: Path, work_dir: Path, arguments: Sequence[str] = (), num_threads: int = 0
) -> Server:
    """`transformers serve --continuous-batching` with the model preloaded.

    `num_threads` 0 leaves torch its default, a thread a core.
    """
    port = free_port()
    argv = [
        *(str(python), "-m", "transformers.cli.transformers", "serve", str(folder)),
        *("--continuous-batching", "--host", "127.0.0.1", "--port", str(port)),
        *arguments,
    ]
    env = {"HF_HUB_OFFLINE": "1"}
    if num_threads:
        env["OMP_NUM_THREADS"] = str(num_threads)
    process = ServerProcess(PEER, argv, work_dir / "bench-transformers.log", env)
    return Server(process, port).wait_ready("/health")


def start_vllm(
    python: Path,
    folder: Path,
    work_dir: Path,
    arguments: Sequence[str] = (),
    num_threads: int = 0,
) -> Server:
    """vLLM's OpenAI server on the CPU; what it compiles is kept under `work_dir`.

    Left to itself it keeps a core back from the threads of its operators. Its own advice is to
    preload Intel's OpenMP, which its packages bring.
    """
    port = free_port()
    argv = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
        *arguments,
    ]
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(work_dir / "vllm-cache"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(num_threads or len(os.sched_getaffinity(0))),
    }
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if openmp.exists():
        env["LD_PRELOAD"] = str(openmp)
    process = ServerProcess(VLLM, argv, work_dir / "bench-vllm.log", env)
    return Server(process, port).wait_ready("/health")


def peer_versions(python: Path, packages: Sequence[str] = PEER_PACKAGES) -> dict[str, str]:
    """Versions in the peer's environment. Raises ServerFailed where it is not installed."""
    code = "import importlib.metadata as m, json;"
    code += f"print(json.dumps({{p: m.version(p) for p in {tuple(packages)!r}}}))"
    versions: dict[str, str] = json.loads(_output([str(python), "-c", code], {}))
    return versions


def metrics(base_url: str) -> dict[str, float]:
    """Every series of our /metrics, by name and labels without the prefix."""
    with urllib.request.urlopen(f"{base_url}/metrics", timeout=30) as response:
        return parse_metrics(response.read().decode())


def parse_metrics(text: str) -> dict[str, float]:
    """Every series of Prometheus' text format, by name and labels without our prefix."""
    return {name: float(value) for name, value in _SERIES.findall(text)}


def total(series: Mapping[str, float], name: str, label: str = "") -> float:
    """A metric over all its labels, or over those with this one."""
    return sum(
        value for key, value in series.items() if key.partition("{")[0] == name and label in key
    )


def _output(argv: Sequence[str], env: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            argv,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=REGISTER_TIMEOUT_S,
            check=True,
        )
    except FileNotFoundError as error:
        raise ServerFailed(f"{argv[0]} does not exist") from error
    except subprocess.TimeoutExpired as error:
        raise ServerFailed(f"{' '.join(argv)} took over {REGISTER_TIMEOUT_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        raise ServerFailed(
            f"{' '.join(argv)} ended with {error.returncode}\n{error.stdout}{error.stderr}"
        ) from error
    return done.stdout
