"""Reading a file as from the disk: what a cold load is compared with.

Lives here: dropping a file's pages, saying how many are left, and `dd`. Does not: loads, models. A
hypervisor may cache below us; both sides of a comparison then gain alike.
"""

import ctypes
import mmap
import os
import subprocess
import time
from pathlib import Path

import torch

DD_BLOCK = "8M"


def drop_pages(path: Path) -> float:
    """Write the file back and drop its pages; returns the share that stayed cached all the same."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return cached_share(path)


def cached_share(path: Path) -> float:
    """Share of the file's pages in the page cache, by mincore(2)."""
    size = path.stat().st_size
    if size == 0:
        return 0.0
    with path.open("rb") as file:
        # Private and writable, so that its address can be had; nothing is written or faulted in.
        mapping = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE)
    num_pages = -(-size // mmap.PAGESIZE)
    pages = (ctypes.c_ubyte * num_pages)()
    first = ctypes.c_char.from_buffer(mapping)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(ctypes.addressof(first))
        if libc.mincore(address, ctypes.c_size_t(size), pages) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
    finally:
        del first
        mapping.close()
    resident = torch.frombuffer(pages, dtype=torch.uint8).bitwise_and(1)
    return float(resident.float().mean())


def dd_seconds(path: Path) -> float:
    """Wall seconds of `dd` reading the file to nowhere."""
    start = time.perf_counter()
    subprocess.run(
        ["dd", f"if={path}", "of=/dev/null", f"bs={DD_BLOCK}", "status=none"], check=True
    )
    return time.perf_counter() - start
