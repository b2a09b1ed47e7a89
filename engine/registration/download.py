"""The files of a hub repository that a registration needs: chosen, fetched, resumed, verified.

Only by an allow list: safetensors, and the small files that source.py reads. Pickled weights and
code are refused from the list of files alone, before a byte of them is fetched. A file grows under
the name `<name>.part`; it gets its own name when it has the size and the hash that the hub's list
gives (LFS: sha256; small files: git's blob hash), so a file under its own name is whole and right.
A transfer that is cut off goes on where it stopped, in this process and in a later one: what is in
the .part file is hashed from the disk and not asked for again. A server that sends more than it
declared is stopped at the declared size.

`fetch` raises RegistrationRefused, DownloadInterrupted (the .part files are worth keeping), OSError
(the disk). Knows nothing of where the folder lies and how long it lives (`download_folder.py`).
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.encoders.encoder_families import MODULES_NAME
from engine.errors import DownloadInterrupted, RegistrationRefused
from engine.registration.hub import Hub, HubFile
from engine.registration.source import (
    COPIED_FILES,
    INDEX_NAME,
    PICKLE_SUFFIXES,
    SINGLE_NAME,
)

PART_SUFFIX = ".part"
MAX_SMALL_BYTES = 128 << 20
MAX_SHARDS = 2000
MAX_WEIGHT_BYTES = 4 << 40
HASH_BLOCK_BYTES = 4 << 20

MAX_MODULES = 8

# Beside what goes into packs: how the weights are split.
SMALL_NAMES = frozenset({*COPIED_FILES, INDEX_NAME})
_MODULE_CONFIG = re.compile(r"\d_[A-Za-z]{1,32}/config\.json")

Progress = Callable[[int, int], None]
"""Bytes there, bytes in all."""


def check_listing(label: str, files: Sequence[HubFile]) -> None:
    """Raises RegistrationRefused for what the names of a repository's files already tell."""
    names = [file.path for file in files if "/" not in file.path]
    code = sorted(
        name
        for name in names
        if name.endswith(".py") and name.startswith(("modeling_", "modelling_", "configuration_"))
    )
    if code:
        raise RegistrationRefused(
            "custom_code",
            f"{label} brings its own modelling code ({', '.join(code[:3])}), which is never "
            "fetched or run here; use a revision of the model that transformers supports without "
            "trust_remote_code",
        )
    if any(name.endswith(".safetensors") for name in names):
        return
    pickles = sorted(name for name in names if Path(name).suffix in PICKLE_SUFFIXES)
    if pickles:
        raise RegistrationRefused(
            "pickle_weights",
            f"{label} has only pickled weights ({', '.join(pickles[:3])}), which can run code when "
            "opened: nothing was fetched; look for a revision with safetensors, or convert it with "
            "save_pretrained() on a machine you can spare",
        )
    raise RegistrationRefused("no_weights", f"{label} has no safetensors file at its top")


def small_files(label: str, files: Sequence[HubFile]) -> list[HubFile]:
    """What a model is judged by before its weights are fetched."""
    chosen = [file for file in files if file.path in SMALL_NAMES]
    if any(file.path == MODULES_NAME for file in chosen):
        # An embedding model's modules have a folder each, which says how.
        chosen += [file for file in files if _MODULE_CONFIG.fullmatch(file.path)][:MAX_MODULES]
    for file in chosen:
        if file.size > MAX_SMALL_BYTES:
            raise RegistrationRefused(
                "bad_hub",
                f"{file.path} of {label} would have {file.size} bytes; at most {MAX_SMALL_BYTES} "
                "are fetched of a file that is no weights",
            )
    return chosen


def weights(label: str, files: Sequence[HubFile], folder: Path) -> list[HubFile]:
    """The safetensors that make up the checkpoint; `folder` holds the small files.

    As `source.weight_files` chooses among files that are there.
    """
    by_path = {file.path: file for file in files}
    tops = [p for p in by_path if p.endswith(".safetensors") and "/" not in p]
    if INDEX_NAME in by_path:
        names = shard_names(folder / INDEX_NAME)
    elif SINGLE_NAME in by_path:
        names = [SINGLE_NAME]
    elif len(tops) == 1 and not tops[0].startswith("adapter"):
        names = tops
    else:
        raise RegistrationRefused(
            "no_weights",
            f"{label} has neither {SINGLE_NAME} nor {INDEX_NAME} (only {', '.join(tops[:3])}); "
            "give the repository of a complete model",
        )
    # Nothing but safetensors is fetched, whatever the index calls a shard.
    missing = [name for name in names if name not in tops]
    if missing:
        raise RegistrationRefused(
            "bad_weights",
            f"{label} names the shard {missing[0]!r:.200} and has no safetensors file of that name "
            "at its top",
        )
    chosen = [by_path[name] for name in names]
    total = sum(file.size for file in chosen)
    if len(chosen) > MAX_SHARDS or total > MAX_WEIGHT_BYTES:
        raise RegistrationRefused(
            "bad_hub",
            f"{label} has {len(chosen)} weight files of {total} bytes; at most {MAX_SHARDS} of "
            f"{MAX_WEIGHT_BYTES} bytes are fetched",
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

        def told(there: int, before: int = before) -> None:
            progress(before + there, total)

        if not (folder / file.path).is_file():
            _fetch_file(hub, repo, commit, file, folder / file.path, told)
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
    hub: Hub, repo: str, commit: str, file: HubFile, final: Path, told: Callable[[int], None]
) -> None:
    part = _Part(final, file)
    try:
        resumed = part.size > 0
        while True:
            while part.size < file.size:
                hub.retried(lambda: _bring(hub, repo, commit, part, told))
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
        f"{file.path} of {repo} came with the hash {wrong[:16]}..., and the hub's list says "
        f"{(file.sha256 or file.blob)[:16]}...: the hub or a mirror gives other bytes than it "
        "declares; try again later or with another endpoint (setting hub_endpoint)",
    )


def _bring(hub: Hub, repo: str, commit: str, part: _Part, told: Callable[[int], None]) -> None:
    """One request for the rest. An interruption counts only if it brought next to nothing."""
    before = part.size
    try:
        with hub.open(repo, commit, part.file.path, part.size) as body:
            if body.start != part.size:
                part.restart()  # the server knows no ranges
            for chunk in body.chunks:
                # A server that sends more than it declared is cut short here; the hash tells.
                part.write(chunk[: part.file.size - part.size])
                told(part.size)
                if part.size == part.file.size:
                    return
        raise DownloadInterrupted(
            f"{part.file.path} ended after {part.size} of {part.file.size} bytes"
        )
    except DownloadInterrupted:
        if part.size - before < hub.limits.stall_bytes:
            raise


def shard_names(index: Path) -> list[str]:
    """The weight files that a checkpoint's index names, sorted. Raises RegistrationRefused."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise RegistrationRefused(
            "bad_weights", f"{index.name} cannot be read ({error}): it names no weight files"
        ) from error
    if not names:
        raise RegistrationRefused("bad_weights", f"{index.name} names no weight files")
    return names


def _part(final: Path) -> Path:
    return final.with_name(final.name + PART_SUFFIX)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
