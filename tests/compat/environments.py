"""Environments of other people's packages, outside the tree: suites from source packages, clients.

They lie in the folder that POLYHOST_COMPAT_CACHE names, or in the user's cache, and are made once
for each list of requirements. Nothing of them is committed or installed for Polyhost. `Missing`
says why one could not be had: a machine without a package index is no failure of a test.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
SDISTS = HERE / "sdists.txt"
FOLDER = "POLYHOST_COMPAT_CACHE"
TIMEOUT_S = 1200.0


class Missing(Exception):
    """Why it is not to be had."""


def cache() -> Path:
    """Where everything lies."""
    own = os.environ.get(FOLDER)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(caches) / "polyhost" / "compat"


def environment(requirements: Path) -> Path:
    """The Python of an environment with these packages. Raises Missing."""
    with _made(requirements.stem, requirements.read_bytes()) as (folder, is_there):
        python = folder / "bin" / "python"
        if not is_there:
            _run([sys.executable, "-m", "venv", str(folder)])
            _run([str(python), *PIP, "install", "-r", str(requirements)])
    return python


def sources(python: Path) -> dict[str, Path]:
    """The unpacked source packages of SDISTS by name, by the pip of `python`. Raises Missing."""
    with _made("sdists", SDISTS.read_bytes()) as (folder, is_there):
        if not is_there:
            wanted = ["download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation"]
            command = [str(python), *PIP, *wanted, "--require-hashes"]
            _run([*command, "--dest", str(folder), "--requirement", str(SDISTS)])
            for archive in folder.glob("*.tar.gz"):
                with tarfile.open(archive) as tar:
                    tar.extractall(folder, filter="data")
    found = (path for path in folder.iterdir() if path.is_dir())
    return {path.name.rpartition("-")[0]: path for path in found}


def node_modules(package: Path) -> Path:
    """The folder with the packages of `package`'s lock installed. Raises Missing."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise Missing("there is no node here, or no npm")
    lock = package.with_name("package-lock.json")
    with _made("node", lock.read_bytes()) as (folder, is_there):
        if not is_there:
            for file in (package, lock):
                shutil.copy(file, folder)
            _run(["npm", "ci", "--no-audit", "--no-fund", "--prefix", str(folder)])
    return folder


PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


@contextmanager
def _made(name: str, content: bytes) -> Iterator[tuple[Path, bool]]:
    """A folder for this content, and whether it is complete; it is after the block."""
    key = hashlib.sha256(content + sys.version.encode()).hexdigest()[:16]
    folder = cache() / f"{name}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        complete = folder / "complete"
        is_there = complete.exists()
        if not is_there:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        yield folder, is_there
        complete.touch()


def _run(command: list[str]) -> None:
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{command[0]}: {error}") from error
    if ended.returncode:
        said = (ended.stderr.strip() or ended.stdout.strip() or "failed").splitlines()
        raise Missing(f"the packages could not be had: {said[-1]}")
