"""The clients of cache_drill.py, and what they hold against what they were told.

Each asks again and again: a stone of a house, for a tenant, in one of several wordings that mean
the same, exactly or by meaning. All tenants ask the same. An answer says what it answers
(cache_drill_worker.py), so that one given for another question, house or tenant is recognised, and
one that was made before a purge that was done before it was asked for.

Lives here: requests, reading, judgement. Does not: servers, purging, figures.
"""

import asyncio
import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from bench import client
from bench.client import Answer

STONES, HOUSES = 40, 2
KINDS = ("colour", "weight")
WORDINGS = (
    "What {kind} has stone {stone}?",
    "what {kind} has stone {stone}",
    "Please, what {kind} has stone {stone}?",
)
SAID = re.compile(r"(\w+) of stone (\d+) in house (\d+) for (\S+) at (\d+) asked (\d+)$")
ENTRY = "x-polyhost-cache-entry"
SEMANTIC_SHARE, STREAM_SHARE = 0.7, 0.2


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant's key."""

    tenant_id: str
    key_id: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Asked:
    """One question. `text` is what the user says."""

    caller: Caller
    kind: str
    stone: int
    house: int
    text: str
    mode: str
    stream: bool


@dataclass(slots=True)
class Seen(Answer):
    """What came of it. Seconds of the machine's monotonic clock, as in the answers."""

    asked: Asked

    @property
    def cache(self) -> str:
        """Hit or miss, by the answer's header."""
        return self.headers.get("x-polyhost-cache", "")


@dataclass(frozen=True, slots=True)
class Purge:
    """One that returned. What is empty names nothing; `by` is who was asked."""

    by: str
    began_s: float
    ended_s: float
    tenant_id: str = ""
    key_id: str = ""
    text: str = ""
    model: str = ""


@dataclass(slots=True)
class Faults:
    """By kind, as texts."""

    errors: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    cross_tenant: list[str] = field(default_factory=list)
    invalidated: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """How many of each."""
        return {name: len(getattr(self, name)) for name in self.__slots__}


def question(rng: random.Random, callers: Sequence[Caller]) -> Asked:
    """Some stones are asked for often."""
    kind = rng.choice(KINDS)
    stone = min(STONES - 1, int(rng.paretovariate(0.7)) - 1)
    text = rng.choice(WORDINGS).format(kind=kind, stone=stone)
    mode = "semantic" if rng.random() < SEMANTIC_SHARE else "exact"
    is_stream = rng.random() < STREAM_SHARE
    house = rng.randrange(HOUSES)
    return Asked(rng.choice(callers), kind, stone, house, text, mode, is_stream)


async def ask(session: aiohttp.ClientSession, url: str, model: str, asked: Asked) -> Seen:
    """One request, to its end."""
    body = {
        "model": model,
        "messages": [
            {"role": "system", "content": f"You keep house {asked.house}."},
            {"role": "user", "content": asked.text},
        ],
        "temperature": 0,
        "stream": asked.stream,
    }
    seen = Seen(asked)
    headers = {"x-polyhost-cache-mode": asked.mode}
    await client.ask(session, url, asked.caller.secret, body, seen, headers=headers)
    return seen


async def load(
    url: str,
    model: str,
    callers: Sequence[Caller],
    lanes: int,
    think_s: float,
    stop: asyncio.Event,
    seen: list[Seen],
) -> None:
    """Until told to stop."""
    # A connection a request: either gateway may get it.
    async with client.new_session(force_close=True) as session:

        async def lane(number: int) -> None:
            rng = random.Random(number)
            while not stop.is_set():
                await asyncio.sleep(rng.uniform(0.0, 2 * think_s))
                seen.append(await ask(session, url, model, question(rng, callers)))

        await asyncio.gather(*(lane(number) for number in range(lanes)))


def judge(seen: Sequence[Seen], purges: Sequence[Purge]) -> Faults:
    """What must not be."""
    faults = Faults()
    for one in seen:
        asked = one.asked
        if one.end != "done":
            faults.errors.append(f"{one.end} {one.status} {one.code}")
            continue
        said = SAID.search(one.text)
        if said is None:
            faults.wrong.append(f"{asked.text}: {one.text!r}")
            continue
        kind, stone, house, tenant_id, at_ns, digest = said.groups()
        told = f"{one.cache} of {one.headers.get(ENTRY)}: {asked} was told {one.text!r}"
        if tenant_id != asked.caller.tenant_id:
            faults.cross_tenant.append(told)
        is_same = int(digest) == zlib.crc32(asked.text.encode())
        right = (asked.kind, str(asked.stone), str(asked.house))
        if (kind, stone, house) != right or (asked.mode == "exact" and not is_same):
            faults.wrong.append(told)
        for purge in purges:
            if one.began_s <= purge.ended_s or int(at_ns) >= purge.began_s * 1e9:
                continue
            if _names(purge, asked.caller, int(digest)):
                faults.invalidated.append(f"{told} after {purge}")
                break
    return faults


def _names(purge: Purge, caller: Caller, digest: int) -> bool:
    """Whether it is of what an answer of this caller belongs to, which said that of its question;
    a purge of the model names all there are."""
    return (
        purge.tenant_id in ("", caller.tenant_id)
        and purge.key_id in ("", caller.key_id)
        and (not purge.text or zlib.crc32(purge.text.encode()) == digest)
    )
