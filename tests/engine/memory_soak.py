"""Do models of every kind of memory stay right, and memory flat, for as long as one engine runs?

A pure-state model, a hybrid, one with latents, one with windows and a dense one share an arena that
is too small for all of them. Requests arrive at random in real time, share beginnings, are aborted
and preempted; models are swapped, KV and weights moved; freed pages are NaN. Every answer is
compared token for token with what transformers says of the prompt alone (the answers are asked
before the clock starts). Once in REST_EVERY_S nobody asks: when all have ended, the books are
checked, nothing may be live, and memory is read.

What is wrong: a request that ends in no way or otherwise than it was to, a token that differs, a
book that does not balance, or memory that grows by more than MAX_GROWTH between the medians of
the middle and the last third of the rests. The engine's own books are looked through at every rest
and every CHECK_EVERY steps.
"""

import functools
import gc
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from bench import machine
from bench.family_configs import tiny_config
from engine.backend.cpu import CpuBackend
from engine.config import EngineConfig
from engine.engine import Engine
from engine.memory.policy.kv_value import ValueParams
from engine.pack import read_index
from engine.protocol import ModelSpec, SamplingParams, Submit, TokenDelta
from engine.running.model_runner import ModelRunner
from tests.engine.engine_hooks import (
    compact,
    count_events,
    move_kv,
    move_weights,
    poison_what_is_freed,
)
from tests.engine.running.test_parity_mixes import NEW_TOKENS, PAGE, TIE, Book
from tests.engine.tiny_models import (
    make_tiny_models,
    state_configs,
    tiny_configs,
    windowed_configs,
)

KINDS = {
    "states": "mamba2",
    "hybrid": "qwen3_next",
    "latents": "deepseek_v3",
    "windows": "gemma3",
    "dense": "llama",
}
TENANTS = ("a", "a", "b")
PROMPTS_PER_MODEL = 45
MOST_UNFINISHED = 24
REST_EVERY_S = 60.0
CHECK_EVERY = 50
PACE_EVERY_S = 7.0
GAPS_S = (0.005, 0.02, 0.05, 0.2)
"""Mean time between two requests, drawn anew every PACE_EVERY_S."""
ABORTED = 0.1
MAX_GROWTH = 1.02
STUCK_S = 60.0
SNAPSHOT_TOKENS = 16
"""Contexts are short here: without this no prompt would be long enough for a snapshot."""


def configs() -> dict[str, Any]:
    """By name, a small configuration of each kind."""
    known = {**tiny_configs(), **windowed_configs(), **state_configs()}
    known["deepseek_v3"] = tiny_config("deepseek_v3")
    return {name: known[name] for name in KINDS.values()}


@dataclass(slots=True)
class Asked:
    """One request; `leaves_at`: tokens after which its client leaves, 0: it stays."""

    model: str
    prompt: list[int]
    num_new: int
    tenant: str
    leaves_at: int
    tokens: list[int] = field(default_factory=list)
    left: bool = False


@dataclass(frozen=True, slots=True)
class Rest:
    """Memory while nothing runs. Pages by owner; snapshots are cached slots of states."""

    at_s: float
    memory_mib: float
    num_objects: int
    weight_pages: int
    kv_pages: int
    free_pages: int
    cached_blocks: int
    snapshots: int
    live: int
    num_ended: int


def short_snapshots() -> AbstractContextManager[object]:
    """Engines that load models inside keep snapshots of SNAPSHOT_TOKENS and more."""
    few = functools.partial(ValueParams, snapshot_tokens=SNAPSHOT_TOKENS)
    return mock.patch("engine.memory.kv_cache.ValueParams", few)


def memory_mib() -> float:
    """Of this process, without pages of files: the system takes those when others need memory."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return 0.0


class MemorySoak:
    """One engine and its crowd. `run` for as long as wanted, then `result`."""

    def __init__(self, book: Book, seed: int, steps_ahead: int = 1) -> None:
        self.book = book
        self.rng = random.Random(seed)
        weights = sum(
            -(-segment.num_bytes // PAGE)
            for model in book.models.values()
            for segment in read_index(model.pack_dir).segments
        )
        # Weights of about half of them, and some sequences.
        config = EngineConfig(
            arena_bytes=(weights // 2 + 60) * PAGE,
            page_bytes=PAGE,
            shm_prefix="soak",
            load_kv_tokens=16,
            block_tokens=4,
            max_batch_tokens=48,
            max_num_seqs=8,
            steps_ahead=steps_ahead,
            drain_timeout_s=0.5,
            starvation_s=1.0,
        )
        self.backend = CpuBackend(config.arena_bytes, 1, "thread" if steps_ahead else "inline")
        self.backend.poison(0, config.arena_bytes)
        self.engine = Engine(config, self.backend)
        poison_what_is_freed(self.engine, self.backend)
        specs = [ModelSpec(name, str(m.pack_dir)) for name, m in book.models.items()]
        self.engine.set_catalog(specs, 0.0)
        self.num_weight_pages, self.num_pages = weights, config.arena_bytes // PAGE
        self.asked: dict[str, Asked] = {}
        self.waiting: deque[Asked] = deque()
        self.problems: list[str] = []
        self.events: Counter[str] = Counter()
        self.rests: list[Rest] = []
        self._popularity = dict.fromkeys(book.models, 1.0)
        self._gap_s = GAPS_S[0]
        self._start_s = time.monotonic()
        self._next_s = self._pace_s = 0.0
        self._num_steps = 0

    @property
    def now_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start_s

    def run(self, minutes: float, rest_every_s: float = REST_EVERY_S) -> None:
        """Ask until the time is up, with rests; the last one is at the end."""
        self._start_s = time.monotonic()
        end_s, rest_s = minutes * 60, rest_every_s
        while self.now_s < end_s and len(self.problems) < 20:
            self._arrive()
            self._turn()
            if self.now_s >= rest_s:
                self.rest()
                rest_s = self.now_s + rest_every_s
        self.rest()

    def rest(self) -> None:
        """Nobody asks until all have ended; then look at what is held."""
        self.waiting.clear()
        began_s = self.now_s
        while self.asked or self.engine.has_work():
            self._turn()
            if self.now_s > began_s + STUCK_S:
                self.problems.append(f"{len(self.asked)} requests have not ended: {self._names()}")
                break
        self.engine.check_integrity()
        gc.collect()
        pool, pages = self.engine.pool, Counter[str]()
        for page in range(pool.num_pages):
            owner = pool.owner_of(page)
            pages["free" if owner is None else owner.kind] += 1
        runners = [r for r in self.engine._runners.values() if isinstance(r, ModelRunner)]
        groups = [group for runner in runners for group in runner.cache.groups]
        states = [group for runner in runners for group in runner.cache.states.groups]
        live = sum(group.num_live for group in (*groups, *states))
        if live:
            self.problems.append(f"{live} blocks are live while nothing runs")
        found = Rest(
            at_s=round(self.now_s, 1),
            memory_mib=round(memory_mib(), 2),
            num_objects=len(gc.get_objects()),
            weight_pages=pages["weights"],
            kv_pages=pages["kv"],
            free_pages=pages["free"],
            cached_blocks=sum(group.num_cached for group in groups),
            snapshots=sum(group.num_cached for group in states),
            live=live,
            num_ended=self.events["requests"],
        )
        self.rests.append(found)
        print(found, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Unload everything: every page has to come back."""
        for name in self.book.models:
            self.engine.unload(name, self.now_s)
        began_s = self.now_s
        while self.engine.pool.num_free < self.engine.pool.num_pages:
            self._turn()
            if self.now_s > began_s + STUCK_S:
                self.problems.append("pages are still owned after everything was unloaded")
                break
        self.engine.close()
        self.backend.close()

    def result(self) -> dict[str, Any]:
        """For a result file."""
        self.events.update(count_events(self.engine, self.now_s))
        self.events["snapshots taken"] = int(
            self.engine.status(self.now_s).counters["state_snapshots"]
        )
        memory = growth([rest.memory_mib for rest in self.rests])
        problems = [*self.problems]
        if memory["ratio"] > MAX_GROWTH:
            problems.append(f"memory grew by {memory['ratio']:.3f}")
        return {
            "benchmark": "memory soak",
            "kinds": KINDS,
            "machine": machine.facts(),
            "arena_pages": self.num_pages,
            "pages_of_all_weights": self.num_weight_pages,
            "ok": not problems,
            "problems": problems[:50],
            "events": dict(sorted(self.events.items())),
            "memory": memory,
            "objects": growth([float(rest.num_objects) for rest in self.rests]),
            "rests": [asdict(rest) for rest in self.rests],
        }

    def _arrive(self) -> None:
        """Those whose time has come; a crowd that is too large makes the next ones wait."""
        now_s, rng = self.now_s, self.rng
        if now_s >= self._pace_s:
            self._pace_s = now_s + PACE_EVERY_S
            self._gap_s = rng.choice(GAPS_S)
            self._popularity = {name: rng.random() ** 3 for name in self.book.models}
        while self._next_s <= now_s and len(self.asked) + len(self.waiting) < MOST_UNFINISHED:
            self._next_s = max(self._next_s, now_s - 1) + rng.expovariate(1 / self._gap_s)
            names = list(self._popularity)
            (model,) = rng.choices(names, [self._popularity[name] + 0.02 for name in names])
            num_new = rng.randint(1, NEW_TOKENS)
            leaves = rng.randint(1, num_new) if rng.random() < ABORTED else 0
            prompts = self.book.prompts[model]
            prompt = prompts[int(len(prompts) * rng.random() ** 2)]
            self.waiting.append(Asked(model, prompt, num_new, rng.choice(TENANTS), leaves))

    def _turn(self) -> None:
        """Submit what can be, disturb, one step."""
        states = {row.model_id: row.state for row in self.engine.status(self.now_s).models}
        missing = None
        for _ in range(len(self.waiting)):
            one = self.waiting.popleft()
            if states.get(one.model) == "resident":
                self._submit(one)
            else:
                missing = missing or one.model
                self.waiting.append(one)
        if missing:
            self.engine.load(missing, self.now_s)
        self._disturb()
        for delta in self.engine.step(self.now_s):
            self._take(delta)
        self._num_steps += 1
        if self._num_steps % CHECK_EVERY == 0:
            self.engine.check_integrity()
        self.events["swaps"] += len(self.engine.take_swaps()[0])
        if not self.engine.has_work():
            time.sleep(0.001)

    def _submit(self, one: Asked) -> None:
        name = f"r{self.events['submitted']}"
        self.events["submitted"] += 1
        self.asked[name] = one
        submit = Submit(
            *(name, 1, one.tenant, one.model, one.prompt, one.num_new),
            *(SamplingParams(0.0), []),
        )
        self.engine.submit(submit, self.now_s)

    def _disturb(self) -> None:
        choice = self.rng.random()
        if choice < 0.002:
            self.events["forced kv moves"] += move_kv(self.engine, self.rng)
        elif choice < 0.003:
            self.events["forced weight moves"] += move_weights(self.engine, self.rng)
        elif choice < 0.004:
            self.events["forced compactions"] += compact(self.engine)

    def _take(self, delta: TokenDelta) -> None:
        name = delta.request_id
        one = self.asked.get(name)
        if one is None:
            self.problems.append(f"{name} got a token after its end")
            return
        one.tokens.extend(delta.token_ids)
        if one.leaves_at and not one.left and len(one.tokens) >= one.leaves_at:
            one.left = True
            self.engine.abort(name, 1)
        if delta.finish is None:
            return
        del self.asked[name]
        self.events["requests"] += 1
        self.events[f"requests of {one.model}"] += 1
        self.events["tokens"] += len(one.tokens)
        self.events["hit tokens"] += delta.finish.usage.cached_tokens
        reason = delta.finish.reason
        self.events[f"ended by {reason}"] += 1
        if reason != "length" and not (one.left and reason == "abort"):
            self.problems.append(f"{name} of {one.model} ended by {reason}: {delta.finish.error}")
        if reason == "length" and len(one.tokens) != one.num_new:
            self.problems.append(f"{name} of {one.model}: {len(one.tokens)} of {one.num_new}")
        self._compare(name, one)

    def _compare(self, name: str, one: Asked) -> None:
        answer = self.book.answer(one.model, one.prompt)
        wanted = answer.tokens[: len(one.tokens)]
        if one.tokens == wanted:
            return
        pairs = zip(one.tokens, wanted, strict=True)
        place = next(i for i, (got, want) in enumerate(pairs) if got != want)
        if answer.margins[place] <= TIE:
            self.events["ties"] += 1
            return
        self.problems.append(
            f"{name} of {one.model}, prompt {one.prompt}: token {place} is {one.tokens[place]} and "
            f"not {wanted[place]}, which is ahead by {answer.margins[place]:.2g}"
        )

    def _names(self) -> str:
        return ", ".join(f"{name} of {one.model}" for name, one in self.asked.items())


def growth(values: Sequence[float]) -> dict[str, float]:
    """Medians of the thirds of a run, and the last over the middle one."""
    third = max(1, len(values) // 3)
    first, last = median(values[:third]), median(values[-third:])
    middle = median(values[third : 2 * third] or values)
    return {"first": first, "middle": middle, "last": last, "ratio": round(last / middle, 4)}


def soak(work_dir: Path, minutes: float, seed: int = 0) -> dict[str, Any]:
    """The whole of it; what came of it."""
    book = Book.of(make_tiny_models(work_dir, configs()), PROMPTS_PER_MODEL)
    for name, prompts in book.prompts.items():
        for prompt in prompts:
            book.answer(name, prompt)
    with short_snapshots():
        one = MemorySoak(book, seed)
        one.run(minutes)
        result = one.result()
        one.close()
    result["problems"] += one.problems[len(result["problems"]) :]
    return {**result, "ok": not result["problems"], "minutes": minutes, "seed": seed}
