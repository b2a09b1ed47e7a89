"""What a server's processes take of memory together, sampled while it runs.

Lives here: the proportional memory (`smaps_rollup`) of a process and those below it, the largest
sample. Does not: starting servers, what they are told (`servers.py`, `cpu_http.py`).

A page that n processes map counts an n-th for each, so the sum over a tree counts none twice: what
gateway and worker share, and the host tier, are there once. Pages of libraries that processes
outside the tree map too count in part only: alone on the machine they count whole. Not those of a
session but those below a process: our workers lead sessions of their own.
"""

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.processes import below

SAMPLE_S = 0.5
WORKER = b"engine.worker"
_FIELDS = {"Pss_Anon": "anonymous", "Pss_File": "files", "Pss_Shmem": "shared"}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. `anonymous` + `files` + `shared` and `workers` + `others` are both the whole."""

    anonymous: int = 0
    files: int = 0
    shared: int = 0
    workers: int = 0
    others: int = 0

    @property
    def total(self) -> int:
        """Of all processes."""
        return self.workers + self.others


def parse_rollup(text: str) -> dict[str, int]:
    """Bytes by kind of one process's `smaps_rollup`; a kernel without kinds has none."""
    found = dict.fromkeys(_FIELDS.values(), 0)
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in _FIELDS:
            found[_FIELDS[name]] = int(rest.split()[0]) * 1024
    return found


def memory_of(leader: int) -> Memory:
    """Now. Processes that end meanwhile are left out."""
    sums = dict.fromkeys(("anonymous", "files", "shared", "workers", "others"), 0)
    for pid in (leader, *below(leader)):
        folder = Path("/proc") / str(pid)
        try:
            kinds = parse_rollup((folder / "smaps_rollup").read_text(encoding="ascii"))
            whose = "workers" if WORKER in (folder / "cmdline").read_bytes() else "others"
        except OSError:
            continue
        for kind, size in kinds.items():
            sums[kind] += size
        sums[whose] += sum(kinds.values())
    return Memory(**sums)


class Sampler:
    """The largest sum so far, looked for every `SAMPLE_S` in a thread of its own."""

    def __init__(self, look: Callable[[], Memory]) -> None:
        self._look = look
        self._peak = Memory()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._stopped.set()
        self._thread.join()

    def peak(self) -> dict[str, Any]:
        """Bytes by part at the moment when their sum was largest; looks once more."""
        self._sample()
        with self._lock:
            return {"total": self._peak.total, **asdict(self._peak)}

    def _sample(self) -> None:
        now = self._look()
        with self._lock:
            if now.total > self._peak.total:
                self._peak = now

    def _run(self) -> None:
        while not self._stopped.wait(SAMPLE_S):
            self._sample()
