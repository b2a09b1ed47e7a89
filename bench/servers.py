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
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.client import Target
from bench.processes import ServerFailed, ServerProcess, free_port
from bench.prompts import PromptMaker

OURS = "polyhost"
PEER = "transformers"
VLLM = "vllm"
TENANT = "bench"
REGISTER_TIMEOUT_S = 1800.0
START_TIMEOUT_S = 300.0
PEER_PACKAGES = ("transformers", "torch", "accelerate", "fastapi", "uvicorn")
_VERSIONS_CODE = (
    "import importlib.metadata as m, json;"
    f"print(json.dumps({{p: m.version(p) for p in {PEER_PACKAGES!r}}}))"
)


@dataclass(frozen=True, slots=True)
class Server:
    """A running server and what is needed to talk to it."""

    process: ServerProcess
    base_url: str
    api_key: str
    argv: list[str]
    ready_s: float

    def target(self, name: str, model: str, prompts: PromptMaker | None = None) -> Target:
        """Where to send load for `model`."""
        count = None if prompts is None else prompts.count
        return Target(name, self.base_url, model, self.api_key, count)


class Polyhost:
    """One data folder of Polyhost: its CLI, and its server."""

    def __init__(self, data_dir: Path, settings: Mapping[str, object] | None = None) -> None:
        """`settings` are fields of `gateway.settings.Settings`, handed over in the environment."""
        self._data_dir = data_dir
        self._env = {
            f"POLYHOST_{name.upper()}": str(value) for name, value in (settings or {}).items()
        }

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

    def serve(
        self,
        api_key: str,
        *arguments: str,
        module: Sequence[str] = ("gateway",),
        until: str = "/health/ready",
    ) -> Server:
        """Start it on a free port and wait until it can answer requests, or until `until` says 200.

        `module` runs in the product's place, its own arguments behind it.
        """
        port = free_port()
        argv = [
            *(sys.executable, "-m", *module, "serve"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--data-dir", str(self._data_dir)),
            *arguments,
        ]
        base_url = f"http://127.0.0.1:{port}"
        log_path = self._data_dir / "bench-server.log"
        process = ServerProcess(OURS, argv, log_path, self._env)
        return _wait(Server(process, base_url, api_key, argv, 0.0), until)

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
    base_url = f"http://127.0.0.1:{port}"
    return _wait(Server(process, base_url, "", argv, 0.0), "/health")


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
    return _wait(Server(process, f"http://127.0.0.1:{port}", "", argv, 0.0), "/health")


def peer_versions(python: Path) -> dict[str, str]:
    """Versions in the peer's environment. Raises ServerFailed where it is not installed."""
    versions: dict[str, str] = json.loads(_output([str(python), "-c", _VERSIONS_CODE], {}))
    return versions


def _wait(server: Server, path: str) -> Server:
    try:
        ready_s = server.process.wait_ready(server.base_url + path, START_TIMEOUT_S)
    except BaseException:
        server.process.stop()
        raise
    return Server(server.process, server.base_url, server.api_key, server.argv, ready_s)


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
