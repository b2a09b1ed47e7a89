"""Objects as files of a folder of the data directory. Implements `object_store.ObjectStore`.

    root/tenant/kind/3f/3f9c...     the object; 256 folders a kind, so that none becomes large
    root/tenant/kind/3f/.7b1e...    an object that is being written

An object is written into a temporary file beside its place, synced and renamed, and then the folder
is synced: after a crash it is there whole or not at all. Folders are 0700 and files 0600, and a
folder that is made is synced into its parent. Nothing follows a symbolic link out of the folder:
names have no separators of their own, and files are opened with O_NOFOLLOW.
"""

import contextlib
import hashlib
import os
import secrets
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

from engine.objects.object_store import (
    NUM_PARTS,
    PIECE_BYTES,
    ObjectMissing,
    ObjectStat,
    StoredObject,
    checked,
    is_part,
)

_SHARD_CHARS = 2
_TEMPORARY = "."
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_OLD_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class FolderStore:
    """See the module. The folder is made when the first object is put."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, name: str, data: bytes) -> StoredObject:
        """See ObjectStore."""
        writer = self.writer(name)
        try:
            writer.write(data)
            return writer.finish()
        except BaseException:
            writer.abort()
            raise

    def writer(self, name: str) -> "FolderWriter":
        """See ObjectStore."""
        return FolderWriter(name, self._path(name))

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """See ObjectStore."""
        return b"".join(self.pieces(name, start, length))

    def pieces(
        self, name: str, start: int = 0, length: int | None = None
    ) -> Generator[bytes, None, None]:
        """See ObjectStore."""
        if start < 0 or (length is not None and length < 0):
            raise ValueError(f"a range begins and ends at 0 or later, got {start}, {length}")
        with self._opened(name) as descriptor:
            left = max(0, os.fstat(descriptor).st_size - start)
            left = left if length is None else min(left, length)
            while left and (piece := os.pread(descriptor, min(left, PIECE_BYTES), start)):
                start, left = start + len(piece), left - len(piece)
                yield piece

    def stat(self, name: str) -> ObjectStat:
        """See ObjectStore."""
        with self._opened(name) as descriptor:
            return _stat(name, os.fstat(descriptor))

    def digest(self, name: str) -> str:
        """See ObjectStore."""
        made = hashlib.sha256()
        with self._opened(name) as descriptor:
            while part := os.read(descriptor, PIECE_BYTES):
                made.update(part)
        return made.hexdigest()

    def delete(self, name: str) -> bool:
        """See ObjectStore. Not synced: one that comes back after a power cut has no row."""
        try:
            self._path(name).unlink()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        """See ObjectStore."""
        below = prefix.rstrip("/")
        parts = checked(below, min(below.count("/") + 1, NUM_PARTS - 1)) if below else []
        for folder in _below(self._root.joinpath(*parts), NUM_PARTS - 1 - len(parts)):
            tenant_and_kind = folder.relative_to(self._root).as_posix()
            for entry in _files(folder):
                if not is_part(entry.name):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    yield _stat(f"{tenant_and_kind}/{entry.name}", found)

    def delete_unfinished(self, before_at: float) -> int:
        """See ObjectStore."""
        num = 0
        for folder in _below(self._root, NUM_PARTS - 1):
            for entry in _files(folder):
                if not entry.name.startswith(_TEMPORARY):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_mtime < before_at:
                        os.unlink(entry)
                        num += 1
        return num

    def _path(self, name: str) -> Path:
        tenant, kind, own = checked(name, NUM_PARTS)
        return self._root / tenant / kind / own[:_SHARD_CHARS] / own

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        try:
            descriptor = os.open(self._path(name), _OLD_FILE)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ObjectMissing(name) from error
        try:
            yield descriptor
        finally:
            os.close(descriptor)


class FolderWriter:
    """Implements ObjectWriter."""

    def __init__(self, name: str, path: Path) -> None:
        """Raises OSError."""
        self._name = name
        self._path = path
        self._temporary = path.parent / f"{_TEMPORARY}{secrets.token_hex(16)}"
        self._digest = hashlib.sha256()
        self._size_bytes = 0
        self._lock = threading.Lock()
        try:
            self._descriptor = os.open(self._temporary, _NEW_FILE, 0o600)
        except FileNotFoundError:
            _make_folders(path.parent)
            self._descriptor = os.open(self._temporary, _NEW_FILE, 0o600)
        self._is_open = True

    def write(self, data: bytes) -> None:
        """See ObjectWriter."""
        with self._lock:
            self._check_open()
            _write_all(self._descriptor, data)
            self._digest.update(data)
            self._size_bytes += len(data)

    def finish(self) -> StoredObject:
        """See ObjectWriter."""
        with self._lock:
            self._check_open()
            os.fsync(self._descriptor)
            self._temporary.rename(self._path)
            self._close()
            _sync_folder(self._path.parent)
            return StoredObject(self._name, self._size_bytes, self._digest.hexdigest())

    def abort(self) -> None:
        """See ObjectWriter."""
        with self._lock:
            if self._is_open:
                self._close()
                with contextlib.suppress(OSError):
                    self._temporary.unlink()

    def _check_open(self) -> None:
        """Another file may have the descriptor by now."""
        if not self._is_open:
            raise ValueError(f"object {self._name} was finished or aborted")

    def _close(self) -> None:
        self._is_open = False
        os.close(self._descriptor)


def _stat(name: str, found: os.stat_result) -> ObjectStat:
    return ObjectStat(name, found.st_size, found.st_mtime)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _make_folders(folder: Path) -> None:
    """Those that are missing, each synced into its parent."""
    missing = [folder]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
        _sync_folder(each.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """The folders so many levels below. What else is there (`lost+found`) is left alone."""
    if not depth:
        yield folder
        return
    for entry in _entries(folder):
        if is_part(entry.name) and entry.is_dir(follow_symlinks=False):
            yield from _below(Path(entry.path), depth - 1)


def _files(kind_folder: Path) -> Iterator["os.DirEntry[str]"]:
    """Of all shards of a kind."""
    for shard in _below(kind_folder, 1):
        for entry in _entries(shard):
            if entry.is_file(follow_symlinks=False):
                yield entry


def _entries(folder: Path) -> Iterator["os.DirEntry[str]"]:
    """None where there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            yield from list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return
