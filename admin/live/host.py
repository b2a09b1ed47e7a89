"""The machine that this gateway process runs on, as the page on health says it."""

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

STARTED_S: Final = time.monotonic()
"""When this process imported the pages: at its start."""
_MEMINFO: Final = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Bytes; None where the system does not say. `load`: of the last minute, in processes that run
    or want to; `up_s`: of this gateway process."""

    version: str
    up_s: float
    num_cpus: int
    load: float
    memory_bytes: int | None
    free_memory_bytes: int | None
    disk_bytes: int
    free_disk_bytes: int


def host_facts(data_dir: Path) -> HostFacts:
    """As of now; the disk is the data folder's."""
    memory = _memory()
    disk = shutil.disk_usage(data_dir)
    return HostFacts(
        metadata.version("polyhost"),
        time.monotonic() - STARTED_S,
        len(os.sched_getaffinity(0)),
        os.getloadavg()[0],
        memory.get("MemTotal"),
        memory.get("MemAvailable"),
        disk.total,
        disk.free,
    )


def _memory() -> Mapping[str, int]:
    """Bytes by name, as the kernel names them."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return {}
    split = [line.split() for line in lines]
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in split if len(words) == 3}
