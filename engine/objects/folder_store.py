"""Objects as files of a folder of the data directory. Implements `object_store.ObjectStore`.

    root/tenant/kind/3f/3f9c...     the object; 256 folders a kind, so that none becomes large
    root/tenant/kind/3f/.7b1e...    an object that is being written
    root/.owner                     whose objects these are: the name of the owner's database

An object is written into a temporary file beside its place, synced and renamed, and then the folder
is synced: after a crash it is there whole or not at all. Folders are 0700 and files 0600, and a
folder that is made is synced into its parent. Nothing follows a symbolic link out of the folder:
names have no separators of their own, and files are opened with O_NOFOLLOW.

A folder on a volume that is not mounted is an empty folder, or none, and would have every object
missing. So the first that is put leaves the owner's name in the folder. Where the owner has objects
and its name is not there, the store is away (`StoreAway`): nothing is read, put or deleted.
"""

import contextlib
import hashlib
import os
import secrets
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Protocol

from engine.objects.object_store import (
    NUM_PARTS,
    PIECE_BYTES,
    ObjectMissing,
    ObjectStat,
    StoreAway,
    StoredObject,
    checked,
    is_part,
)
from engine.objects.whole_files import NEW_FILE, sync_folder, write_all, write_once

_SHARD_CHARS = 2
_TEMPORARY = "."
_OLD_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


OWNER_FILE = ".owner"


class FolderOwner(Protocol):
    """Whose objects a folder has. May block, and raise what its database raises."""

    def name(self) -> str:
        """Always the same, and no other owner's."""

    def has_objects(self) -> bool:
        """Whether it has put any that are not deleted."""


class FolderStore:
    """See the module. The folder is made when the first object is put."""

    def __init__(self, root: Path, owner: FolderOwner | None = None) -> None:
        """`owner` None: whatever is in the folder is its user's."""
        self._root = root
        self._owner = owner

    def check(self) -> None:
        """See ObjectStore."""
        if self._owner is not None:
            self._is_claimed(self._owner)

    def _is_claimed(self, owner: FolderOwner) -> bool:
        """Whether its name is in the folder; it may be put there where it is not. Raises
        StoreAway."""
        path, name = self._root / OWNER_FILE, owner.name()
        found = _text_of(path)
        if found == name:
            return True
        if found is None and not owner.has_objects():
            return False
        if found is None and any(self._found("")):  # an earlier release left no name
            self._claim(name)
            return True
        what = "has no objects" if found is None else "has the objects of another database"
        raise StoreAway(
            f"the folder {self._root} {what}: mount the right one, or set objects_dir. If what was "
            f"stored is gone for good, write {name} into {path}"
        )

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
        path = self._path(name)
        if self._owner is not None and not self._is_claimed(self._owner):
            self._claim(self._owner.name())
        return FolderWriter(name, path)

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
            self.check()
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[ObjectStat]:
        """See ObjectStore."""
        self.check()
        yield from self._found(prefix)

    def _found(self, prefix: str) -> Iterator[ObjectStat]:
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
        self.check()
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

    def _claim(self, name: str) -> None:
        _make_folders(self._root)
        write_once(self._root / OWNER_FILE, name.encode())

    def _path(self, name: str) -> Path:
        tenant, kind, own = checked(name, NUM_PARTS)
        return self._root / tenant / kind / own[:_SHARD_CHARS] / own

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        try:
            descriptor = os.open(self._path(name), _OLD_FILE)
        except (FileNotFoundError, NotADirectoryError) as error:
            self.check()
            raise ObjectMissing(name) from error
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text("ascii", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


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
            self._descriptor = os.open(self._temporary, NEW_FILE, 0o600)
        except FileNotFoundError:
            _make_folders(path.parent)
            self._descriptor = os.open(self._temporary, NEW_FILE, 0o600)
        self._is_open = True

    def write(self, data: bytes) -> None:
        """See ObjectWriter."""
        with self._lock:
            self._check_open()
            write_all(self._descriptor, data)
            self._digest.update(data)
            self._size_bytes += len(data)

    def finish(self) -> StoredObject:
        """See ObjectWriter."""
        with self._lock:
            self._check_open()
            os.fsync(self._descriptor)
            self._temporary.rename(self._path)
            self._close()
            sync_folder(self._path.parent)
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


def _make_folders(folder: Path) -> None:
    """Those that are missing, each synced into its parent."""
    missing = [folder]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
        sync_folder(each.parent)


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
