"""What machine and versions a result was measured on.

Lives here: facts that every result file carries, and the plain memcpy they are compared with. Does
not: anything about models or servers. Names no host, user or path.
"""

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import torch

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "aiohttp", "pyzmq")


class MachineFacts(TypedDict):
    """CPU, memory, versions. Bandwidth counts each byte copied once (it is read and written)."""

    cpu: str
    cpu_flags: list[str]
    cores_usable: int
    cores: int
    ram_gb: float
    memcpy_gb_s: float
    load_average_1m: float
    python: str
    kernel: str
    packages: dict[str, str]
    revision: str


def facts(memcpy_bytes: int = 256 << 20) -> MachineFacts:
    """Everything, measured now. The load average tells whether others were using the machine."""
    return {
        "cpu": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "cpu_flags": [
            flag
            for flag in _cpuinfo("flags").split()
            if flag.startswith(("avx512_bf16", "avx512_vnni", "amx", "avx2", "avx512f"))
        ],
        "cores_usable": len(os.sched_getaffinity(0)),
        "cores": os.cpu_count() or 0,
        "ram_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "memcpy_gb_s": round(memcpy_bytes / memcpy_seconds(memcpy_bytes) / 1e9, 2),
        "load_average_1m": os.getloadavg()[0],
        "python": platform.python_version(),
        "kernel": platform.release().partition("-")[0],
        "packages": versions(PACKAGES),
        "revision": git_revision(Path(__file__).resolve().parent.parent),
    }


def memcpy_seconds(num_bytes: int, repeats: int = 5) -> float:
    """Median seconds of one single-threaded memcpy between two touched host buffers."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    dest = torch.zeros(num_bytes, dtype=torch.uint8)
    # numpy copies in one thread; torch would split a large copy over its pool.
    source_array, dest_array = source.numpy(), dest.numpy()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        dest_array[:] = source_array
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Installed versions; packages that are not installed are absent."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_revision(root: Path) -> str:
    """The commit of a checkout, read without running git; what REVISION says, where it is set."""
    if given := os.environ.get("REVISION"):
        return given
    head = root / ".git" / "HEAD"
    try:
        content = head.read_text(encoding="utf-8").strip()
        if not content.startswith("ref: "):
            return content
        return (root / ".git" / content[5:]).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _cpuinfo(field: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""
