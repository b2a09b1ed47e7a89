"""`python -m bench.hostile_forms`: what one tenant's dear grammars do to others' structured output.

Lives here: the command line, the attackers, the honest client, the result file. Does not: servers
(`servers.py`), what bounds the attackers (`engine/constraints/`).

A real server with one demo model. An honest tenant asks for a JSON schema of some 30 tokens, one
request at a time, and now and then for a pattern, each time a new one. Beside it run 0, 1, 4 and 8
requests of another tenant, each followed at once by the next:

    same    the 42 bytes that stopped everybody's structured output in trial H2
    fresh   the same with a comment that is new each time, so that nothing is remembered of it
    words   a grammar that stays below the compiler's limits and costs more with each word; fresh
    plain   no grammar at all, as a control: what as many ordinary requests do
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aiohttp

from bench import command, machine
from bench.servers import Polyhost, Server
from bench.swap_load import DEMO_MODELS

MODEL = "python"
CROWDS = (0, 1, 4, 8)
KINDS = ("same", "fresh", "words", "plain")
PATTERN_EVERY = 5
AMBIGUOUS = "start: e\ne: e e | e e e | C\nC: /[a-z \\n]/\n"
WORDS = "start: e\ne: e e | e e e | W\nW: /[a-z]+ /\n"
SCHEMA = {
    "type": "object",
    "properties": {
        "paid": {"type": "boolean"},
        "color": {"enum": ["red", "green", "dark blue"]},
        "sizes": {"type": "array", "items": {"enum": ["S", "M", "L"]}, "minItems": 6},
    },
    "required": ["paid", "color", "sizes"],
    "additionalProperties": False,
}


def forms(kind: str) -> Iterator[dict[str, str]]:
    """What the attackers ask for, for ever."""
    for number in itertools.count():
        text = WORDS if kind == "words" else AMBIGUOUS
        if kind == "plain":
            yield {"type": "text"}
        else:
            fresh = "" if kind == "same" else f"// {number}\n"
            yield {"type": "grammar", "grammar": fresh + text}


async def ask(session: aiohttp.ClientSession, key: str, form: Any, max_tokens: int) -> str:
    """One request that is read to its end; its HTTP status."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What now?"}],
        "max_tokens": max_tokens,
        "response_format": form,
        "seed": 3,
    }
    headers = {"authorization": f"Bearer {key}"}
    async with session.post("/v1/chat/completions", json=body, headers=headers) as answer:
        await answer.read()
        return str(answer.status)


async def attack(
    session: aiohttp.ClientSession, key: str, asked: Iterator[Any], seen: Counter[str]
) -> None:
    """Until it is cancelled."""
    while True:
        seen[await ask(session, key, next(asked), 200)] += 1


async def honest(
    session: aiohttp.ClientSession, key: str, seconds: float, run: str
) -> Mapping[str, Any]:
    """Milliseconds of the schema's requests, and how all its requests ended."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    times: list[float] = []
    seen: Counter[str] = Counter()
    begun_s = time.monotonic()
    for number in itertools.count():
        if (start_s := time.monotonic()) > begun_s + seconds:
            break
        if number % PATTERN_EVERY:
            seen[await ask(session, key, form, 30)] += 1
            times.append(1e3 * (time.monotonic() - start_s))
        else:
            pattern = {"type": "regex", "pattern": f"(red|blue) {run}{number}"}
            seen[await ask(session, key, pattern, 30)] += 1
    return {
        "median_ms": round(statistics.median(times), 1),
        "max_ms": round(max(times), 1),
        "statuses": dict(seen),
    }


async def measure(
    server: Server, keys: Sequence[str], seconds: float, kinds: Sequence[str]
) -> dict[str, Any]:
    """Every kind of attack with every number of attackers."""
    result: dict[str, Any] = {}
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(server.url, timeout=timeout) as session:
        await honest(session, keys[0], 3.0, "w")
        for kind in kinds:
            asked = forms(kind)
            for crowd in CROWDS:
                seen: Counter[str] = Counter()
                tasks = [
                    asyncio.create_task(attack(session, keys[1], asked, seen)) for _ in range(crowd)
                ]
                found = dict(await honest(session, keys[0], seconds, f"{kind[0]}{crowd}x"))
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                found["attackers"] = dict(seen)
                result[f"{kind} {crowd}"] = found
                print(f"{kind:6} beside {crowd}: {json.dumps(found)}", flush=True)
    return result


def main(argv: Sequence[str]) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(prog="bench.hostile_forms", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--only", nargs="+", default=KINDS, choices=KINDS)
    command.add_options(parser)
    args = parser.parse_args(argv)
    with command.working_in(args.work_dir) as folder:
        product = Polyhost(folder / "data", command.settings_of(args))
        product.add_model(MODEL, DEMO_MODELS / MODEL)
        keys = [product.new_key(tenant) for tenant in ("honest", "hostile")]
        with (server := product.serve(keys[0])).process:
            rounds = asyncio.run(measure(server, keys, args.seconds, args.only))
    result = {"machine": machine.facts(), "seconds": args.seconds, "rounds": rounds}
    command.keep(result, args.output, "hostile-forms")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
