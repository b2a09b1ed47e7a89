"""`python -m bench.key_drills`: how soon each of several gateway processes feels a change.

The real `polyhost serve --gateway-processes N`. LANES keep-alive connections, at least one to each
process (counted in their descriptors), ask again and again with one key, while it is changed
through the operator's own verbs, ROUNDS times each with a fresh key:

    revoked       `keys revoke`                   to the beginning of the last answer of 200
    expired       its time runs out               the same
    network       another CIDR list               the same
    network_back  the list lifted                 to the beginning of the last answer of 401
    limit         a lower limit by the minute     to the beginning of the last answer of 200

counted from when the verb was called, or the time is up. `--redis` adds a Redis of its own, whose
bell tells gateways of changes. Exit status 1 where one took a second or more, or a process had no
lane.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp

from bench import machine
from bench.gateway_processes import MODEL, NAME
from bench.limits_redis import Server as RedisServer
from bench.limits_redis import default_server
from bench.servers import Polyhost, Server
from gateway.service import keys as service_keys
from gateway.service import limits as service_limits
from gateway.service.control import Control, open_control
from gateway.settings import Settings
from registry.api_keys import KeyChanges

LANES = 32
ROUNDS = 5
FELT_S = 1.0
WATCH_S = 1.6
PAUSE_S = 0.01
LIFE_S = 2.0
ELSEWHERE = ("192.0.2.0/24",)

Ask: TypeAlias = Callable[[aiohttp.ClientSession], Awaitable[int]]
Change: TypeAlias = Callable[[str], float]


class Lanes:
    """Connections that ask. `asked`: (when it began, status)."""

    def __init__(self, server: Server, key: str, chats: bool) -> None:
        self._base_url, self._chats = server.base_url, chats
        self._headers = {"authorization": f"Bearer {key}"}
        self._sessions: list[aiohttp.ClientSession] = []
        self.asked: list[tuple[float, int]] = []

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        body = {"model": NAME, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
        began_at = time.time()
        asking = (
            session.post(f"{self._base_url}/v1/chat/completions", json=body, headers=self._headers)
            if self._chats
            else session.get(f"{self._base_url}/v1/models", headers=self._headers)
        )
        async with asking as answer:
            await answer.read()
            self.asked.append((began_at, answer.status))

    async def _lane(self, session: aiohttp.ClientSession) -> None:
        while True:
            await self._ask(session)
            await asyncio.sleep(PAUSE_S)

    @contextlib.asynccontextmanager
    async def asking(self, num: int) -> AsyncIterator[None]:
        """So many at it. Each has asked once at the beginning of the block."""
        for _ in range(num):
            connector = aiohttp.TCPConnector(limit=1)
            self._sessions.append(aiohttp.ClientSession(connector=connector))
        await asyncio.gather(*(self._ask(session) for session in self._sessions))
        lanes = [asyncio.create_task(self._lane(session)) for session in self._sessions]
        try:
            yield
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)
            for session in self._sessions:
                await session.close()


def gateway_sockets(server: Server) -> dict[str, int]:
    """Sockets of each gateway process."""
    pid, found = server.process.pid, {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        if "gateway.server.front" in words:
            name = words[words.index("gateway.server.front") + 1]
            links = [str(each.readlink()) for each in Path(f"/proc/{child}/fd").iterdir()]
            found[name] = sum(link.startswith("socket:") for link in links)
    return found


async def felt(
    server: Server, key: str, change: Change, until: int, chats: bool = False
) -> dict[str, Any]:
    """Change, and how long any lane is still answered `until`."""
    lanes = Lanes(server, key, chats)
    before = gateway_sockets(server)
    async with lanes.asking(LANES // 4 if chats else LANES):
        held = {name: num - before[name] for name, num in gateway_sockets(server).items()}
        await asyncio.sleep(0.2)
        changed_at = await asyncio.to_thread(change, key.split("-")[2])
        await asyncio.sleep(max(0.0, changed_at - time.time()) + WATCH_S)
    last_at = max((at for at, status in lanes.asked if status == until), default=changed_at)
    after = [status for at, status in lanes.asked if at > changed_at + FELT_S]
    return {
        "felt_s": round(max(0.0, last_at - changed_at), 3),
        "answers_after_a_second": {str(status): after.count(status) for status in set(after)},
        "every_process": chats or min(held.values()) >= 1,
    }


def changes(control: Control) -> dict[str, tuple[Change, int, bool]]:
    """By name: what is done (it returns since when it counts), which answer should end, and whether
    it is seen by chats only."""

    def now(do: Callable[[], object]) -> float:
        began_at = time.time()
        do()
        return began_at

    def expire(key: str) -> float:
        at = time.time() + LIFE_S
        service_keys.change_key(control, key, KeyChanges(expires_at=at))
        return at

    def lower(key: str) -> float:
        return now(
            lambda: service_limits.set_limits(control, "key", key, {"requests_per_minute": 1})
        )

    def only(cidrs: tuple[str, ...] | None) -> Change:
        wanted = KeyChanges(allowed_cidrs=cidrs)
        return lambda key: now(lambda: service_keys.change_key(control, key, wanted))

    return {
        "revoked": (lambda key: now(lambda: service_keys.revoke_key(control, key)), 200, False),
        "expired": (expire, 200, False),
        "network": (only(ELSEWHERE), 200, False),
        "network_back": (only(None), 401, False),
        "limit": (lower, 200, True),
    }


async def measure(num_processes: int, redis: RedisServer | None, folder: Path) -> dict[str, Any]:
    """All changes, on one server."""
    data_dir = folder / "data"
    values = {"gateway_processes": num_processes, "redis_url": redis.url if redis else ""}
    home = Polyhost(data_dir, values)
    data_dir.mkdir()
    home.run("db", "upgrade")
    home.add_model(NAME, MODEL)
    home.new_key()
    server = home.serve("")
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        settings = Settings(data_dir=str(data_dir), redis_url=redis.url if redis else "")
        with open_control(settings, "bench") as control:
            for name, (change, until, chats) in changes(control).items():
                for number in range(ROUNDS):
                    _, key = service_keys.create_key(control, "bench", f"{name}-{number}")
                    if name == "network_back":
                        wanted = KeyChanges(allowed_cidrs=ELSEWHERE)
                        service_keys.change_key(control, key.split("-")[2], wanted)
                    await asyncio.sleep(FELT_S)
                    found.setdefault(name, []).append(await felt(server, key, change, until, chats))
    finally:
        server.process.stop()
    return {
        "benchmark": "key-drills",
        "machine": machine.facts(),
        "gateway_processes": num_processes,
        "redis": redis is not None,
        "worst_s": {name: max(one["felt_s"] for one in rounds) for name, rounds in found.items()},
        "rounds": found,
        "ok": all(
            one["felt_s"] < FELT_S and one["every_process"]
            for rounds in found.values()
            for one in rounds
        ),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.key_drills")
    parser.add_argument("--processes", type=int, default=4, metavar="N")
    parser.add_argument("--redis", action="store_true", help="limits and the bell in a Redis")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the report, as JSON")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        redis = None
        if options.redis:
            redis = RedisServer(default_server(), folder)
            redis.start()
            stack.callback(redis.kill)
        found = asyncio.run(measure(options.processes, redis, Path(folder)))
    print(json.dumps({name: found[name] for name in ("worst_s", "ok")}))
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
