"""A local folder as registration reads it: no link in it leads anywhere else.

Small files of a source go into the pack and from there into prompts: a `chat_template.jinja` that
links to a system file would publish it. So registration never reads the operator's folder itself.
Every file is opened once; what was opened, not its name, has to lie in the folder, so that nobody
can change a link in between. Small files are copied, weights are reached through the descriptor:

    <dest>/.tmp-<pid>-source/config.json          a copy
                             model.safetensors    -> /proc/<pid>/fd/<n>
                             modeling_x.py        empty: its name is all that matters

For one GGUF file the small files that the folder lacks are made here (`gguf_folder.py`).

A hub's cache has links inside a repository's folder (`models--org--name/snapshots/<commit>/` to
`blobs/`): there that is the folder nothing may leave.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from engine.errors import RegistrationRefused
from engine.registration.convert import SOURCE_SUFFIX, TEMPORARY
from engine.registration.download import MAX_MODULES, MAX_SMALL_BYTES, MODULE_CONFIG, SMALL_NAMES
from engine.registration.gguf_folder import complete_folder
from engine.registration.source import PICKLE_SUFFIXES
from engine.registration.tensors import GGUF_SUFFIX

_WEIGHTS = frozenset({".safetensors", GGUF_SUFFIX})
_BLOCK_BYTES = 1 << 20


@contextlib.contextmanager
def staged(folder: Path, dest: Path) -> Iterator[Path]:
    """The folder in another place, for as long as this lasts. Raises RegistrationRefused, OSError.

    What is no folder is given back as it is: whoever reads it says so.
    """
    if not folder.is_dir():
        yield folder
        return
    stage = dest / f"{TEMPORARY}{os.getpid()}{SOURCE_SUFFIX}"
    is_new = not dest.exists()
    dest.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(mode=0o700)
    try:
        with contextlib.ExitStack() as stack:
            for name in _names(folder):
                _stage(folder, name, stage, stack)
            weights = [path for path in stage.iterdir() if path.suffix in _WEIGHTS]
            if len(weights) == 1 and weights[0].suffix == GGUF_SUFFIX:
                complete_folder(stage, weights[0])
            yield stage
    except RegistrationRefused as refusal:
        # The operator knows the folder under its own name.
        message = str(refusal).replace(str(stage), str(folder))
        raise RegistrationRefused(refusal.code, message) from refusal
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):  # a pack is in it
                dest.rmdir()


def _names(folder: Path) -> list[str]:
    """What a registration may look at, and what it is refused for."""
    wanted = {*PICKLE_SUFFIXES, *_WEIGHTS, ".py"}
    names = [
        entry.name
        for entry in folder.iterdir()
        if entry.name in SMALL_NAMES or entry.suffix in wanted
    ]
    modules = [f"{path.parent.name}/{path.name}" for path in sorted(folder.glob("*/config.json"))]
    return names + [name for name in modules if MODULE_CONFIG.fullmatch(name)][:MAX_MODULES]


def _stage(folder: Path, name: str, stage: Path, stack: contextlib.ExitStack) -> None:
    target = stage / name
    if name not in SMALL_NAMES and target.suffix not in _WEIGHTS and "/" not in name:
        target.touch()
        return
    try:
        # A pipe of such a name would be waited for without end.
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise RegistrationRefused(
            "unsafe_link", f"{name} in {folder} links to a file that is not there"
        ) from error
    stack.callback(os.close, descriptor)
    _check_place(folder, name, descriptor)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        return
    if target.suffix in _WEIGHTS:
        target.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        return
    if found.st_size > MAX_SMALL_BYTES:
        raise RegistrationRefused(
            "bad_config", f"{name} in {folder} is larger than {MAX_SMALL_BYTES} bytes"
        )
    target.parent.mkdir(exist_ok=True)
    with target.open("wb") as file:
        while block := os.read(descriptor, _BLOCK_BYTES):
            file.write(block)


def _check_place(folder: Path, name: str, descriptor: int) -> None:
    """Raises RegistrationRefused where what was opened lies elsewhere."""
    place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    if not place.is_relative_to(_root(folder.resolve())):
        raise RegistrationRefused(
            "unsafe_link",
            f"{name} in {folder} links to a file outside of that folder ({place}), which is not "
            "followed: put a copy of the file in its place",
        )


def _root(folder: Path) -> Path:
    """What links may not leave."""
    repository = folder.parent.parent
    if folder.parent.name == "snapshots" and repository.name.startswith("models--"):
        return repository
    return folder
