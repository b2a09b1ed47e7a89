"""requirements.lock: the hashes of all wheels that `make setup-locked` may install, from
constraints.txt.

    python -m tests.lock_file     writes it anew, with uv (which reads a package index)

pip takes hashes from requirements alone. Hashes in constraints.txt would make it refuse Polyhost
itself, which is installed in place and has no single file to hash (pip issue 12956). torch is left
out: which build of it is installed is the index's decision.
"""

import re
import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
CONSTRAINTS = ROOT / "constraints.txt"
NOT_LOCKED = "torch"
COMMAND = ("uv", "pip", "compile", "--quiet", "--no-deps", "--universal", "--python-version=3.11")
HEAD = """\
# Wheels for Linux on x86-64 and aarch64, CPython 3.11 to 3.14: `make setup-locked` installs these
# and no others. Made from constraints.txt by `python -m tests.lock_file`; do not edit.
"""
_PIN = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE | re.ASCII)
_PLATFORM = re.compile(r"any|manylinux\w*_(?:x86_64|aarch64)")
_PYTHON = re.compile(r"(?:py3|py2\.py3|cp3\d+)-(?:none|abi3|cp31[1-4])")


def pins(text: str) -> dict[str, str]:
    """Version by name, of constraints or of the lock. Names in small letters, with hyphens."""
    found = _PIN.findall(text)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def is_ours(wheel: str) -> bool:
    """Whether a wheel of this name is for a platform that Polyhost runs on."""
    *_, python, abi, platforms = wheel.removesuffix(".whl").split("-")
    is_python = any(_PYTHON.fullmatch(f"{each}-{abi}") for each in (python, *python.split(".")))
    return is_python and any(_PLATFORM.fullmatch(each) for each in platforms.split("."))


def render(packages: list[dict[str, Any]]) -> str:
    """The lock, from the packages of a pylock.toml (PEP 751)."""
    lines = []
    for package in packages:
        wheels = [each for each in package.get("wheels", ()) if is_ours(_name_of(each))]
        hashes = sorted({each["hashes"]["sha256"] for each in wheels})
        pinned = [
            f"{package['name']}=={package['version']}",
            *(f"--hash=sha256:{h}" for h in hashes),
        ]
        lines.append(" \\\n    ".join(pinned))
    return HEAD + "\n".join(lines) + "\n"


def _name_of(wheel: dict[str, Any]) -> str:
    return str(wheel.get("name") or wheel["url"].rpartition("/")[2])


def main() -> None:
    """Write the lock. uv has to be on the PATH."""
    wanted = pins(CONSTRAINTS.read_text(encoding="utf-8"))
    lines = [f"{name}=={version}" for name, version in wanted.items() if name != NOT_LOCKED]
    with tempfile.TemporaryDirectory() as folder:
        asked, told = Path(folder) / "asked.txt", Path(folder) / "pylock.toml"
        asked.write_text("\n".join(lines))
        subprocess.run([*COMMAND, "--output-file", str(told), str(asked)], check=True)
        packages = tomllib.loads(told.read_text(encoding="utf-8"))["packages"]
    LOCK.write_text(render(packages), encoding="utf-8")


if __name__ == "__main__":
    main()
