"""The disk as the journal uses it: the few calls whose order and failures decide what survives.

A seam for tests: journal.py runs on another implementation that forgets what was not synced, or
that is full, at any call. Paths are absolute; errors are OSError.
"""

import os
from pathlib import Path
from typing import Protocol


class Files(Protocol):
    """What a journal needs of a folder."""

    def allocate(self, path: Path, num_bytes: int, head: bytes) -> None:
        """Make a file of zeros that begins with `head`, its room taken on the disk, and sync it.
        Leaves nothing behind where it fails."""

    def open(self, path: Path) -> int:
        """For `write` and `sync`."""

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        """All of it."""

    def sync(self, descriptor: int) -> None:
        """Its data survives a power cut from here on."""

    def close(self, descriptor: int) -> None:
        """Forget the descriptor."""

    def rename(self, path: Path, to: Path) -> None:
        """And sync the folder."""

    def delete(self, path: Path) -> None:
        """And sync the folder."""

    def read(self, path: Path, offset: int, num_bytes: int) -> bytes:
        """So many bytes from there, or as many as there are."""

    def names(self, folder: Path) -> list[str]:
        """Of what lies in it, sorted."""

    def free_bytes(self, folder: Path) -> int:
        """What this user may still take of the disk."""


class DiskFiles:
    """The real one."""

    def allocate(self, path: Path, num_bytes: int, head: bytes) -> None:
        """See Files."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            self.write(descriptor, head, 0)
            os.fsync(descriptor)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        self._sync_folder(path.parent)

    def open(self, path: Path) -> int:
        """See Files."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def write(self, descriptor: int, data: bytes, offset: int) -> None:
        """See Files."""
        num_written = os.pwrite(descriptor, data, offset)
        while num_written < len(data):
            num_written += os.pwrite(descriptor, data[num_written:], offset + num_written)

    def sync(self, descriptor: int) -> None:
        """See Files."""
        os.fdatasync(descriptor)

    def close(self, descriptor: int) -> None:
        """See Files."""
        os.close(descriptor)

    def rename(self, path: Path, to: Path) -> None:
        """See Files."""
        path.rename(to)
        self._sync_folder(to.parent)

    def delete(self, path: Path) -> None:
        """See Files."""
        path.unlink(missing_ok=True)
        self._sync_folder(path.parent)

    def read(self, path: Path, offset: int, num_bytes: int) -> bytes:
        """See Files."""
        with path.open("rb") as stream:
            left = os.fstat(stream.fileno()).st_size - offset
            stream.seek(offset)
            return stream.read(max(0, min(num_bytes, left)))

    def names(self, folder: Path) -> list[str]:
        """See Files."""
        return sorted(os.listdir(folder))

    def free_bytes(self, folder: Path) -> int:
        """See Files."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize

    @staticmethod
    def _sync_folder(folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
