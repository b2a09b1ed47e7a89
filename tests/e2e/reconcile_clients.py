"""The clients of reconcile.py: connections that ask, leave, and are refused.

Each keeps its connection open, asks for itself what chance says, and thinks between requests. What
it saw is kept as a `Seen`. Lives here: requests and reading. Does not: servers, judgement.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from bench import client
from tests.e2e.reconcile_judge import Seen

INSTANT, PACED, FAILING = "instant", "paced", "failing"
KINDS = {"whole": 4.0, "stream": 4.0, "leave": 2.0, "give up": 1.0, "fail": 1.0, "fail late": 1.0}
"""What is asked -> how often. `leave`: a stream that its client ends; `give up`: before the answer;
`fail`, `fail late`: of a model that fails, whole and streamed."""
MOST_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant's key."""

    tenant_id: str
    secret: str


@dataclass(frozen=True, slots=True)
class Plan:
    """`think_s`: between two requests, at most. `seconds`: no new one after so many."""

    url: str
    callers: Sequence[Caller]
    connections: int
    seconds: float
    think_s: float
    seed: int


async def load(plan: Plan) -> list[Seen]:
    """All that was seen, once every client has its last answer."""
    until_s = time.monotonic() + plan.seconds
    seen: list[Seen] = []
    async with client.new_session() as session:

        async def connection(number: int) -> None:
            rng = random.Random(plan.seed * 100_000 + number)
            while time.monotonic() < until_s:
                await asyncio.sleep(rng.uniform(0.0, plan.think_s))
                seen.append(await ask(session, plan.url, rng.choice(plan.callers), rng))

        await asyncio.gather(*(connection(number) for number in range(plan.connections)))
    return seen


async def ask(session: aiohttp.ClientSession, url: str, caller: Caller, rng: random.Random) -> Seen:
    """One request."""
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    one = Seen(caller.tenant_id)
    streams = kind in ("stream", "leave", "fail late")
    model = FAILING if kind.startswith("fail") else PACED
    if kind == "whole":
        model = rng.choice((INSTANT, PACED))
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "words " * rng.randrange(1, 40)}],
        "max_tokens": rng.randrange(1, MOST_TOKENS),
        **({"stream": True, "stream_options": {"include_usage": True}} if streams else {}),
    }
    await client.ask(
        session,
        url,
        caller.secret,
        body,
        one,
        leaves_after=rng.randrange(1, MOST_TOKENS // 2) if kind == "leave" else 0,
        patience_s=rng.uniform(0.0, 0.5) if kind == "give up" else None,
        timeout_s=30.0,
    )
    return one
