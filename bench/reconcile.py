"""Do clients, limits and ledger still agree after minutes of everything at once?

    python -m bench.reconcile --seconds 600 [--gateway-processes 2] --output FILE

The real server with a worker behind the real protocol whose tokens cost nothing
(`gateway_worker.py`): 200 tenants, 500 open connections, streams and whole answers, clients that
leave, models that fail, the cache off. Of four tenants one has a hard budget, one a budget and few
places at a time, one a limit of tokens a day, one a limit of requests a minute; budgets are small,
so that many are used up in the middle. At the end:

    every posting is of a request that a client saw as its table of outcomes says, and costs that
    no hard budget and no day's tokens are overrun, by a unit
    nothing is held: no reservation, no open record, nothing that waits or runs
    to the token: of each budget that is nearly used up, the answer that it just pays for is given,
                  and one that is longer by a token is refused; of each limit of tokens the header
                  says what is left
    memory is flat: the slope of the server's resident memory over the second half

Judgement is reconcile_judge.py's, requests are reconcile_clients.py's. Exit status 1 where anything
is wrong. Stops by itself.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.gateway import MODEL, gateway_pids, rss_mib
from bench.machine import facts
from bench.reconcile_clients import FAILING, INSTANT, PACED, Caller, Plan, load
from bench.reconcile_judge import (
    CACHED_NANOS,
    COMPLETION_NANOS,
    PROMPT_NANOS,
    Promise,
    Seen,
    affordable,
    judge,
    slope_mib_min,
    spent_nanos,
    used_tokens,
)
from bench.servers import Polyhost
from gateway.config import load_settings
from gateway.service import keys as service_keys
from gateway.service import ledger as service_ledger
from gateway.service import limits as service_limits
from gateway.service import prices as service_prices
from gateway.service import tenants as service_tenants
from gateway.service.control import open_control
from registry.ledger import Posting, iter_usage, open_left
from registry.prices import PriceRecord
from registry.session import reading

MODELS = (INSTANT, PACED, FAILING)
PROBE = [{"role": "user", "content": "What is left?"}]
SAMPLE_S = 2.0
QUIET_S = 60.0
MOST_PROBED = 256
"""An answer as long as that is not asked for: budgets with more left are not probed."""
FLAT_MIB_MIN = 2.0
"""More than that is no flat memory, in a run that is long enough to tell."""
LONG_S = 300.0
IDLE = (
    "polyhost_limit_reservations_open",
    "polyhost_ledger_open",
    "polyhost_ledger_pending",
)


@dataclass(slots=True)
class World:
    """What was set up."""

    callers: list[Caller]
    promises: dict[str, Promise] = field(default_factory=dict)


def prepare(data_dir: Path, num_tenants: int, seconds: float, seed: int) -> World:
    """Prices, tenants, keys, and limits that some use up within the time."""
    rng = random.Random(seed)
    world = World([])
    settings = load_settings(overrides={"data_dir": str(data_dir)}, environ={})
    with open_control(settings, "reconcile") as control:
        for model in MODELS:
            price = PriceRecord(model, 0.0, PROMPT_NANOS, CACHED_NANOS, COMPLETION_NANOS)
            service_prices.set_price(control, price)
        for number in range(num_tenants):
            tenant = service_tenants.create_tenant(control, f"tenant-{number}")
            _, secret = service_keys.create_key(control, tenant.id, "key")
            limits, promise = _limits(number, seconds, rng)
            service_limits.set_limits(control, "tenant", tenant.id, limits)
            world.callers.append(Caller(tenant.id, secret))
            world.promises[tenant.id] = promise
    return world


def _limits(number: int, seconds: float, rng: random.Random) -> tuple[Mapping[str, int], Promise]:
    budget = 500_000 + rng.randrange(round(60_000 * seconds))
    tokens = 500 + rng.randrange(round(100 * seconds))
    return (
        ({"month_budget_nanos": budget}, Promise(budget_nanos=budget)),
        ({"day_budget_nanos": budget, "max_concurrency": 2}, Promise(budget_nanos=budget)),
        ({"tokens_per_day": tokens}, Promise(day_tokens=tokens)),
        ({"requests_per_minute": 60}, Promise()),
    )[number % 4]


async def watched(plan: Plan, pids: Sequence[int]) -> tuple[list[Seen], list[tuple[float, float]]]:
    """The load, and (seconds, MiB) of the server's processes beside it."""
    began_s = time.monotonic()
    samples: list[tuple[float, float]] = []

    async def watch() -> None:
        while True:
            samples.append((time.monotonic() - began_s, rss_mib(pids)))
            await asyncio.sleep(SAMPLE_S)

    watching = asyncio.create_task(watch())
    try:
        return await load(plan), samples
    finally:
        watching.cancel()


def metrics(url: str) -> dict[str, float]:
    """Those without labels, and sums of those with some."""
    sums: defaultdict[str, float] = defaultdict(float)
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as got:
        for line in got.read().decode().splitlines():
            if not line.startswith("#"):
                sums[line.split("{")[0].split(" ")[0]] += float(line.rpartition(" ")[2])
    return dict(sums)


def settled(url: str) -> list[str]:
    """Wait until nothing is held; what still is after QUIET_S."""
    names = (*IDLE, "polyhost_num_requests_running", "polyhost_num_requests_waiting")
    until_s = time.monotonic() + QUIET_S
    while True:
        found = metrics(url)
        left = [f"{name} is {found[name]:g} at the end" for name in names if found.get(name)]
        if not left or time.monotonic() > until_s:
            return left
        time.sleep(0.2)


def posted(data_dir: Path) -> tuple[list[Posting], list[str]]:
    """The whole ledger, and what is wrong with it by itself."""
    settings = load_settings(overrides={"data_dir": str(data_dir)}, environ={})
    with open_control(settings, "reconcile") as control:
        service_ledger.catch_up(control)
        service_ledger.check_ledger(control)
        with reading(control.engine) as session:
            postings = [row.posting for row in iter_usage(session, 0.0, 1e12)]
            wrong = [f"still open: {record}" for record in open_left(session)]
    return postings, wrong


@dataclass(slots=True)
class Probe:
    """To the token: what limits think is left is what the ledger says."""

    url: str
    wrong: list[str] = field(default_factory=list)
    num_budgets: int = 0
    num_tokens: int = 0

    async def run(self, world: World, postings: Sequence[Posting]) -> None:
        """Every tenant with a promise."""
        spent = spent_nanos(postings)
        free = [c for c in world.callers if world.promises[c.tenant_id] == Promise()]
        async with aiohttp.ClientSession() as session:
            prompt_tokens = await self._prompt_tokens(session, free)
            for caller in world.callers:
                promise = world.promises[caller.tenant_id]
                if promise.budget_nanos:
                    left = promise.budget_nanos - spent[caller.tenant_id]
                    await self._budget(session, caller, affordable(left, prompt_tokens))
                elif promise.day_tokens:
                    left = promise.day_tokens - used_tokens(postings, caller.tenant_id)
                    await self._tokens(session, caller, left - prompt_tokens - 1)

    async def _prompt_tokens(
        self, session: aiohttp.ClientSession, callers: Sequence[Caller]
    ) -> int:
        for caller in callers:
            status, _, body = await self._ask(session, caller, 1)
            if status == 200:
                return int(body["usage"]["prompt_tokens"])
        raise RuntimeError("nobody may ask")

    async def _budget(self, session: aiohttp.ClientSession, caller: Caller, most: int) -> None:
        """`most` tokens are paid for, and not one more."""
        if most > MOST_PROBED:
            return
        self.num_budgets += 1
        for max_tokens, wanted in ((max(1, most + 1), 429), (most, 200)):
            if max_tokens >= 1:
                status, _, body = await self._ask(session, caller, max_tokens)
                if status != wanted:
                    text = f"{caller.tenant_id}: {max_tokens} tokens where {most} are paid for"
                    self.wrong.append(f"{text}: {status} {body}")

    async def _tokens(self, session: aiohttp.ClientSession, caller: Caller, left: int) -> None:
        """So many are left beside a request for one."""
        self.num_tokens += 1
        status, headers, body = await self._ask(session, caller, 1)
        told = headers.get("x-ratelimit-remaining-tokens")
        if (status, told) != ((200, str(left)) if left >= 0 else (429, told)):
            self.wrong.append(f"{caller.tenant_id}: {left} tokens left: {status} {told} {body}")

    async def _ask(
        self, session: aiohttp.ClientSession, caller: Caller, max_tokens: int
    ) -> tuple[int, Mapping[str, str], Any]:
        body = {"model": INSTANT, "messages": PROBE, "max_tokens": max_tokens}
        headers = {"authorization": f"Bearer {caller.secret}"}
        async with session.post(
            f"{self.url}/v1/chat/completions", json=body, headers=headers
        ) as answer:
            return answer.status, answer.headers, await answer.json()


def run(
    folder: Path,
    seconds: float,
    *,
    tenants: int = 200,
    connections: int = 500,
    processes: int = 1,
    think_s: float = 5.0,
    seed: int = 1,
) -> tuple[list[str], dict[str, Any]]:
    """What is wrong, and figures."""
    data_dir = folder / "data"
    data_dir.mkdir(parents=True, exist_ok=True)
    settings = {
        "gateway_processes": processes,
        "max_connections_per_address": 0,
        "connection_rate_per_address": 0,
    }
    ours = Polyhost(data_dir, settings)
    for name in MODELS:
        ours.add_model(name, MODEL)
    world = prepare(data_dir, tenants, seconds, seed)
    with ExitStack() as stack:
        server = ours.serve("", module=("bench.gateway_server",))
        stack.enter_context(server.process)
        time.sleep(3.0)  # prices begin when every gateway knows of them
        pids = gateway_pids(server.process.pid)
        plan = Plan(server.base_url, world.callers, connections, seconds, think_s, seed)
        began_s = time.monotonic()
        seen, samples = asyncio.run(watched(plan, pids))
        took_s = time.monotonic() - began_s
        wrong = settled(server.base_url)
        postings, unsound = posted(data_dir)
        wrong += unsound + judge(seen, postings, world.promises)
        probe = Probe(server.base_url)
        asyncio.run(probe.run(world, postings))
        wrong += probe.wrong + settled(server.base_url)
    slope = slope_mib_min(samples)
    if seconds >= LONG_S and slope > FLAT_MIB_MIN:
        wrong.append(f"memory grows by {slope:.2f} MiB a minute")
    spent = spent_nanos(postings)
    return wrong, {
        "seconds": round(took_s, 1),
        "gateway_processes": processes,
        "tenants": tenants,
        "connections": connections,
        "seed": seed,
        "requests": len(seen),
        "ends": dict(Counter(one.end for one in seen)),
        "refused": dict(Counter(f"{s.status} {s.code}" for s in seen if s.end == "refused")),
        "postings": dict(Counter(posting.outcome for posting in postings)),
        "tokens": sum(used_tokens(postings, caller.tenant_id) for caller in world.callers),
        "nanos": sum(spent.values()),
        "budgets_probed_to_the_token": probe.num_budgets,
        "token_limits_probed": probe.num_tokens,
        "rss_mib": [round(samples[0][1], 1), round(samples[-1][1], 1)],
        "rss_slope_mib_min": round(slope, 3),
        "wrong": len(wrong),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what is wrong and figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--tenants", type=int, default=200)
    parser.add_argument("--connections", type=int, default=500)
    parser.add_argument("--gateway-processes", type=int, default=1)
    parser.add_argument("--think", type=float, default=5.0, metavar="S", help="at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="reconcile-") as folder:
        wrong, told = run(
            Path(folder),
            options.seconds,
            tenants=options.tenants,
            connections=options.connections,
            processes=options.gateway_processes,
            think_s=options.think,
            seed=options.seed,
        )
    for line in wrong[:50]:
        print(line, file=sys.stderr)
    text = json.dumps({**told, "machine": facts()}, indent=2) + "\n"
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
