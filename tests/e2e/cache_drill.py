"""Answers are kept while Redis dies and purges go on: none is wrong, another tenant's or purged.

The real `polyhost serve` of two gateway processes with a Redis of its own, over a worker that knows
what it answers (cache_drill_worker.py). Four tenants ask the same questions, exactly and by
meaning, while answers are purged all the time, by this server's own way and at the Redis, as
another server that shares it would. Parts, one after the other:

    empty       Redis is killed (-9) and comes back DOWN_S later with nothing
    snapshot    the same, with what it had written down a moment before its death
    hung        Redis is stopped (SIGSTOP), and goes on DOWN_S later
    gateways    each gateway process in turn is stopped for a moment, while purges go on: what it
                was about to answer it answers after them

What is wrong comes out as texts: errors, wrong answers, answers of another tenant, answers from
before a purge that had returned before they were asked for, and look-ups that waited for a Redis
that was away for longer than LATE_S, beyond what one in a hundred may.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import torch
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel

from admin.context.operator_context import OperatorContext, open_context
from admin.operations import cache as service_cache
from admin.operations import keys as service_keys
from admin.operations import tenants as service_tenants
from bench.gateway import gateway_pids
from bench.servers import Polyhost
from gateway.cache.cache_handler import CacheHandler
from gateway.cache.redis_answers import RedisAnswers
from gateway.settings.config import load_settings
from gateway.settings.settings import Settings
from registry.errors import RegistryError
from tests.e2e import cache_drill_clients as clients
from tests.e2e.cache_drill_clients import Caller, Purge, Seen, judge
from tests.e2e.cache_drill_worker import DIM, MODEL, MODULE
from tests.redis_kit import RedisServer

NAME, EMBEDDER = "drill", "meaning"
PREFIX = "drills"
TENANTS = 4
DOWN_S = 4.0
STOPPED_S = 1.0
ROUNDS = 6
"""How often a gateway is stopped."""
PURGE_EVERY_S = 0.2
LATE_S = 0.03
"""A look-up has 20 ms; the rest is for an event loop that has other things to do."""
LATE_SHARE = 0.01
LANES, THINK_S = 32, 0.1
PARTS = ("empty", "snapshot", "hung", "gateways")
LOOK = "polyhost_semantic_cache_lookup_seconds"


@dataclass(slots=True)
class World:
    """What is set up, and what has been seen."""

    url: str
    callers: list[Caller]
    settings: Settings
    operator: OperatorContext
    redis: RedisServer
    pids: Sequence[int]
    seconds: float
    seen: list[Seen] = field(default_factory=list)
    purges: list[Purge] = field(default_factory=list)


def write_embedder(folder: Path) -> None:
    """An embedding model to register; its worker computes something else."""
    folder.mkdir()
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=DIM,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=DIM,
        max_position_embeddings=128,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


def make_callers(context: OperatorContext) -> list[Caller]:
    """Tenants without limits."""
    callers = []
    for number in range(TENANTS):
        tenant = service_tenants.create_tenant(context, f"tenant-{number}")
        key, secret = service_keys.create_key(context, tenant.id, "key")
        callers.append(Caller(tenant.id, key.id, secret))
    return callers


async def purging(world: World, stop: asyncio.Event, is_foreign: bool) -> None:
    """One purge after the other."""
    rng = random.Random(is_foreign)
    store = RedisAnswers(world.redis.url, PREFIX, 1 << 30, write_timeout_s=1.0)
    handler = CacheHandler(store)
    while not stop.is_set():
        await asyncio.sleep(rng.uniform(0.5, 1.5) * PURGE_EVERY_S)
        caller = rng.choice(world.callers)
        text = clients.question(rng, world.callers).text
        wanted = rng.choices(
            (
                Purge("", 0, 0, text=text),
                Purge("", 0, 0, tenant_id=caller.tenant_id, text=text),
                Purge("", 0, 0, tenant_id=caller.tenant_id),
                Purge("", 0, 0, tenant_id=caller.tenant_id, key_id=caller.key_id),
                Purge("", 0, 0, model=NAME),
            ),
            (20, 20, 3, 3, 1),
        )[0]
        by = "another server" if is_foreign else "this server"
        began_s = time.monotonic()
        if is_foreign:
            named = (wanted.tenant_id, wanted.model, wanted.key_id, wanted.text)
            fields = zip(("tenant_id", "model_name", "key_id", "question"), named, strict=True)
            answer = await handler.answer(json.dumps({"ask": "purge", **dict(fields)}).encode())
            is_done = "error" not in answer
        else:
            is_done = await asyncio.to_thread(_purge_here, world.operator, wanted)
        if is_done:
            done = replace(wanted, by=by, began_s=began_s, ended_s=time.monotonic())
            world.purges.append(done)
    await store.close()


def _purge_here(context: OperatorContext, wanted: Purge) -> bool:
    try:
        service_cache.purge_cache(
            context, wanted.tenant_id, wanted.model, wanted.key_id, wanted.text
        )
    except RegistryError:
        return False
    return True


async def looks(world: World) -> dict[float, float]:
    """Look-ups so far, of all processes: by upper bound in seconds, how many took no longer."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{world.url}/metrics") as answer,
    ):
        lines = (await answer.text()).splitlines()
    found: defaultdict[float, float] = defaultdict(float)
    for line in lines:
        if line.startswith(f"{LOOK}_bucket"):
            bound = line.partition('le="')[2].partition('"')[0]
            found[float(bound)] += float(line.split()[-1])
    return dict(found)


async def part(world: World, name: str) -> list[str]:
    """One of them; what is wrong with the look-ups meanwhile."""
    before = await looks(world)
    if name == "gateways":
        await _stop_gateways(world)
    elif name == "hung":
        world.redis.pause()
        await asyncio.sleep(DOWN_S)
    else:
        await asyncio.to_thread(world.redis.stop, name == "snapshot")
        await asyncio.sleep(DOWN_S)
    after = await looks(world)
    if name == "hung":
        world.redis.resume()
    elif name != "gateways":
        await asyncio.to_thread(world.redis.start)
    await asyncio.sleep(world.seconds)  # it is found again, answers come in
    num = {bound: after[bound] - before.get(bound, 0) for bound in after}
    num_looks = num.get(float("inf"), 0)
    num_late = num_looks - num.get(LATE_S, 0)
    if name == "gateways" or num_late <= LATE_SHARE * num_looks:
        return []
    return [f"{name}: {num_late:g} of {num_looks:g} look-ups took longer than {LATE_S} s"]


async def _stop_gateways(world: World) -> None:
    for number in range(ROUNDS):
        pid = world.pids[number % len(world.pids)]
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(STOPPED_S)
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(STOPPED_S)


async def measure(world: World) -> list[str]:
    """All parts under one load; what is wrong."""
    stop = asyncio.Event()
    loading = [
        asyncio.create_task(
            clients.load(world.url, NAME, world.callers, LANES, THINK_S, stop, world.seen)
        ),
        asyncio.create_task(purging(world, stop, is_foreign=False)),
        asyncio.create_task(purging(world, stop, is_foreign=True)),
    ]
    try:
        await asyncio.sleep(world.seconds)
        late = [line for name in PARTS for line in await part(world, name)]
    finally:
        stop.set()
        await asyncio.gather(*loading)
    faults = judge(world.seen, world.purges)
    return [f"{name}: {line}" for name in faults.counts() for line in getattr(faults, name)] + late


def run(folder: Path, redis: RedisServer, seconds: float) -> tuple[World, list[str]]:
    """What was seen, and what is wrong. `seconds`: before and after each part."""
    data_dir = folder / "data"
    data_dir.mkdir()
    chosen = {
        "gateway_processes": 2,
        "redis_url": redis.url,
        "redis_prefix": PREFIX,
        "cache_embedder": EMBEDDER,
        "cache_embed_timeout_s": 1.0,
        "max_connections_per_address": 0,
        "connection_rate_per_address": 0,
    }
    polyhost = Polyhost(data_dir, chosen)
    polyhost.run("db", "upgrade")
    write_embedder(folder / "embedder")
    polyhost.add_model(NAME, MODEL)
    polyhost.add_model(EMBEDDER, folder / "embedder")
    settings = load_settings(overrides={"data_dir": str(data_dir), **chosen}, environ={})
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(open_context(settings, "drill"))
        callers = make_callers(context)
        server = polyhost.serve(callers[0].secret, module=(MODULE,))
        stack.enter_context(server.process)
        pids = gateway_pids(server.process.pid)
        world = World(server.url, callers, settings, context, redis, pids, seconds)
        wrong = asyncio.run(measure(world))
    return world, wrong
