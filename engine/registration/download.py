"""The files of a hub repository that a registration needs: chosen, fetched, resumed, verified.

Only by an allow list: safetensors, and the small files that source.py reads. Pickled weights and
code are refused from the list of files alone, before a byte of them is fetched. A file grows under
the name `<name>.part`; it gets its own name when it has the size and the hash that the hub's list
gives (LFS: sha256; small files: git's blob hash), so a file under its own name is whole and right.
A transfer that is cut off goes on where it stopped, in this process and in a later one: what is in
the .part file is hashed from the disk and not asked for again. A server that sends more than it
declared is stopped at the declared size.

`fetch` raises RegistrationRefused, DownloadInterrupted (the .part files are worth keeping), OSError
(the disk).

    <downloads>/<org>--<name>@<commit>/     a folder a commit, whatever names it is registered under

One process works in a folder at a time (flock on the folder itself, dropped by the kernel when the
process is gone); others wait, and mostly find the pack made when it is their turn. The folder goes
when the pack is there or when trying again is of no use; after an interruption it stays, and the
gateway removes it in the end (`admin/context/registration_files.py`, which spells its name too).

A pack that came from a hub carries one small file an origin (repository, commit, dtype as asked
for), so that the same commit is not fetched twice. It goes when the pack goes.
"""

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine.errors import DownloadInterrupted, RegistrationRefused
from engine.pack import PackIndex
from engine.registration.convert import whole_pack
from engine.registration.encoder_families import MODULES_NAME
from engine.registration.hub import Hub, HubFile
from engine.registration.source import COPIED_FILES, INDEX_NAME, check_no_code, choose_weights
from engine.registration.tensors import BESIDE, GGUF_SUFFIX

PART_SUFFIX = ".part"
MAX_SMALL_BYTES = 128 << 20
MAX_SHARDS = 2000
MAX_WEIGHT_BYTES = 4 << 40
HASH_BLOCK_BYTES = 4 << 20

MAX_MODULES = 8
MAX_SHOWN = 6

# Beside what goes into packs: how the weights are split, and how some are quantized.
SMALL_NAMES = frozenset({*COPIED_FILES, INDEX_NAME, *BESIDE})
MODULE_CONFIG = re.compile(r"\d_[A-Za-z]{1,32}/config\.json")

Progress = Callable[[int, int], None]
"""Bytes there, bytes in all."""
POLL_S = 0.1


def check_listing(label: str, files: Sequence[HubFile]) -> None:
    """Raises RegistrationRefused for what the names of a repository's files already tell."""
    names = _top_names(files)
    check_no_code(label, names, {})
    if not any(name.endswith(".safetensors") for name in names):
        packed = sorted(name for name in names if name.endswith(GGUF_SUFFIX))
        if packed:
            shown = ", ".join(packed[:MAX_SHOWN]) + (", ..." if len(packed) > MAX_SHOWN else "")
            raise RegistrationRefused(
                "no_weights",
                f"{label} has only GGUF files ({shown}); download the one to host into a folder, "
                "and register the folder",
            )
        choose_weights(label, names - {INDEX_NAME}, Path())


def small_files(label: str, files: Sequence[HubFile]) -> list[HubFile]:
    """What a model is judged by before its weights are fetched."""
    chosen = [file for file in files if file.path in SMALL_NAMES]
    if any(file.path == MODULES_NAME for file in chosen):
        # An embedding model's modules have a folder each, which says how.
        chosen += [file for file in files if MODULE_CONFIG.fullmatch(file.path)][:MAX_MODULES]
    for file in chosen:
        if file.size > MAX_SMALL_BYTES:
            raise RegistrationRefused(
                "bad_hub",
                f"{file.path} of {label} has {file.size} bytes, more than the maximum of "
                f"{MAX_SMALL_BYTES} for files other than weights",
            )
    return chosen


def weights(label: str, files: Sequence[HubFile], folder: Path) -> list[HubFile]:
    """The safetensors that make up the checkpoint; `folder` holds the small files."""
    by_path = {file.path: file for file in files}
    # Nothing but safetensors is fetched, whatever the index calls a shard.
    tops = {n for n in _top_names(files) if n.endswith(".safetensors") or n == INDEX_NAME}
    names = choose_weights(label, tops, folder / INDEX_NAME)
    chosen = [by_path[name] for name in names]
    total = sum(file.size for file in chosen)
    if len(chosen) > MAX_SHARDS or total > MAX_WEIGHT_BYTES:
        raise RegistrationRefused(
            "bad_hub",
            f"{label} has {len(chosen)} weight files of {total} bytes; the maximum is {MAX_SHARDS} "
            f"files of {MAX_WEIGHT_BYTES} bytes in total",
        )
    return chosen


def present_bytes(files: Sequence[HubFile], folder: Path) -> int:
    """Bytes of these files that an earlier attempt has left."""
    return sum(max(_size(folder / f.path), _size(_part(folder / f.path))) for f in files)


def fetch(
    hub: Hub, repo: str, commit: str, files: Sequence[HubFile], folder: Path, progress: Progress
) -> None:
    """Bring the files into the folder. Those that are there are not asked for."""
    total = sum(file.size for file in files)
    done = 0
    progress(0, total)
    for file in files:
        before = done

        def report(there: int, before: int = before) -> None:
            progress(before + there, total)

        if not (folder / file.path).is_file():
            _fetch_file(hub, repo, commit, file, folder / file.path, report)
        done += file.size
        progress(done, total)


class _Part:
    """A file that grows to its declared size and knows the hash of what it has. Close it."""

    def __init__(self, final: Path, file: HubFile) -> None:
        self.file = file
        self.path = _part(final)
        final.parent.mkdir(parents=True, exist_ok=True)
        self._target = self.path.open("a+b", buffering=0)
        self.size = 0
        self._begin()

    def _begin(self) -> None:
        """Hash what is there."""
        self.size = os.fstat(self._target.fileno()).st_size
        if self.size > self.file.size:
            self._target.truncate(0)
            self.size = 0
        self._digest = hashlib.sha256() if self.file.sha256 else hashlib.sha1()
        if not self.file.sha256:
            self._digest.update(f"blob {self.file.size}\0".encode())
        self._target.seek(0)
        while block := self._target.read(HASH_BLOCK_BYTES):
            self._digest.update(block)

    def restart(self) -> None:
        """Forget what is there."""
        self._target.truncate(0)
        self._begin()

    def write(self, data: bytes) -> None:
        """Append. Raises OSError."""
        written = 0
        view = memoryview(data)
        while written < len(data):
            count = self._target.write(view[written:])
            written += count
            self.size += count
        self._digest.update(data)

    def finish(self, final: Path) -> str:
        """Give the file its name if the hash is right; "" or the wrong hash."""
        digest = self._digest.hexdigest()
        if digest != (self.file.sha256 or self.file.blob):
            return digest
        os.fsync(self._target.fileno())
        self.path.replace(final)
        return ""

    def close(self) -> None:
        """Close the file."""
        self._target.close()


def _fetch_file(
    hub: Hub, repo: str, commit: str, file: HubFile, final: Path, report: Callable[[int], None]
) -> None:
    part = _Part(final, file)
    try:
        resumed = part.size > 0
        while True:
            while part.size < file.size:
                hub.retried(lambda: _bring(hub, repo, commit, part, report))
            wrong = part.finish(final)
            if not wrong:
                return
            part.restart()
            if not resumed:
                break
            # The fault may be in what an earlier attempt left: once more from the first byte.
            resumed = False
    finally:
        part.close()
    raise RegistrationRefused(
        "hash_mismatch",
        f"{file.path} of {repo} was downloaded with the hash {wrong[:16]}..., but the hub lists "
        f"{(file.sha256 or file.blob)[:16]}...: the hub or a mirror sends wrong data; try again "
        "later or with another endpoint (setting hub_endpoint)",
    )


def _bring(hub: Hub, repo: str, commit: str, part: _Part, report: Callable[[int], None]) -> None:
    """One request for the rest. An interruption counts only if it brought next to nothing."""
    before = part.size
    try:
        with hub.open(repo, commit, part.file.path, part.size) as body:
            if body.start != part.size:
                part.restart()  # the server knows no ranges
            for chunk in body.chunks:
                # A server that sends more than it declared is cut short here; the hash tells.
                part.write(chunk[: part.file.size - part.size])
                report(part.size)
                if part.size == part.file.size:
                    return
        raise DownloadInterrupted(
            f"{part.file.path} ended after {part.size} of {part.file.size} bytes"
        )
    except DownloadInterrupted:
        if part.size - before < hub.limits.stall_bytes:
            raise


def _top_names(files: Sequence[HubFile]) -> set[str]:
    return {file.path for file in files if "/" not in file.path}


def _part(final: Path) -> Path:
    return final.with_name(final.name + PART_SUFFIX)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def folder_name(repo: str, commit: str) -> str:
    """One path component."""
    return f"{repo.replace('/', '--')}@{commit}"


@contextmanager
def locked(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Make the folder and be alone in it. `waiting` is called while another process has it."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            while not _lock(descriptor):
                waiting()
                time.sleep(POLL_S)
            if _is(folder, descriptor):
                yield
                return
            # Whoever had it removed it when done: the lock is on a folder that is no more.
        finally:
            os.close(descriptor)


def remove(folder: Path) -> None:
    """The folder is of no more use. Call it with the lock held."""
    shutil.rmtree(folder, ignore_errors=True)


def note_origin(pack: Path, repo: str, commit: str, dtype: str) -> None:
    """The pack is what this commit becomes."""
    (pack / _origin_name(repo, commit, dtype)).touch()


def find_pack(dest: Path, repo: str, commit: str, dtype: str) -> tuple[Path, PackIndex] | None:
    """A whole pack of this origin, if there is one."""
    for mark in dest.glob(f"*/{_origin_name(repo, commit, dtype)}"):
        index = whole_pack(mark.parent)
        if index is not None:
            return mark.parent, index
    return None


def _origin_name(repo: str, commit: str, dtype: str) -> str:
    digest = hashlib.sha256(f"{repo}\0{commit}\0{dtype}".encode())
    return f"origin-{digest.hexdigest()[:32]}"


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(folder), os.fstat(descriptor))
    except FileNotFoundError:
        return False
