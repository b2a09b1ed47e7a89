"""The callers of a soak: mixed requests without end, and what each of them came to.

Lives here: what is asked (`Mix`), one request's life (`ask`), callers and their pauses
(`Callers`). Does not: the server, its memory, the verdict (`soak.py`).

Four ways to ask, so that requests join and leave a batch at all times: a stream read to its end,
a stream that the client leaves after some events, a plain JSON answer, and one that the client
gives up before it came. Prompts of a family share a long beginning. A greedy request is one of a
fixed set and asked again and again: its answer must be the same each time, whatever it ran beside.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from bench import client
from bench.client import Answer, new_session

Way = Literal["stream", "leave", "json", "give_up"]

WAYS: tuple[Way, ...] = ("stream", "stream", "stream", "leave", "json", "give_up")
FAMILIES_PER_MODEL = 4
TAILS_PER_FAMILY = 12
FAMILY_WORDS = 60
TAIL_WORDS = 12
MAX_TOKENS = (8, 24, 64, 160)
REQUEST_TIMEOUT_S = 180.0
REFUSED_PAUSE_S = 0.2
WORDS = (
    "the of and to in that he was it his is with as had for not but at on which by have from they "
    "all her him my one said we so no there upon when would been me out up if more this into who "
    "could time then man very some what now were should them over night house door light came hand"
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request before it is sent. Greedy where `seed` is negative."""

    model: str
    content: str
    max_tokens: int
    seed: int
    way: Way
    patience: float

    @property
    def repeats_as(self) -> tuple[str, str, int]:
        """Greedy requests with the same answer."""
        return self.model, self.content, self.max_tokens


@dataclass(slots=True)
class Seen(Answer):
    """What the client saw."""

    ask: Ask
    tenant: str


class Mix:
    """Draws requests. The same seed draws the same ones, though not at the same moments."""

    def __init__(self, models: Sequence[str], seed: int) -> None:
        self._models = models
        self._random = random.Random(seed)
        words = random.Random(seed + 1)
        self._families = {
            model: [_text(words, FAMILY_WORDS) for _ in range(FAMILIES_PER_MODEL)]
            for model in models
        }
        self._tails = [_text(words, TAIL_WORDS) for _ in range(TAILS_PER_FAMILY)]

    def draw(self) -> Ask:
        """The next request."""
        rng = self._random
        model = rng.choice(self._models)
        content = rng.choice(self._tails)
        if rng.random() < 0.7:
            content = f"{rng.choice(self._families[model])} {content}"
        return Ask(
            model=model,
            content=content,
            max_tokens=rng.choice(MAX_TOKENS),
            seed=rng.choice((-1, rng.randrange(1 << 20))),
            way=rng.choice(WAYS),
            patience=rng.random(),
        )


class Callers:
    """Closed-loop callers that can be held back, so that the server comes to rest now and then."""

    def __init__(self, base_url: str, keys: dict[str, str], mix: Mix) -> None:
        self._url = base_url
        self._keys = keys
        self._mix = mix
        self._gate = asyncio.Event()
        self._gate.set()
        self._stopping = False
        self._num_open = 0
        self._at_rest = asyncio.Event()
        self._at_rest.set()
        self.seen: list[Seen] = []
        self.answers: dict[tuple[str, str, int], str] = {}
        self.differing: list[tuple[str, str, int]] = []
        self.num_compared = 0

    async def run(self, concurrency: int) -> None:
        """Ask until `stop`."""
        async with new_session() as session:
            tenants = list(self._keys)
            await asyncio.gather(
                *(self._caller(session, tenants[i % len(tenants)]) for i in range(concurrency))
            )

    def stop(self) -> None:
        """Callers end with the request they are at."""
        self._stopping = True
        self._gate.set()

    async def hold(self) -> None:
        """Let nobody ask anew, and wait until everything asked has ended."""
        self._gate.clear()
        await self._at_rest.wait()

    def release(self) -> None:
        """Go on."""
        self._gate.set()

    async def _caller(self, session: aiohttp.ClientSession, tenant: str) -> None:
        while not self._stopping:
            await self._gate.wait()
            if self._stopping:
                return
            self._num_open += 1
            self._at_rest.clear()
            try:
                seen = await ask(session, self._url, tenant, self._keys[tenant], self._mix.draw())
            finally:
                self._num_open -= 1
                if not self._num_open:
                    self._at_rest.set()
            self._compare(seen)
            seen.text = ""  # half an hour of texts would be the client's own leak
            self.seen.append(seen)
            if seen.end == "refused":
                await asyncio.sleep(REFUSED_PAUSE_S)

    def _compare(self, seen: Seen) -> None:
        if seen.end != "done" or seen.ask.seed >= 0:
            return
        first = self.answers.setdefault(seen.ask.repeats_as, seen.text)
        self.num_compared += 1
        if first != seen.text:
            self.differing.append(seen.ask.repeats_as)


async def ask(session: aiohttp.ClientSession, url: str, tenant: str, key: str, what: Ask) -> Seen:
    """Send one request and follow it to its end. Failures are recorded, never raised.

    Who gives up does so within a second or two: while waiting, or while tokens come.
    """
    seen = Seen(what, tenant)
    await client.ask(
        session,
        url,
        key,
        _body(what),
        seen,
        leaves_after=1 + int(what.patience * what.max_tokens) if what.way == "leave" else 0,
        patience_s=0.05 + 2.0 * what.patience**2 if what.way == "give_up" else None,
        timeout_s=REQUEST_TIMEOUT_S,
    )
    return seen


def _body(what: Ask) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": what.model,
        "messages": [{"role": "user", "content": what.content}],
        "max_tokens": what.max_tokens,
        "temperature": 0.0 if what.seed < 0 else 1.0,
    }
    if what.seed >= 0:
        body["seed"] = what.seed
    if what.way in ("stream", "leave"):
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS.split(), k=num_words))
