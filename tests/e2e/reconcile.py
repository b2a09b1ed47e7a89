"""Do clients, limits and ledger still agree after minutes of everything at once?

The real server with a worker behind the real protocol whose tokens cost nothing
(`gateway_worker.py`): 200 tenants, 500 open connections, streams and whole answers, clients that
leave, models that fail, the cache off. Of four tenants one has a hard budget, one a budget and few
places at a time, one a limit of tokens a day, one a limit of requests a minute; budgets are small,
so that many are used up in the middle. At the end:

    every posting is of a request that a client saw as its table of outcomes says, and costs that
    no hard budget, no day's tokens and no minute's requests are overrun, by a unit
    export, invoices and the tenants' own costs all add up to the postings, tenant by tenant
    nothing is held: no reservation, no open record, nothing that waits or runs
    to the token: of each budget that is nearly used up, the answer that it just pays for is given,
                  and one that is longer by a token is refused; of each limit of tokens the header
                  says what is left
    memory is flat: the slope of the server's resident memory over the second half

Judgement is reconcile_judge.py's, requests are reconcile_clients.py's.
"""

import asyncio
import json
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import aiohttp

from admin.context.operator_context import OperatorContext, open_context
from admin.operations import invoices as service_invoices
from admin.operations import keys as service_keys
from admin.operations import limits as service_limits
from admin.operations import prices as service_prices
from admin.operations import tenants as service_tenants
from admin.operations import usage as service_ledger
from bench.gateway import gateway_pids
from bench.processes import rss_mib
from bench.servers import Polyhost, Server, total
from gateway.settings.config import load_settings
from registry.accounts.key_terms import INFERENCE, USAGE
from registry.models import catalog
from registry.models.catalog import PackFacts
from registry.money.ledger import Posting, open_left
from registry.money.prices import PriceRecord
from registry.session import reading
from tests.e2e.reconcile_clients import FAILING, INSTANT, PACED, Caller, Plan, load
from tests.e2e.reconcile_judge import (
    Promise,
    Seen,
    affordable,
    compare_sums,
    judge,
    slope_mib_min,
    spent_nanos,
    used_tokens,
)
from tests.e2e.server import usage_rows
from tests.e2e.violence_judge import CACHED_NANOS, COMPLETION_NANOS, PROMPT_NANOS
from tests.registry.postings_kit import postings as stored_postings

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
    "limit_reservations_open",
    "ledger_open",
    "ledger_pending",
    "num_requests_running",
    "num_requests_waiting",
)


@dataclass(slots=True)
class World:
    """What was set up. `free`: somebody without limits, who asks nothing under load. `priced_at`:
    when prices begin, in epoch seconds."""

    callers: list[Caller]
    free: Caller
    priced_at: float = 0.0
    promises: dict[str, Promise] = field(default_factory=dict)


def prepare(data_dir: Path, num_tenants: int, seconds: float, seed: int) -> World:
    """Names of the worker's for a model of the folder, prices, tenants, keys, and limits that some
    use up within the time."""
    rng = random.Random(seed)
    settings = load_settings(overrides={"data_dir": str(data_dir)}, environ={})
    with open_context(settings, "reconcile") as context:
        world = World([], _caller(context, "free"))
        for name in MODELS:
            _add_model(context, name)
            price = PriceRecord(name, 0.0, PROMPT_NANOS, CACHED_NANOS, COMPLETION_NANOS)
            world.priced_at = service_prices.set_price(context, price).valid_from
        for number in range(num_tenants):
            caller = _caller(context, f"tenant-{number}")
            limits, promise = _limits(number, seconds, rng)
            service_limits.set_limits(context, "tenant", caller.tenant_id, limits)
            world.callers.append(caller)
            world.promises[caller.tenant_id] = promise
    return world


def _caller(context: OperatorContext, name: str) -> Caller:
    tenant = service_tenants.create_tenant(context, name)
    scopes = (INFERENCE, USAGE)
    return Caller(tenant.id, service_keys.create_key(context, tenant.id, "key", scopes=scopes)[1])


def _add_model(context: OperatorContext, name: str) -> None:
    """One more name for a pack that is there."""
    with context.writing() as session:
        known = catalog.get_model(session, "sherlock")
        facts = PackFacts(*(getattr(known, one.name) for one in fields(PackFacts)))
        model = catalog.add_model(session, name, known.source, now_at=context.clock())
        catalog.finish(session, model.registration, facts, now_at=context.clock())


def _limits(number: int, seconds: float, rng: random.Random) -> tuple[Mapping[str, int], Promise]:
    budget = 500_000 + rng.randrange(round(60_000 * seconds))
    tokens = 500 + rng.randrange(round(100 * seconds))
    rate = min(60, round(seconds))
    return (
        ({"month_budget_nanos": budget}, Promise(budget_nanos=budget)),
        ({"day_budget_nanos": budget, "max_concurrency": 2}, Promise(budget_nanos=budget)),
        ({"tokens_per_day": tokens}, Promise(day_tokens=tokens)),
        ({"requests_per_minute": rate}, Promise(minute_requests=rate)),
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


def settled(server: Server) -> list[str]:
    """Wait until nothing is held; what still is after QUIET_S."""
    until_s = time.monotonic() + QUIET_S
    while True:
        series = server.metrics()
        sums = {name: total(series, name) for name in IDLE}
        left = [f"{name} is {held:g} at the end" for name, held in sums.items() if held]
        if not left or time.monotonic() > until_s:
            return left
        time.sleep(0.2)


def posted(data_dir: Path) -> tuple[list[Posting], list[str]]:
    """The whole ledger, and what is wrong with it by itself."""
    settings = load_settings(overrides={"data_dir": str(data_dir)}, environ={})
    with open_context(settings, "reconcile") as context:
        service_ledger.catch_up(context)
        service_ledger.check_ledger(context)
        with reading(context.engine) as session:
            postings = stored_postings(session)
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
        async with aiohttp.ClientSession() as session:
            _, _, body = await self._ask(session, world.free, 1)
            prompt_tokens = int(body["usage"]["prompt_tokens"])
            for caller in world.callers:
                promise = world.promises[caller.tenant_id]
                if promise.budget_nanos:
                    left = promise.budget_nanos - spent[caller.tenant_id]
                    await self._budget(session, caller, affordable(left, prompt_tokens))
                elif promise.day_tokens:
                    left = promise.day_tokens - used_tokens(postings, caller.tenant_id)
                    await self._tokens(session, caller, left - prompt_tokens - 1)

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


def sums_told(data_dir: Path, url: str, world: World) -> dict[str, dict[str, int]]:
    """What each tenant owes, by all who say so."""
    everybody = (*world.callers, world.free)
    month = service_invoices.month_of(time.strftime("%Y-%m", time.gmtime()))
    exported: Counter[str] = Counter()
    for row in usage_rows(data_dir):
        exported[row["tenant_id"]] += row["cost_nanos"]
    settings = load_settings(overrides={"data_dir": str(data_dir)}, environ={})
    with open_context(settings, "reconcile") as context:
        invoices = {
            one.tenant_id: service_invoices.preview_invoice(context, one.tenant_id, month).net_nanos
            for one in everybody
        }
    costs: dict[str, int] = {}
    since = int(time.time()) - 86_400
    for one in everybody:
        asked = urllib.request.Request(
            f"{url}/v1/organization/costs?start_time={since}",
            headers={"authorization": f"Bearer {one.secret}"},
        )
        with urllib.request.urlopen(asked) as answer:
            buckets = json.load(answer)["data"]
        values = [r["amount"]["value"] for bucket in buckets for r in bucket["results"]]
        costs[one.tenant_id] = sum(round(value * 1e9) for value in values)
    return {"the export": dict(exported), "the invoice": invoices, "/costs": costs}


def run(
    data_dir: Path,
    seconds: float,
    *,
    tenants: int = 200,
    connections: int = 500,
    think_s: float = 5.0,
    seed: int = 1,
    settings: Mapping[str, object] | None = None,
    rate_slack: float = 1.0,
    quiet_s: float = 0.0,
) -> tuple[list[str], dict[str, Any]]:
    """What is wrong, and figures. `data_dir`: with a model, no server on it; `settings`: of the
    server, beside those for many clients; `rate_slack`: see `judge`; `quiet_s`: before it is asked
    what is left."""
    many = {"max_connections_per_address": 0, "connection_rate_per_address": 0}
    ours = Polyhost(data_dir, {**many, **(settings or {})})
    world = prepare(data_dir, tenants, seconds, seed)
    with ExitStack() as stack:
        server = ours.serve("", module=("bench.gateway_server",))
        stack.enter_context(server.process)
        time.sleep(max(0.0, world.priced_at - time.time()))  # what is asked before is free
        pids = gateway_pids(server.process.pid)
        plan = Plan(server.url, world.callers, connections, seconds, think_s, seed)
        seen, samples = asyncio.run(watched(plan, pids))
        wrong = settled(server)
        postings, unsound = posted(data_dir)
        wrong += unsound + judge(seen, postings, world.promises, rate_slack)
        time.sleep(quiet_s)
        probe = Probe(server.url)
        asyncio.run(probe.run(world, postings))
        wrong += probe.wrong + settled(server)
        postings, unsound = posted(data_dir)
        wrong += unsound + compare_sums(
            spent_nanos(postings), sums_told(data_dir, server.url, world)
        )
    slope = slope_mib_min(samples)
    if seconds >= LONG_S and slope > FLAT_MIB_MIN:
        wrong.append(f"memory grows by {slope:.2f} MiB a minute")
    return wrong, {
        "requests": len(seen),
        "ends": dict(Counter(one.end for one in seen)),
        "budgets_probed_to_the_token": probe.num_budgets,
        "token_limits_probed": probe.num_tokens,
    }
