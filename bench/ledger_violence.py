"""Exactly once, by violence: requests while everything they need is killed with -9.

    python -m bench.ledger_violence --database postgresql --requests 2000 --kills 100

A real server with the demo models; each request has a key of its own, so that every posting finds
its request whatever the client learned of it. Streams are counted in tokens (logprobs), a part of
the clients goes away in the middle, some ask for whole answers. Meanwhile, at random moments:

    server      kill -9 of the gateway (of the supervisor where there are several processes), which
                is started again
    child       kill -9 of one of its processes: a gateway, the dispatcher
    worker      kill -9 of the engine's process
    both        the two at once: only the last checkpoint is left
    database    PostgreSQL: kill -9 of all its processes, back a second later; SQLite: another
                process holds the write lock meanwhile

Then the books are compared (ledger_judge.py): every request that got a token has exactly one
posting, with what the table of outcomes says; nothing else is posted; postings, roll-ups and the
export agree to the unit. Exit status 1 where anything is wrong.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
from sqlalchemy import select

from bench.ledger_house import House
from bench.ledger_judge import (
    CACHED_NANOS,
    COMPLETION_NANOS,
    PROMPT_NANOS,
    Seen,
    is_checkpoint,
    judge,
)
from gateway.config import load_settings
from gateway.service import keys as service_keys
from gateway.service import ledger as service_ledger
from gateway.service import prices as service_prices
from gateway.service import tenants as service_tenants
from gateway.service.control import open_control
from gateway.settings import Settings
from registry.ledger import iter_usage, open_left
from registry.prices import PriceRecord
from registry.rollups import DAY_S, RollupRow
from registry.session import reading
from tests.postgres import own_server

MODELS = ("shakespeare", "sherlock", "python")
KINDS = ("server", "child", "worker", "both", "database")


async def ask(session: aiohttp.ClientSession, house: House, seen: Seen, rng: random.Random) -> None:
    """One request, tried until a server takes the connection; never sent twice."""
    body = {
        "model": rng.choice(MODELS),
        "messages": [{"role": "user", "content": f"Say {rng.random()} in words of your own."}],
        "max_tokens": rng.randrange(4, 160),
        "temperature": 1.0,
        "seed": rng.randrange(1 << 30),
        "logprobs": True,
        **({} if seen.whole else {"stream": True, "stream_options": {"include_usage": True}}),
    }
    headers = {"authorization": f"Bearer {seen.secret}"}
    while not seen.end:
        try:
            async with session.post(
                f"{house.url}/v1/chat/completions", json=body, headers=headers
            ) as answer:
                await _read(answer, seen)
        except aiohttp.ClientConnectorError:
            await asyncio.sleep(0.1)  # nobody listens: nothing was sent
        except (aiohttp.ClientError, OSError, TimeoutError):
            seen.end = "broken"


async def _read(answer: aiohttp.ClientResponse, seen: Seen) -> None:
    if answer.status != 200:
        await answer.read()
        seen.end = "refused"
        return
    if seen.whole:
        whole = await answer.json()
        seen.request_id = whole["id"]
        seen.tokens = len(whole["choices"][0]["logprobs"]["content"])
        seen.told = (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"])
        seen.end = "done"
        return
    async for line in answer.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            seen.end = "done"
            return
        event = json.loads(line[6:])
        if "error" in event:
            seen.end = "error"
            return
        seen.request_id = event["id"]
        if event.get("usage"):
            usage = event["usage"]
            seen.told = (usage["prompt_tokens"], usage["completion_tokens"])
        for choice in event["choices"]:
            seen.tokens += len((choice.get("logprobs") or {}).get("content") or ())
        if 0 < seen.leaves_after <= seen.tokens:
            seen.end = "left"
            return
    seen.end = "broken"


async def strike(
    house: House, kills: int, kinds: Sequence[str], rng: random.Random
) -> Counter[str]:
    """So many kills, one after the other, each while the server serves."""
    done: Counter[str] = Counter()
    while done.total() < kills:
        await house.wait_ready()
        await asyncio.sleep(rng.uniform(0.1, 1.5))
        done[await house.kill(kinds[done.total() % len(kinds)])] += 1
    await house.wait_ready()
    return done


async def violence(
    house: House, seen: Sequence[Seen], kills: int, width: int, kinds: Sequence[str], seed: int
) -> Counter[str]:
    """Returns what was killed once every request has ended and every posting is in the database."""
    waiting = iter(seen)
    timeout = aiohttp.ClientTimeout(total=60.0)
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def client(number: int) -> None:
            rng = random.Random(seed * 1000 + number)
            for one in waiting:
                await ask(session, house, one, rng)

        striking = asyncio.create_task(strike(house, kills, kinds, random.Random(seed)))
        await asyncio.gather(*(client(number) for number in range(width)))
        done = await striking
    for name in ("polyhost_ledger_open", "polyhost_ledger_pending"):
        deadline_s = time.monotonic() + 60.0
        while await asyncio.to_thread(house.metric, name):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{name} stays\n{house.log_tail()}")
            await asyncio.sleep(0.1)
    return done


def prepare(settings: Settings, number: int, seed: int) -> list[Seen]:
    """Prices, and a key for each request."""
    rng = random.Random(seed)
    seen = []
    with open_control(settings, "violence") as control:
        begins_at = 0.0
        for model in MODELS:
            price = PriceRecord(model, 0.0, PROMPT_NANOS, CACHED_NANOS, COMPLETION_NANOS)
            begins_at = service_prices.set_price(control, price).valid_from
        service_tenants.create_tenant(control, "violence")
        for one in range(number):
            record, secret = service_keys.create_key(control, "violence", f"request-{one}")
            leaves = rng.randrange(1, 100) if rng.random() < 0.3 else 0
            seen.append(Seen(record.id, secret, leaves, whole=rng.random() < 0.15))
    time.sleep(max(0.0, begins_at - time.time()))  # what is asked before is free of charge
    return seen


def audit(settings: Settings, seen: Sequence[Seen]) -> tuple[list[str], Mapping[str, object]]:
    """Compare everything that is in the database with what clients saw."""
    with open_control(settings, "violence") as control:
        service_ledger.catch_up(control)
        service_ledger.check_ledger(control)
        with reading(control.engine) as session:
            postings = [row.posting for row in iter_usage(session, 0.0, 1e12)]
            left = open_left(session)
            sums = session.scalars(select(RollupRow.cost_nanos).where(RollupRow.span_s == DAY_S))
            rolled = sum(sums)
    wrong = judge(seen, postings, settings.ledger_checkpoint_tokens)
    wrong += [f"still open: {record}" for record in left]
    total = sum(posting.cost_nanos for posting in postings)
    if rolled != total:
        wrong.append(f"roll-ups say {rolled}, postings {total}")
    told = {
        "requests": len(seen),
        "ends": dict(Counter(one.end for one in seen)),
        "postings": dict(Counter(posting.outcome for posting in postings)),
        "recovered": dict(Counter(p.outcome for p in postings if p.kind == "recovered")),
        "checkpointed": dict(Counter(p.outcome for p in postings if is_checkpoint(p))),
        "tokens_seen": sum(one.tokens for one in seen),
        "tokens_billed": sum(p.completion_tokens for p in postings if p.outcome != "failed"),
        "nanos": total,
        "wrong": len(wrong),
    }
    return wrong, told


@contextmanager
def housed(
    folder: Path, database: str, processes: int, checkpoint_tokens: int, seed: int
) -> Iterator[House]:
    """A server's folder and database; the server is stopped at the end."""
    with ExitStack() as stack:
        postgres = None
        if database == "postgresql":
            postgres = stack.enter_context(own_server({"fsync": "on", "full_page_writes": "on"}))
        settings = load_settings(
            overrides={
                "data_dir": str(folder / "data"),
                "database_url": "" if postgres is None else postgres.url("postgres"),
                "ledger_checkpoint_tokens": checkpoint_tokens,
                "gateway_processes": processes,
            },
            environ={},
        )
        house = House(settings, postgres, random.Random(seed))
        stack.callback(house.stop)
        yield house


def run(
    folder: Path,
    database: str,
    requests: int,
    kills: int,
    *,
    width: int = 8,
    processes: int = 1,
    checkpoint_tokens: int = 16,
    kinds: Sequence[str] = KINDS,
    seed: int = 1,
) -> tuple[list[str], Mapping[str, object]]:
    """What is wrong, and figures."""
    began_s = time.monotonic()
    with housed(folder, database, processes, checkpoint_tokens, seed) as house:
        house.start()
        asyncio.run(house.wait_ready())
        seen = prepare(house.settings, requests, seed)
        time.sleep(2 * house.settings.key_cache_poll_s)
        done = asyncio.run(violence(house, seen, kills, width, kinds, seed))
        wrong, told = audit(house.settings, seen)
    took = {"database": database, "kills": dict(done), "seconds": round(time.monotonic() - began_s)}
    return wrong, {**took, **told}


def main() -> int:
    """Prints what is wrong and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--at-a-time", type=int, default=8)
    parser.add_argument("--processes", type=int, default=1, help="gateways")
    parser.add_argument("--checkpoint-tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wrong, told = run(
            Path(folder),
            options.database,
            options.requests,
            options.kills,
            width=options.at_a_time,
            processes=options.processes,
            checkpoint_tokens=options.checkpoint_tokens,
            seed=options.seed,
        )
    for line in wrong[:50]:
        print(line)
    print(json.dumps(told))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
