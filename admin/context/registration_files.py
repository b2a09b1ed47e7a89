"""What registrations leave on the disk when they die, and for how long.

    <data>/downloads/<org>--<name>@<commit>/   fetched so far; locked (flock) while one works in it
    <data>/packs/.tmp-<pid>-<revision>/        a pack being written

The registering process cleans up after itself; `sweep` does where it could not (kill -9, a power
cut) and where somebody else has to decide: a download is kept while its registration goes on, and
after an interruption for `download_keep_s`, so that a retry goes on where it stopped. Whoever looks
at the catalog sweeps. `engine/registration/download.py` and
`engine/registration/convert.py` spell the same names.
"""

import fcntl
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from engine.protocol import PACK_VERSION
from gateway.settings.settings import PACKS_FOLDER
from registry.models.catalog import INTERRUPTED, ModelRecord

PHASES: Final[Mapping[str, str]] = {
    "start": "starting",
    "wait": "waiting for another registration of this repository",
    "resolve": "asking the hub for the commit",
    "preflight": "reading the configuration and the list of files",
    "probe": "testing the architecture against the reference",
    "download": "downloading",
    "check": "verifying the weights",
    "convert": "converting the weights",
}
"""Phases of a registration (engine/registration/main.py), in words."""
DOWNLOADS_FOLDER = "downloads"
LOGS_FOLDER = "logs"
PACK_INDEX = "index.msgpack"
CRASHED = "crashed"
RESUMABLE = frozenset({"network", INTERRUPTED, CRASHED})
"""Reasons after which trying again may go on with what was fetched."""

_TEMPORARY = ".tmp-"
_CHECKSUM_BYTES = 8


class _PackVersion(msgspec.Struct):
    """The one field of a pack's index that concerns the gateway."""

    version: int


def is_hub(source: str) -> bool:
    """A catalog row's source: folders are absolute paths, anything else is a hub id."""
    return not source.startswith("/")


def download_name(model: ModelRecord) -> str:
    """Its folder below downloads; "" where nothing can have been fetched."""
    if not is_hub(model.source) or not model.source_commit:
        return ""
    return f"{model.source.replace('/', '--')}@{model.source_commit}"


def sweep(data_dir: Path, models: Iterable[ModelRecord], keep_s: float, now_at: float) -> None:
    """Remove what no registration works on or may go on with. What is not ours stays."""
    wanted = {
        download_name(model)
        for model in models
        if model.state == "registering"
        or (
            model.state == "failed"
            and model.reason_code in RESUMABLE
            and now_at - (model.heartbeat_at or 0.0) < keep_s
        )
    }
    for folder in _entries(data_dir / DOWNLOADS_FOLDER):
        if folder.name not in wanted:
            _remove_unlocked(folder)
    for folder in _entries(data_dir / PACKS_FOLDER):
        owner = folder.name.removeprefix(_TEMPORARY).partition("-")[0]
        if folder.name.startswith(_TEMPORARY) and owner.isdigit() and not is_alive(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def is_old(pack: Path) -> bool:
    """Whether a pack can be read, but not by workers of this build."""
    try:
        content = (pack / PACK_INDEX).read_bytes()[:-_CHECKSUM_BYTES]
        return msgspec.msgpack.decode(content, type=_PackVersion).version != PACK_VERSION
    except (OSError, msgspec.DecodeError):
        return False  # the worker says what is wrong with it


def is_alive(pid: int) -> bool:
    """Is a process of this number at work on this machine? One that only waits for its parent to
    take note of its end is not: in a container nobody may ever do so.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _entries(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:  # not there, or not ours to look into
        return []


def _remove_unlocked(folder: Path) -> None:
    """Remove it unless a process works in it; that one removes it itself."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
