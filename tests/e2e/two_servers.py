"""Two servers with one dispatcher, one PostgreSQL and two workers elsewhere, all on loopback; what
is done to one of them, and what the clients of the other one see of it."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench import client
from bench.client import Answer
from bench.processes import below, free_port
from bench.servers import Polyhost, Server
from gateway.workers.curve_keys import key_pair
from registry.money.ledger import open_left
from registry.servers import dispatcher_leases
from registry.session import make_engine, reading
from tests.e2e.server import polyhost, usage_rows
from tests.e2e.test_failures import begin
from tests.e2e.test_far_workers import free_ports
from tests.e2e.test_postgresql import move
from tests.e2e.test_processes import active_dispatcher
from tests.e2e.test_workers import NUM_STREAMS, bodies
from tests.postgres import own_server

NAMES = ("server-1", "server-2")
PATIENCE_S = 60.0
"""Until the other server grants again; the goal is 3 to 4 s."""


@dataclass
class Pair:
    """Two servers, by name. `texts`: undisturbed answers."""

    url: str
    folders: dict[str, Path]
    settings: dict[str, dict[str, str]]
    servers: dict[str, Server] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)

    def start(self, name: str) -> None:
        """Its processes; the same log goes on."""
        config = str(self.folders[name].parent / "polyhost.toml")
        product = Polyhost(self.folders[name], self.settings[name])
        self.servers[name] = product.start("--config", config).wait_ready()

    def active(self) -> str:
        """Whose dispatcher has the row."""
        engine = make_engine(self.url)
        row = dispatcher_leases.read(engine)
        engine.dispose()
        assert row is not None
        (name,) = [n for n in NAMES if self.settings[n]["dispatcher_address"] == row.address]
        return name

    def other(self, name: str) -> str:
        """The other one."""
        return NAMES[1 - NAMES.index(name)]

    def send_all(self, name: str, number: signal.Signals) -> None:
        """To all processes of a server: as if its machine had stopped."""
        pid = self.servers[name].process.pid
        for each in (pid, *below(pid)):
            os.kill(each, number)

    def heal(self, name: str, number: signal.Signals) -> None:
        """After `send_all`: it serves again."""
        if number == signal.SIGSTOP:
            self.send_all(name, signal.SIGCONT)
        elif self.servers[name].process.has_ended:
            self.servers[name].process.stop()
            self.start(name)
        for server in self.servers.values():
            server.wait_until(server.is_ready)

    def open_records(self) -> int:
        """Of all servers."""
        engine = make_engine(self.url)
        with reading(engine) as session:
            found = len(open_left(session))
        engine.dispose()
        return found


@contextmanager
def home(root: Path, folders: Mapping[str, Path]) -> Iterator[str]:
    """Two workers of a third machine; the tables for polyhost.toml."""
    settings = {
        "POLYHOST_DATA_DIR": str(root / "home"),
        "POLYHOST_NUM_WORKERS": "2",
        "POLYHOST_MAX_NUM_SEQS": "2",  # most requests wait when something dies
        "POLYHOST_DEVICE_BUDGET_BYTES": str(18 << 20),
        "POLYHOST_HOST_TIER_BYTES": "0",
    }
    keys = [f"--server-key={key_pair(folder).public_key}" for folder in folders.values()]
    packs = ("--packs", str(folders[NAMES[0]] / "packs"))
    words = ("workers", "serve", "--listen", f"127.0.0.1:{free_ports()}", *keys, *packs)
    with (
        (root / "home.log").open("wb") as out,
        subprocess.Popen(
            [sys.executable, "-m", "gateway", *words],
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            stderr=out,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            told = ""
            while told.count("public_key") < 2:
                told += process.stdout.readline()
            tables = re.findall(r"\[\[workers\]\]\nendpoint = .*\npublic_key = .*\n", told)
            yield "".join(f'{table}name = "far-{i}"\n' for i, table in enumerate(tables))
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


@contextmanager
def two_servers(root: Path, folders: Mapping[str, Path]) -> Iterator[Pair]:
    """Of data folders that no server had before: with a SQLite database that both begin with. Its
    tenants' commands go to PostgreSQL meanwhile."""
    with ExitStack() as stack:
        url = stack.enter_context(own_server()).url("postgres")
        move(f"sqlite:///{folders[NAMES[0]] / 'polyhost.db'}", url)
        assert polyhost(root, "servers", "cert", *NAMES, "--dir", str(root / "ca")).returncode == 0
        tables = stack.enter_context(home(root, folders))
        addresses = {name: f"127.0.0.1:{free_port()}" for name in NAMES}
        made = Pair(url, dict(folders), {})
        for name, folder in folders.items():
            (folder / "polyhost.db").unlink()
            shutil.copytree(root / "ca" / name, folder / "cluster")
            peers = [address for other, address in addresses.items() if other != name]
            text = f"dispatcher_peers = {json.dumps(peers)}\n{tables}"
            (folder.parent / "polyhost.toml").write_text(text)
            made.settings[name] = {
                "database_url": url,
                "dispatcher_address": addresses[name],
                "queue_timeout_s": "120",
                "dispatcher_timeout_s": "6",
                "server_lost_after_s": "8",
                "ledger_checkpoint_tokens": "8",
            }
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("POLYHOST_DATABASE_URL", url)
        for name in NAMES:
            made.start(name)
        try:
            yield made
            assert [server.stop() for server in made.servers.values()] == [0, 0]
        finally:
            for server in made.servers.values():
                server.process.stop()


@asynccontextmanager
async def streams(server: Server, key: str) -> AsyncIterator[list[Answer]]:
    """All of them under way; at the end, all have ended."""
    async with client.new_session(force_close=True) as session:
        seen, ended = await begin(server, key, session, bodies())
        yield seen
        await ended


async def undisturbed(pair: Pair, key: str) -> list[str]:
    """The texts, asked for once, through each server."""
    if not pair.texts:
        for server in pair.servers.values():
            async with streams(server, key) as seen:
                pass
            assert [(one.end, one.code) for one in seen] == [("done", "")] * NUM_STREAMS
            assert pair.texts in ([], [one.text for one in seen])
            pair.texts = [one.text for one in seen]
    return pair.texts


def connected_at(server: Server) -> float:
    """When its gateway was taken by a dispatcher last, as its log says (epoch seconds)."""
    lines = server.process.read_log().splitlines()
    return float(json.loads([one for one in lines if "dispatcher connected" in one][-1])["at"])


async def has_dispatcher(server: Server, began_at: float) -> float:
    """Seconds from `began_at` until its gateway has another dispatcher, which grants from then
    on."""
    await asyncio.to_thread(server.wait_until, lambda: connected_at(server) >= began_at, PATIENCE_S)
    return connected_at(server) - began_at


async def disturb(
    pair: Pair, number: signal.Signals, key: str, *, whole: bool
) -> tuple[float, list[Answer]]:
    """Do it to the active dispatcher, or its whole server, under streams through the other server.
    Seconds until that one had a dispatcher again, and what its clients saw; all is well again."""
    first = pair.active()
    server = pair.servers[pair.other(first)]
    async with streams(server, key) as seen:
        began_at = time.time()
        if whole:
            pair.send_all(first, number)
        else:
            os.kill(active_dispatcher(pair.servers[first]), number)
        took_s = await has_dispatcher(server, began_at)
    if whole:
        assert pair.active() != first
        await asyncio.to_thread(pair.heal, first, number)
    else:
        for each in pair.servers.values():
            await asyncio.to_thread(each.wait_until, each.is_ready)
    return took_s, seen


def check(pair: Pair, tenant: str, seen: Sequence[Answer]) -> None:
    """Every client saw what it would have seen, and pays for it once."""
    assert [(one.end, one.code) for one in seen] == [("done", "")] * NUM_STREAMS
    assert [one.text for one in seen] == pair.texts
    for server in pair.servers.values():
        server.wait_until(server.has_posted)
    found = usage_rows(pair.folders[NAMES[0]], tenant=tenant)
    posted = Counter(row["request_id"] for row in found)
    rows = {row["request_id"]: row for row in found}
    for one in seen:
        row = rows[one.request_id]
        assert posted[one.request_id] == 1
        assert row["outcome"] == "finished"
        assert (row["prompt_tokens"], row["completion_tokens"]) == one.told
