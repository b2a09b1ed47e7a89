"""The callers of a soak: mixed requests without end, and what each of them came to.

Lives here: what is asked (`Mix`), one request's life (`ask`), callers and their pauses
(`Callers`). Does not: the server, its memory, the verdict (`soak.py`).

Four ways to ask, so that requests join and leave a batch at all times: a stream read to its end,
a stream that the client leaves after some events, a plain JSON answer, and one that the client
gives up before it came. Prompts of a family share a long beginning. A greedy request is one of a
fixed set and asked again and again: its answer must be the same each time, whatever it ran beside.
"""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

Way = Literal["stream", "leave", "json", "give_up"]
Outcome = Literal["finished", "left", "refused", "failed", "broken"]

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
class Seen:
    """What the client saw. `code` tells why a request was refused, failed or broke."""

    ask: Ask
    tenant: str
    request_id: str = ""
    outcome: Outcome = "broken"
    code: str = ""
    text: str = ""
    num_events: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0


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
        self._url = f"{base_url}/v1/chat/completions"
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
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
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
            if seen.outcome == "refused":
                await asyncio.sleep(REFUSED_PAUSE_S)

    def _compare(self, seen: Seen) -> None:
        if seen.outcome != "finished" or seen.ask.seed >= 0:
            return
        first = self.answers.setdefault(seen.ask.repeats_as, seen.text)
        self.num_compared += 1
        if first != seen.text:
            self.differing.append(seen.ask.repeats_as)


async def ask(session: aiohttp.ClientSession, url: str, tenant: str, key: str, what: Ask) -> Seen:
    """Send one request and follow it to its end. Failures are recorded, never raised."""
    seen = Seen(what, tenant)
    started_s = time.perf_counter()
    try:
        async with session.post(
            url,
            json=_body(what),
            headers={"authorization": f"Bearer {key}"},
            timeout=aiohttp.ClientTimeout(total=_timeout_s(what)),
        ) as answer:
            if answer.status != 200:
                seen.outcome, seen.code = "refused", f"{answer.status} {await _code(answer)}"
            elif what.way in ("json", "give_up"):
                _read_whole(await answer.json(), seen)
            else:
                await _read_events(answer, seen)
    except TimeoutError:
        seen.outcome = "left" if what.way == "give_up" else "broken"
        seen.code = "timeout"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        seen.outcome, seen.code = "broken", type(error).__name__
    seen.seconds = time.perf_counter() - started_s
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


def _timeout_s(what: Ask) -> float:
    """Who gives up does so within a second or two: while waiting, or while tokens come."""
    return 0.05 + 2.0 * what.patience**2 if what.way == "give_up" else REQUEST_TIMEOUT_S


def _read_whole(answer: dict[str, Any], seen: Seen) -> None:
    seen.request_id = answer["id"]
    seen.text = answer["choices"][0]["message"]["content"]
    seen.num_events = 1
    _read_usage(answer["usage"], seen)
    seen.outcome = "finished"


async def _read_events(answer: aiohttp.ClientResponse, seen: Seen) -> None:
    leave_at = 1 + int(seen.ask.patience * seen.ask.max_tokens)
    parts: list[str] = []
    finish_reason = ""
    async for line in answer.content:
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:"):
            continue
        if data == b"[DONE]":
            seen.outcome = "finished" if finish_reason else "broken"
            seen.code = seen.code or ("" if finish_reason else "no finish_reason")
            break
        event = json.loads(data)
        if "error" in event:
            seen.outcome, seen.code = "failed", str(event["error"].get("code"))
            break
        seen.request_id = event["id"]
        if event.get("usage"):
            _read_usage(event["usage"], seen)
        for choice in event["choices"]:
            text = choice["delta"].get("content") or ""
            seen.num_events += bool(text)
            parts.append(text)
            finish_reason = choice.get("finish_reason") or finish_reason
        if seen.ask.way == "leave" and seen.num_events >= leave_at:
            seen.outcome = "left"
            break
    seen.text = "".join(parts)
    if seen.outcome == "broken" and not seen.code:
        seen.code = "the stream ended early"


def _read_usage(usage: dict[str, Any], seen: Seen) -> None:
    seen.prompt_tokens = usage["prompt_tokens"]
    seen.completion_tokens = usage["completion_tokens"]
    details = usage.get("prompt_tokens_details") or {}
    seen.cached_tokens = details.get("cached_tokens") or 0


async def _code(answer: aiohttp.ClientResponse) -> str:
    try:
        return str((await answer.json())["error"]["code"])
    except (ValueError, KeyError, TypeError, aiohttp.ClientError):
        return "unnamed"


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS.split(), k=num_words))


@dataclass(slots=True)
class Tally:
    """Counts of what the callers saw, for the result file."""

    outcomes: dict[str, int] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, seen: Sequence[Seen]) -> "Tally":
        """Counts by outcome, and by code where there is one."""
        tally = cls()
        for one in seen:
            tally.outcomes[one.outcome] = tally.outcomes.get(one.outcome, 0) + 1
            if one.code and one.outcome != "left":
                tally.codes[one.code] = tally.codes.get(one.code, 0) + 1
        return tally
