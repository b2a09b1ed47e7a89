"""`python -m bench.cache_drills [--redis8 "$(python tests/redis8.py)"]`: answers kept, Redis dying.

The real `polyhost serve` of two gateway processes with a Redis of its own, over a worker that knows
what it answers (cache_drill_worker.py). Four tenants ask the same questions, exactly and by
meaning, while answers are purged all the time, by this server's own way and at the Redis, as
another server that shares it would. Parts, one after the other:

    up          nothing happens: what a request takes
    empty       Redis is killed (-9) and comes back DOWN_S later with nothing
    snapshot    the same, with what it had written down a moment before its death
    hung        Redis is stopped (SIGSTOP), and goes on DOWN_S later
    gateways    each gateway process in turn is stopped for a moment, while purges go on: what it
                was about to answer it answers after them

Told are errors, wrong answers, answers of another tenant, answers from before a purge that had
returned before they were asked for; the time that requests waited for the store, and their own, up
and away. Exit status 1 where one of the first four is there, or a request waited for a Redis that
was away for longer than LATE_S beyond what one in a thousand may. Without --redis8 the Redis is the
one of the dev extra (6.2, no vector sets).
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import torch
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel

from bench import cache_drill_clients as clients
from bench import machine
from bench.cache_drill_clients import Caller, Purge, Seen, judge
from bench.cache_drill_worker import DIM, MODEL, MODULE
from bench.gateway import gateway_pids
from bench.kept_redis import REDIS_6, KeptRedis
from bench.servers import Polyhost
from bench.stats import percentile
from gateway.cache.desk import CacheDesk
from gateway.config import load_settings
from gateway.service import cache as service_cache
from gateway.service import keys as service_keys
from gateway.service import tenants as service_tenants
from gateway.service.control import Control, open_control
from gateway.settings import Settings
from gateway.store.redis_answers import RedisAnswers
from registry.errors import RegistryError

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
LATE_SHARE = 0.001
SETTLED_S = 0.5
"""Requests begun so late in a part may have ended in the next."""
FEWEST = 50
"""Requests that a percentile must rest on."""
PARTS = ("up", "empty", "snapshot", "hung", "gateways")
LOOK = "polyhost_semantic_cache_lookup_seconds"


@dataclass(slots=True)
class World:
    """What is set up, and what has been seen."""

    url: str
    callers: list[Caller]
    settings: Settings
    control: Control
    redis: KeptRedis
    command: str
    pids: Sequence[int]
    seconds: float
    seen: list[Seen] = field(default_factory=list)
    purges: list[Purge] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)


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


def make_callers(control: Control) -> list[Caller]:
    """Tenants without limits."""
    callers = []
    for number in range(TENANTS):
        tenant = service_tenants.create_tenant(control, f"tenant-{number}")
        key, secret = service_keys.create_key(control, tenant.id, "key")
        callers.append(Caller(tenant.id, key.id, secret))
    return callers


async def purging(world: World, stop: asyncio.Event, is_foreign: bool) -> None:
    """One purge after the other."""
    rng = random.Random(is_foreign)
    store = RedisAnswers(world.redis.url, PREFIX, 1 << 30, write_timeout_s=1.0)
    desk = CacheDesk(store)
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
            answer = await desk.answer(json.dumps({"ask": "purge", **dict(fields)}).encode())
            is_done = "error" not in answer
        else:
            is_done = await asyncio.to_thread(_purge_here, world.control, wanted)
        if is_done:
            done = replace(wanted, by=by, began_s=began_s, ended_s=time.monotonic())
            world.purges.append(done)
        else:
            world.refused[by] += 1
    await store.close()


def _purge_here(control: Control, wanted: Purge) -> bool:
    try:
        service_cache.purge_cache(
            control, wanted.tenant_id, wanted.model, wanted.key_id, wanted.text
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


async def part(world: World, name: str) -> dict[str, Any]:
    """One of them: when it was, and how long look-ups took meanwhile."""
    before = await looks(world)
    began_s = time.monotonic()
    if name == "up":
        await asyncio.sleep(world.seconds)
    elif name == "hung":
        world.redis.pause()
        await asyncio.sleep(DOWN_S)
    elif name == "gateways":
        await _stop_gateways(world)
    else:
        if name == "snapshot":
            await asyncio.to_thread(world.redis.save)
        world.redis.stop()
        began_s = time.monotonic()
        await asyncio.sleep(DOWN_S)
    ended_s, after = time.monotonic(), await looks(world)
    if name == "hung":
        world.redis.resume()
    elif name not in ("up", "gateways"):
        await asyncio.to_thread(world.redis.start, world.command)
    await asyncio.sleep(world.seconds)  # it is found again, answers come in
    num = {bound: after[bound] - before.get(bound, 0) for bound in after}
    num_looks = num.get(float("inf"), 0)
    num_late = num_looks - num.get(LATE_S, 0)
    during = [one for one in world.seen if began_s <= one.began_s <= ended_s - SETTLED_S]
    taken_ms = {
        told: [1e3 * one.took_s for one in during if one.cache == told] for told in ("hit", "miss")
    }
    hits = [one.cache for one in world.seen if ended_s + world.seconds / 2 <= one.began_s]
    return {
        "part": name,
        "num_requests": len(during),
        "took_ms": {
            told: {q: round(percentile(ms, p), 1) for q, p in (("p50", 0.5), ("p99", 0.99))}
            for told, ms in taken_ms.items()
            if len(ms) >= FEWEST
        },
        "num_lookups": int(num_looks),
        "num_lookups_late": int(num_late),
        "hit_share_after": round(hits.count("hit") / max(1, len(hits)), 3),
    }


async def _stop_gateways(world: World) -> None:
    for number in range(ROUNDS):
        pid = world.pids[number % len(world.pids)]
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(STOPPED_S)
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(STOPPED_S)


async def measure(world: World, lanes: int, think_s: float, names: Sequence[str]) -> dict[str, Any]:
    """Parts under one load."""
    stop = asyncio.Event()
    loading = [
        asyncio.create_task(
            clients.load(world.url, NAME, world.callers, lanes, think_s, stop, world.seen)
        ),
        asyncio.create_task(purging(world, stop, is_foreign=False)),
        asyncio.create_task(purging(world, stop, is_foreign=True)),
    ]
    try:
        await asyncio.sleep(world.seconds)
        parts = [await part(world, name) for name in names]
    finally:
        stop.set()
        await asyncio.gather(*loading)
    faults = judge(world.seen, world.purges)
    for name in faults.counts():
        for line in getattr(faults, name)[:5]:
            print(f"{name}: {line}", file=sys.stderr)
    away = [one for one in parts if one["part"] not in ("up", "gateways")]
    return {
        "parts": parts,
        "faults": faults.counts(),
        "num_requests": len(world.seen),
        "answers": dict(Counter(one.cache for one in world.seen)),
        "purges_done": dict(Counter(one.by for one in world.purges)),
        "purges_refused": dict(world.refused),
        "ok": not any(faults.counts().values())
        and all(one["num_lookups_late"] <= LATE_SHARE * one["num_lookups"] for one in away),
    }


def run(folder: Path, command: str, options: argparse.Namespace) -> dict[str, Any]:
    """A server, a Redis, and what came of them."""
    data_dir = folder / "data"
    data_dir.mkdir()
    redis = KeptRedis(folder / "redis")
    redis.start(command)
    chosen = {
        "gateway_processes": options.processes,
        "redis_url": redis.url,
        "redis_prefix": PREFIX,
        "cache_embedder": EMBEDDER,
        "cache_embed_timeout_s": 1.0,
        "max_connections_per_address": 0,
        "connection_rate_per_address": 0,
    }
    home = Polyhost(data_dir, chosen)
    home.run("db", "upgrade")
    write_embedder(folder / "embedder")
    home.add_model(NAME, MODEL)
    home.add_model(EMBEDDER, folder / "embedder")
    settings = load_settings(overrides={"data_dir": str(data_dir), **chosen}, environ={})
    with contextlib.ExitStack() as stack:
        stack.callback(redis.stop)
        control = stack.enter_context(open_control(settings, "drills"))
        callers = make_callers(control)
        server = home.serve(callers[0].secret, module=(MODULE,))
        stack.enter_context(server.process)
        world = World(
            server.base_url,
            callers,
            settings,
            control,
            redis,
            command,
            gateway_pids(server.process.pid),
            options.seconds,
        )
        found = asyncio.run(measure(world, options.lanes, options.think, options.parts))
    return {"gateway_processes": options.processes, "vector_sets": command != REDIS_6, **found}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.cache_drills")
    parser.add_argument("--redis8", default="", help="what starts a Redis with vector sets")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument("--lanes", type=int, default=32, help="clients at once")
    parser.add_argument("--think", type=float, default=0.1, metavar="S", help="between two asks")
    parser.add_argument("--seconds", type=float, default=6.0, help="before and after each part")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--output", type=Path, metavar="FILE", help="the report, as JSON")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), options.redis8 or REDIS_6, options)
    told = {"benchmark": "cache-drills", "machine": machine.facts(), **found}
    print(json.dumps(found, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
