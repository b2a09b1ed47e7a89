"""A real Polyhost server for tests (bench.servers), and the product's own commands."""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from admin.cli.main import main
from bench.processes import below
from bench.servers import Polyhost, Server, total


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def polyhost(data_dir: Path, *arguments: str) -> Done:
    """Run the command line to its end, in this process: one of its own is a second of imports."""
    # Exports write bytes: standard output has to be a stream of text over one.
    raw, err = io.BytesIO(), io.StringIO()
    with (
        io.TextIOWrapper(raw, encoding="utf-8", newline="", write_through=True) as out,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = main([*arguments, "--data-dir", str(data_dir)])
        told = raw.getvalue().decode()
    return Done(status, told, err.getvalue())


def polyhost_process(data_dir: Path, *arguments: str) -> Done:
    """The same in a process of its own, as a user's shell does it."""
    done = subprocess.run(
        [sys.executable, "-m", "gateway", *arguments, "--data-dir", str(data_dir)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def polyhost_json(data_dir: Path, *arguments: str) -> Any:
    """Run a command that must succeed, and read what its --json says."""
    done = polyhost(data_dir, *arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def usage_rows(
    data_dir: Path, command: Callable[..., Done] = polyhost, tenant: str = ""
) -> list[dict[str, Any]]:
    """What was posted, of all tenants or of one."""
    done = command(data_dir, "usage", "export", "--format", "jsonl")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return [row for row in rows if tenant in ("", row["tenant_name"])]


def owned_pages(server: Server) -> float:
    """Pages of the arena that are not free."""
    series = server.metrics()
    num_pages = total(series, "arena_pages")
    assert num_pages > 0
    return num_pages - total(series, "arena_pages", 'kind="free"')


def child_pids(server: Server, word: str) -> list[int]:
    """This server's processes whose command line has the word."""
    return [pid for pid, command in below(server.process.pid).items() if word in command]


@contextlib.contextmanager
def serving(data_dir: Path, *arguments: str, **environment: str) -> Iterator[Server]:
    """`polyhost serve` until the block ends."""
    settings = {name.removeprefix("POLYHOST_"): value for name, value in environment.items()}
    server = Polyhost(data_dir, settings).serve("", *arguments)
    with server.process:
        yield server
