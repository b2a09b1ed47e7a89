"""What one streamed chat goes through, as the interpreter sees it: files, functions, forms, owners.

    python -m bench.request_path [--tokens 16] [--root DIR] [--names]

Starts `polyhost serve --demo` of the tree at `--root` on loopback, with a `sitecustomize` module
(`bench/request_path_probe.py`) that sets a profile function in each of its processes
(`sys.setprofile`; threads too). One chat warms the server, then the profile collects while others
are streamed. Prints a JSON object. It says nothing of C++ and nothing of time.

    files, functions         Python files of the product and functions of them that were called;
                             what the server does beside it (polls, statuses) counts too
    calls_per_further_token  the difference of a long and a short stream
    forms                    classes of the product whose instances hold all of what was asked: both
                             messages of the chat, or the token ids of its prompt. Looked at are the
                             arguments and the results of every call of the product. An object that
                             holds one message belongs to the one that holds both; an object that
                             holds another form holds nothing itself
    owners                   attributes of objects that were there before the chat, in which the
                             chat's id can be found while it is streamed (in plain containers, and
                             in objects that were made since) and no longer once it has ended:
                             tables that must be told of its end
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from bench.request_path_probe import WORDS

PRODUCT = ("gateway", "engine", "kernels", "registry", "admin")
READY_TIMEOUT_S = 180.0
SETTLE_S = 0.5
"""After a stream's end: for its posting."""
LOOK_TOKENS = 400
"""So many that the chat still runs when all processes have looked."""

Calls: TypeAlias = dict[tuple[str, str], int]

PROBE = Path(__file__).with_name("request_path_probe.py")
ANSWER_TIMEOUT_S = 60.0


class Probes:
    """The probes in all processes of a server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0

    def ask(self, word: str, argument: object = None) -> list[Any]:
        """What each process answers. Raises RuntimeError where one does not."""
        self._number += 1
        part = self._folder / "command.part"
        part.write_text(json.dumps([self._number, word, argument]))
        part.replace(self._folder / "command")
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        while time.monotonic() < deadline_s:
            pids = [int(file.stem) for file in self._folder.glob("*.pid")]
            answers = [self._folder / f"{pid}.{self._number}" for pid in pids if _lives(pid)]
            if all(answer.exists() for answer in answers):
                return [json.loads(answer.read_text()) for answer in answers]
            time.sleep(0.02)
        raise RuntimeError(f"a process did not answer {word!r}")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def chat(port: int, key: str, max_tokens: int, on_id: Callable[[str], None] | None = None) -> None:
    """Streams one chat of the model `sherlock`. `on_id` is called at its first event."""
    body = {
        "model": "sherlock",
        "stream": True,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "messages": [
            {"role": role, "content": text}
            for role, text in zip(("system", "user"), WORDS, strict=True)
        ],
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {key}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if on_id is not None and line.startswith(b"data: {"):
                on_id(json.loads(line[6:])["id"])
                on_id = None


def calls_of(probes: Probes, port: int, key: str, max_tokens: int) -> Calls:
    """Calls by file and function while one chat was streamed."""
    probes.ask("calls")
    chat(port, key, max_tokens)
    time.sleep(SETTLE_S)
    calls: Calls = {}
    for answer in probes.ask("report"):
        for path, name, count in answer["calls"]:
            if path.split("/")[0] in PRODUCT:
                calls[path, name] = calls.get((path, name), 0) + count
    return calls


def forms_of(probes: Probes, port: int, key: str, tokens: int) -> list[str]:
    """The first chat finds out the token ids, the second looks for them."""
    ids: list[int] = []
    for _ in range(2):
        probes.ask("forms", ids)
        chat(port, key, tokens)
        time.sleep(SETTLE_S)
        reports = probes.ask("report")
        ids = next(report["ids"] for report in reports if report["ids"])
    return sorted({form for report in reports for form in report["forms"]})


def owners_of(probes: Probes, port: int, key: str) -> list[str]:
    """Who has the chat while it is streamed, and no longer when it has ended."""
    found: list[str] = []
    request_id = ""

    def look(name: str) -> None:
        nonlocal request_id
        request_id = name.partition("-")[2]
        found.extend(owner for answer in probes.ask("look", request_id) for owner in answer)

    probes.ask("owners")
    chat(port, key, LOOK_TOKENS, look)
    time.sleep(SETTLE_S)
    left = {owner for answer in probes.ask("look", request_id) for owner in answer}
    return sorted(set(found) - left)


def measure(root: Path, tokens: int, names: bool) -> dict[str, Any]:
    """Raises RuntimeError where the server does not get ready."""
    with tempfile.TemporaryDirectory(prefix="polyhost-path-") as text:
        folder = Path(text)
        shutil.copy(PROBE, folder / "sitecustomize.py")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environment = os.environ | {
            "PYTHONPATH": f"{folder}{os.pathsep}{root}",
            "PATH_ROOT": str(root),
            "PATH_FOLDER": str(folder),
            "PATH_PACKAGES": ",".join(PRODUCT),
        }
        command = [sys.executable, "-m", "gateway", "serve", "--demo", "--port", str(port)]
        with open(folder / "out", "w") as out:
            server = subprocess.Popen(
                [*command, "--data-dir", str(folder / "data")],
                cwd=root,
                env=environment,
                stdout=out,
                stderr=subprocess.DEVNULL,
            )
        try:
            key = _ready(folder / "out", port, server)
            probes = Probes(folder)
            chat(port, key, tokens)
            long = calls_of(probes, port, key, 2 * tokens)
            short = calls_of(probes, port, key, tokens)
            forms = forms_of(probes, port, key, tokens)
            owners = owners_of(probes, port, key)
        finally:
            server.terminate()
            server.wait(60)
    files = sorted({path for path, _ in short})
    by_package = {p: sum(f.startswith(p + "/") for f in files) for p in PRODUCT}
    found: dict[str, Any] = {
        "files": len(files),
        "files_by_package": by_package,
        "functions": len(short),
        "calls": sum(short.values()),
        "calls_per_further_token": round((sum(long.values()) - sum(short.values())) / tokens, 1),
        "forms": len(forms),
        "owners": len(owners),
    }
    listed = {"names": files, "forms_names": forms, "owners_names": owners}
    return found | (listed if names else {})


def _ready(out: Path, port: int, server: "subprocess.Popen[bytes]") -> str:
    """Waits for the server; returns the demo tenant's key."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s and server.poll() is None:
        words = out.read_text().split()
        keys = [word for word in words if word.startswith("sk-ph-")]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=2):
                if keys:
                    return keys[0]
        except OSError:
            pass
        time.sleep(0.2)
    raise RuntimeError("the server did not get ready")


def main() -> None:
    """Prints what was counted."""
    parser = argparse.ArgumentParser(prog="python -m bench.request_path", description=__doc__)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--names", action="store_true", help="list them, too")
    options = parser.parse_args()
    print(json.dumps(measure(options.root.resolve(), options.tokens, options.names), indent=1))


if __name__ == "__main__":
    main()
