"""The clients of `bench.reconcile`: connections that ask, leave, and are refused.

Each keeps its connection open, asks for itself what chance says, and thinks between requests. What
it saw is kept as a `Seen`. Lives here: requests and reading. Does not: servers, judgement.
"""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from bench.reconcile_judge import Seen

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
    timeout = aiohttp.ClientTimeout(total=60.0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def client(number: int) -> None:
            rng = random.Random(plan.seed * 100_000 + number)
            while time.monotonic() < until_s:
                await asyncio.sleep(rng.uniform(0.0, plan.think_s))
                seen.append(await ask(session, plan.url, rng.choice(plan.callers), rng))

        await asyncio.gather(*(client(number) for number in range(plan.connections)))
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
    leaves_after = rng.randrange(1, MOST_TOKENS // 2) if kind == "leave" else 0
    patience_s = rng.uniform(0.0, 0.5) if kind == "give up" else 30.0
    headers = {"authorization": f"Bearer {caller.secret}"}
    try:
        async with asyncio.timeout(patience_s):
            async with session.post(
                f"{url}/v1/chat/completions", json=body, headers=headers
            ) as answer:
                await _read(answer, one, leaves_after, streams=streams)
    except TimeoutError:
        one.end = one.end or ("left" if kind == "give up" else "broken")
    except (aiohttp.ClientError, OSError):
        one.end = one.end or "broken"
    return one


async def _read(
    answer: aiohttp.ClientResponse, one: Seen, leaves_after: int, *, streams: bool
) -> None:
    one.status = answer.status
    if answer.status != 200:
        with suppress(json.JSONDecodeError, KeyError):
            one.code = json.loads(await answer.text())["error"]["code"]
        one.end = "error" if answer.status == 500 else "refused"
        return
    if not streams:
        whole = await answer.json()
        usage = whole["usage"]
        one.request_id = whole["id"]
        one.told = (usage["prompt_tokens"], usage["completion_tokens"])
        one.end = "done"
        return
    async for line in answer.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            one.end = "done"
            return
        event = json.loads(line[6:])
        if "error" in event:
            one.end = "error"
            return
        one.request_id = event["id"]
        if event.get("usage"):
            one.told = (event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"])
        one.chunks += sum(bool(choice["delta"].get("content")) for choice in event["choices"])
        if 0 < leaves_after <= one.chunks:
            one.end = "left"
            answer.close()
            return
    one.end = "broken"
