"""A real Redis 8 for tests of vector sets, which no package of the dev extra has.

    python tests/redis8.py      gets it, and prints the command that starts it

POLYHOST_TEST_REDIS8 names the program of a server of your own. Else it is Debian trixie's package,
unpacked with the libraries it needs into a folder of the user's cache, beside whatever the system
has; nothing is installed. It comes through apt, in the archive's present revision from the mirror
that this machine's own apt uses for Debian, or else in that of SNAPSHOT: apt checks the archive's
signature of the index, and each package against the SHA-256 in the index. Tests never fetch it:
they use what is there, or are skipped and say why.
"""

import contextlib
import fcntl
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

EXTERNAL = "POLYHOST_TEST_REDIS8"
VERSION = "5:8.*"
PACKAGE = "redis-tools"  # has the server's program too
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
SNAPSHOT = "http://snapshot.debian.org/archive/debian/20251201T000000Z"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
TIMEOUT_S = 180.0
UNPACKED = ("lib", "zlib1g", PACKAGE)


class Missing(Exception):
    """Why it is not to be had."""


def folder() -> Path:
    """Where it is unpacked."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "polyhost" / "redis-8"


def command() -> list[str]:
    """What starts the server. Raises Missing."""
    external = os.environ.get(EXTERNAL)
    if external:
        return [external]
    tree = folder()
    if not (tree / "complete").exists():
        raise Missing(f"no Redis 8 here: `python tests/redis8.py` gets it, or set {EXTERNAL}")
    (libraries,) = (tree / "usr" / "lib").glob("*-linux-gnu")
    loader = next(libraries.glob("ld-linux-*.so.*"))
    program = tree / "usr" / "bin" / "redis-check-rdb"  # one program, told by its name what to be
    return [str(loader), "--library-path", str(libraries), "--argv0", "redis-server", str(program)]


def fetch() -> None:
    """Get and unpack it, unless it is there. Raises Missing."""
    with contextlib.suppress(Missing):
        command()
        return
    tree = folder()
    tree.parent.mkdir(parents=True, exist_ok=True)
    with open(tree.parent / "redis8.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (tree / "complete").exists():
            return
        with tempfile.TemporaryDirectory(dir=tree.parent) as work:
            packages = _download(Path(work))
            shutil.rmtree(tree, ignore_errors=True)
            tree.mkdir()
            for package in packages:
                if package.name.startswith(UNPACKED):
                    _run(["dpkg-deb", "-x", str(package), str(tree)])
        (tree / "complete").touch()


def _download(work: Path) -> list[Path]:
    """The package and all that it depends on, from the first archive that has it."""
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None:
        raise Missing(f"no package is known for {platform.machine()}")
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise Missing(f"it is a Debian package, and there is no {tool} here")
    mirrors = []
    for known in ("Origin: Debian", "Component: main"):  # by its name, once apt has asked it
        listed = ["--format", "$(REPO_URI)", "Created-By: Packages", known]
        mirrors += _run(["apt-get", "indextargets", *listed]).split()
    if not Path(KEYRING).exists():
        raise Missing("apt here has not the archive's keys")
    reasons = []
    for archive in (*mirrors[:1], SNAPSHOT):
        try:
            return _download_from(archive, architecture, work)
        except Missing as missing:
            reasons.append(str(missing))
    raise Missing("; ".join(reasons))


def _download_from(archive: str, architecture: str, work: Path) -> list[Path]:
    """By an apt with a state of its own."""
    for name in ("lists/partial", "archives/partial", "empty"):
        (work / name).mkdir(parents=True, exist_ok=True)
    (work / "status").touch()
    (work / "trixie.sources").write_text(
        f"Types: deb\nURIs: {archive}\nSuites: trixie\nComponents: main\nSigned-By: {KEYRING}\n"
    )
    options = {
        "Dir::State": work,
        "Dir::State::lists": work / "lists",
        "Dir::State::status": work / "status",
        "Dir::Cache": work,
        "Dir::Etc::sourcelist": work / "trixie.sources",
        "Dir::Etc::sourceparts": work / "empty",
        "Dir::Etc::preferences": work / "none",
        "Dir::Etc::preferencesparts": work / "empty",
        "APT::Architecture": architecture,
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
        "Acquire::Retries": 1,
        "Acquire::http::Timeout": 15,
        "Acquire::Check-Valid-Until": str(archive != SNAPSHOT).lower(),
    }
    apt = ["apt-get", "-q"]
    for name, value in options.items():
        apt += ["-o", f"{name}={value}"]
    _run([*apt, "update"])
    install = ["install", "--yes", "--no-install-recommends", "--download-only"]
    _run([*apt, *install, f"{PACKAGE}={VERSION}"])
    return sorted((work / "archives").glob("*.deb"))


def _run(command: list[str]) -> str:
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{command[0]}: {error}") from error
    if ended.returncode:
        lines = (ended.stderr.strip() or ended.stdout.strip() or "failed").splitlines()
        raise Missing(f"{command[0]} {command[-1]}: {lines[-1]}")
    return ended.stdout


def main() -> int:
    """0: it is there."""
    try:
        fetch()
        print(shlex.join(command()))
    except Missing as missing:
        print(f"Redis 8 could not be had: {missing}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
