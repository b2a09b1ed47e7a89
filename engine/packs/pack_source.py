"""Where residency learns what a pack is: a folder on the disk, or a sibling without files.

`read` gives the index of a pack whose blob is there and whole in length; what takes long to check
is checked by the load. `stamp` changes when a pack is registered anew under its name.
"""

from pathlib import Path
from typing import Protocol

from engine.packs.pack import BLOB_NAME, PackIndex, read_index
from engine.packs.weights import check_layout


class PackSource(Protocol):
    """Packs by their folders."""

    def stamp(self, pack_dir: Path) -> tuple[int, ...]:
        """What changes when a pack is registered anew; () where there is none."""

    def read(self, pack_dir: Path) -> PackIndex:
        """Its index. Raises PackError where this build cannot use the pack."""


class DiskPacks:
    """Implements PackSource on folders as `pack.py` describes them."""

    def stamp(self, pack_dir: Path) -> tuple[int, ...]:
        """Identity of the blob file."""
        try:
            status = (pack_dir / BLOB_NAME).stat()
        except OSError:
            return ()
        return status.st_ino, status.st_size, status.st_mtime_ns

    def read(self, pack_dir: Path) -> PackIndex:
        """The index, its blob looked at but not read."""
        index = read_index(pack_dir)
        check_layout(pack_dir, index)
        return index
