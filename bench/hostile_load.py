"""All of `hostile.py` at once for a while, in a process of its own: `python -m bench.hostile_load`.

Reads an `Assault` as JSON from its standard input, writes what became of each attack to its
standard output. With `is_idle` it runs only when nobody else wants the processor (SCHED_IDLE), as
if it had a machine of its own: otherwise its own work is what others wait for.

`python -m bench.hostile_load --sink` is a server that answers whatever comes with 429 and closes:
what others feel beside an attack on it is the machine's share.
"""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import cast

import msgspec
import uvloop

from bench import hostile

_REFUSED = (
    b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: 2\r\n\r\n{}"
)


class Assault(msgspec.Struct, frozen=True):
    """On whom, by whom, for how long. `crowd`: connections held."""

    port: int
    key: str
    model: str
    crowd: int
    seconds: float
    scale: int
    is_idle: bool


class Outcome(msgspec.Struct, frozen=True):
    """By attack: how many connections ended in which way. `cpu_s`: what the attackers took."""

    attacks: dict[str, dict[str, int]]
    cpu_s: float


async def attack(plan: Assault) -> Outcome:
    """Everything at once, again and again for so long."""
    site = hostile.Site(plan.port, plan.key, plan.model, scale=plan.scale)
    found: dict[str, dict[str, int]] = {name: {} for name in hostile.ATTACKS}
    until_s = time.monotonic() + plan.seconds

    async def repeat(name: str) -> None:
        while time.monotonic() < until_s:
            try:
                outcomes = await hostile.ATTACKS[name](site)
            except OSError:  # not let in at all
                outcomes = hostile.Outcomes({"closed": 1})
            for outcome, count in outcomes.items():
                found[name][outcome] = found[name].get(outcome, 0) + count

    held = asyncio.create_task(hostile.crowd(site, plan.crowd, plan.seconds))
    await asyncio.gather(*(repeat(name) for name in hostile.ATTACKS))
    return Outcome({**found, "crowd": dict(await held)}, time.process_time())


class Sink(asyncio.Protocol):
    """Refuses, whatever it is."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """At once."""
        answering = cast(asyncio.Transport, transport)
        answering.write(_REFUSED)
        answering.close()


async def sink() -> None:
    """For ever; the port is written to the standard output."""
    server = await asyncio.get_running_loop().create_server(Sink, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def give_way() -> None:
    """Run when nobody else wants the processor. Where the kernel shares it among sessions
    (autogroups), that is said of the session, which is to be this process' own."""
    os.setsid()
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    share = Path("/proc/self/autogroup")
    if share.exists():
        share.write_text("19")


def main() -> None:
    """One of both."""
    if sys.argv[1:] == ["--sink"]:
        uvloop.run(sink())
        return
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Assault)
    if plan.is_idle:
        give_way()
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(attack(plan))))


if __name__ == "__main__":
    main()
