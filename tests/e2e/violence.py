"""Exactly once, by violence: requests while everything they need is killed with -9.

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

Then the books are compared (violence_judge.py): every request that got a token has exactly one
posting, with what the table of outcomes says; nothing else is posted; postings, roll-ups and the
export agree to the unit. Exit status 1 where anything is wrong.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
from sqlalchemy import select

from admin.context.operator_context import open_context
from admin.operations import keys as service_keys
from admin.operations import prices as service_prices
from admin.operations import tenants as service_tenants
from admin.operations import usage as service_ledger
from bench import client
from bench.client import UNREACHED
from gateway.settings.config import load_settings
from gateway.settings.settings import Settings
from registry.money.ledger import open_left
from registry.money.prices import PriceRecord
from registry.money.rollups import DAY_S, RollupRow
from registry.session import reading
from tests.e2e.violence_judge import (
    CACHED_NANOS,
    COMPLETION_NANOS,
    PROMPT_NANOS,
    Seen,
    is_checkpoint,
    judge,
)
from tests.e2e.violence_server import House
from tests.postgres import own_server
from tests.registry.postings_kit import postings as stored_postings

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
    while seen.end == "" or seen.code == UNREACHED:
        if seen.code:
            await asyncio.sleep(0.1)
        seen.code = ""
        leaves = seen.leaves_after
        await client.ask(session, house.server.url, seen.secret, body, seen, leaves_after=leaves)


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
    async with client.new_session(force_close=True) as session:

        async def caller(number: int) -> None:
            rng = random.Random(seed * 1000 + number)
            for one in waiting:
                await ask(session, house, one, rng)

        striking = asyncio.create_task(strike(house, kills, kinds, random.Random(seed)))
        await asyncio.gather(*(caller(number) for number in range(width)))
        done = await striking
    await asyncio.to_thread(house.server.wait_until, lambda: is_settled(house), 60.0)
    return done


def is_settled(house: House) -> bool:
    """Whether nothing is left to post."""
    series = house.server.metrics()
    return not series["ledger_open"] and not series["ledger_pending"]


def prepare(settings: Settings, number: int, seed: int) -> list[Seen]:
    """Prices, and a key for each request."""
    rng = random.Random(seed)
    seen = []
    with open_context(settings, "violence") as context:
        begins_at = 0.0
        for model in MODELS:
            price = PriceRecord(model, 0.0, PROMPT_NANOS, CACHED_NANOS, COMPLETION_NANOS)
            begins_at = service_prices.set_price(context, price).valid_from
        service_tenants.create_tenant(context, "violence")
        for one in range(number):
            record, secret = service_keys.create_key(context, "violence", f"request-{one}")
            leaves = rng.randrange(1, 100) if rng.random() < 0.3 else 0
            seen.append(Seen(record.id, secret, leaves, whole=rng.random() < 0.15))
    time.sleep(max(0.0, begins_at - time.time()))  # what is asked before is free of charge
    return seen


def audit(settings: Settings, seen: Sequence[Seen]) -> tuple[list[str], Mapping[str, object]]:
    """Compare everything that is in the database with what clients saw."""
    with open_context(settings, "violence") as context:
        service_ledger.catch_up(context)
        service_ledger.check_ledger(context)
        with reading(context.engine) as session:
            postings = stored_postings(session)
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
        stack.callback(lambda: house.server.stop())
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
        asyncio.run(house.wait_ready())
        seen = prepare(house.settings, requests, seed)
        time.sleep(2 * house.settings.key_cache_poll_s)
        done = asyncio.run(violence(house, seen, kills, width, kinds, seed))
        wrong, told = audit(house.settings, seen)
    took = {"database": database, "kills": dict(done), "seconds": round(time.monotonic() - began_s)}
    return wrong, {**took, **told}
