"""What this machine has: free memory, free shared memory, a place for sockets. Reads, never acts.

A container's memory limit counts where it is lower than the machine's.
"""

import hashlib
import os
import tempfile
from collections.abc import Set
from pathlib import Path

Core = tuple[int, ...]
SHM_DIR = Path("/dev/shm")
_MEMINFO = Path("/proc/meminfo")
_SYSTEM = Path("/sys/devices/system")
_CGROUP = Path("/sys/fs/cgroup")
_GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
_FALLBACK_BYTES = 4 << 30
_LONGEST_SOCKET_PATH = 100
"""sun_path holds 108 bytes, one of them for the end."""


def free_memory_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Memory that could be taken without swapping, now."""
    free = _FALLBACK_BYTES
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return free
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return free
    return max(0, min(free, limit - used))


def free_shm_bytes(shm_dir: Path = SHM_DIR) -> int:
    """Room in the shared memory's file system; 0 where there is none."""
    try:
        stat = os.statvfs(shm_dir)
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize


def cpu_nodes(system: Path = _SYSTEM, allowed: Set[int] | None = None) -> list[list[Core]]:
    """The cores of each NUMA node that has some which this process may use; a core is the tuple of
    its threads. Where the system says nothing: one node, a thread a core."""
    if allowed is None:
        allowed = os.sched_getaffinity(0)
    nodes = []
    for folder in sorted(system.glob("node/node[0-9]*"), key=lambda path: int(path.name[4:])):
        cores: dict[Core, None] = {}
        for cpu in sorted(_cpu_list(folder / "cpulist") & allowed):
            threads = _cpu_list(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")
            cores[tuple(sorted(threads & allowed)) or (cpu,)] = None
        if cores:
            nodes.append(list(cores))
    return nodes or [[(cpu,) for cpu in sorted(allowed)]]


def _cpu_list(path: Path) -> set[int]:
    """`0-3,8` as a set; empty where it cannot be read."""
    found: set[int] = set()
    try:
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return set()
    return found


def may_have_gpus() -> bool:
    """Whether a driver of GPUs has made its device file."""
    return any(path.exists() for path in _GPU_FILES)


def data_dir_id(data_path: Path) -> str:
    """A short name that is this data folder's alone, for files outside of it."""
    return hashlib.sha256(str(data_path).encode()).hexdigest()[:12]


def socket_path(data_path: Path, worker_id: str) -> Path:
    """Where a worker's socket lies: in the data folder, or in /tmp where that path is too long.

    The folder is made, for this user alone.
    """
    folder = data_path / "run"
    if len(str(folder / f"{worker_id}.sock").encode()) > _LONGEST_SOCKET_PATH:
        folder = Path(tempfile.gettempdir()) / f"polyhost-{os.getuid()}-{data_dir_id(data_path)}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: remove it, or run as that user")
    return folder / f"{worker_id}.sock"
