"""In fp32 every request's greedy tokens are those of transformers' `generate` alone, mix after mix.

A mix is an engine of random settings (blocks, budget, rows, pool, prefix cache, steps ahead, a
thread of its own for the steps) and a crowd of requests that share beginnings, while KV and weights
are moved, models swapped and requests preempted. Six families: full attention, windows far below
the context, both in one model, sinks.

Where transformers' own two best logits lie within TIE, rounding may choose either: such a token is
counted as a tie and printed, and what follows it in its request is not compared.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from engine.backend.base import Backend
from engine.backend.cpu import CpuBackend
from engine.config import EngineConfig
from engine.engine import Engine
from engine.pack import read_index
from engine.protocol import ModelSpec, SamplingParams, Submit
from tests.engine.engine_hooks import (
    compact,
    count_events,
    move_kv,
    move_weights,
    poison_what_is_freed,
)
from tests.engine.tiny_models import (
    VOCAB,
    TinyModel,
    make_tiny_models,
    tiny_configs,
    windowed_configs,
)

TIE = 1e-6
PAGE = 8192  # holds a block of 16 positions of every family
NEW_TOKENS = 40
LONGEST_PROMPT = 72
FEW_MIXES = 8
MANY_MIXES = 2000
PROMPTS_PER_FAMILY = {FEW_MIXES: 5, MANY_MIXES: 60}


@dataclass(slots=True)
class Answer:
    """What transformers says after a prompt, and how sure it was of each token."""

    tokens: list[int]
    margins: list[float]


@dataclass(slots=True)
class Book:
    """Prompts of each family with their answers, asked once; prompts share beginnings."""

    models: dict[str, TinyModel]
    prompts: dict[str, list[list[int]]]
    answers: dict[tuple[str, tuple[int, ...]], Answer] = field(default_factory=dict)

    @classmethod
    def of(cls, models: dict[str, TinyModel], per_family: int) -> "Book":
        """Random prompts: a third shares its beginning, a third goes on after an answer."""
        rng = random.Random(17)
        book = cls(models, {name: [] for name in models})
        for name, prompts in book.prompts.items():
            stems = [_tokens(rng, LONGEST_PROMPT) for _ in range(2)]
            for number in range(per_family):
                if number % 3 == 0:
                    prompts.append(_tokens(rng, rng.randint(1, LONGEST_PROMPT)))
                elif number % 3 == 1:
                    cut = rng.randint(8, LONGEST_PROMPT - 8)
                    prompts.append(rng.choice(stems)[:cut] + _tokens(rng, rng.randint(0, 8)))
                else:
                    earlier = rng.choice([p for p in prompts if len(p) < 40] or [[5]])
                    said = book.answer(name, earlier).tokens[: rng.randint(1, 20)]
                    prompts.append(earlier + said + _tokens(rng, rng.randint(0, 6)))
        return book

    def answer(self, name: str, prompt: list[int]) -> Answer:
        """NEW_TOKENS greedy tokens."""
        key = (name, tuple(prompt))
        if key not in self.answers:
            self.answers[key] = _generate(self.models[name], prompt)
        return self.answers[key]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(2, VOCAB) for _ in range(count)]


def _generate(model: TinyModel, prompt: list[int]) -> Answer:
    out = model.reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tops = [logits[0].topk(2).values for logits in out.logits]
    return Answer(
        tokens=[int(token) for token in out.sequences[0, len(prompt) :]],
        margins=[float(top[0] - top[1]) for top in tops],
    )


@dataclass(slots=True)
class Asked:
    """One request of a mix."""

    model: str
    prompt: list[int]
    num_new: int
    tenant: str
    tokens: list[int] = field(default_factory=list)
    ended: str = ""


class Mix:
    """One engine and one crowd."""

    def __init__(self, book: Book, seed: int) -> None:
        self.book = book
        self.rng = rng = random.Random(seed)
        self.seed = seed
        num_models = min(len(book.models), rng.choice((1, 2, 2, 3)))
        self.names = rng.sample(sorted(book.models), num_models)
        weights = {name: _weight_pages(book.models[name]) for name in self.names}
        every = sum(weights.values())
        # All fit with room to spare; all fit with little KV; or not all fit at once.
        num_pages = rng.choice(
            (every + 400, every + rng.randint(24, 60), max(weights.values()) + rng.randint(40, 80))
        )
        config = EngineConfig(
            arena_bytes=num_pages * PAGE,
            page_bytes=PAGE,
            shm_prefix="mixes",
            load_kv_tokens=16,
            block_tokens=rng.choice((1, 4, 4, 8, 16)),
            max_batch_tokens=rng.choice((10, 16, 48, 96, 200)),
            max_num_seqs=rng.choice((1, 3, 6, 10)),
            min_run_steps=rng.choice((1, 3)),
            steps_ahead=rng.choice((0, 1)),
            prefix_cache=rng.random() < 0.8,
            drain_timeout_s=0.1,
            starvation_s=0.2,
        )
        threaded = rng.random() < 0.4
        self.events: Counter[str] = Counter(
            {
                f"steps_ahead {config.steps_ahead}": 1,
                "thread" if threaded else "inline": 1,
                "prefix cache" if config.prefix_cache else "no prefix cache": 1,
            }
        )
        self.backend: Backend
        self.engine = self._open(config, threaded)
        self.now_s = 0.0
        self.asked: dict[str, Asked] = {}
        self.engine.set_catalog(
            [ModelSpec(name, str(book.models[name].pack_dir)) for name in self.names], 0.0
        )

    def _open(self, config: EngineConfig, threaded: bool) -> Engine:
        backend = CpuBackend(
            config.arena_bytes, self.rng.choice((0, 0, 1, 3)), "thread" if threaded else "inline"
        )
        backend.poison(0, config.arena_bytes)
        self.backend = backend
        engine = Engine(config, backend)
        poison_what_is_freed(engine, backend)
        return engine

    def run(self) -> Counter[str]:
        """The whole life of the mix; raises where a token is wrong."""
        todo = [self._draw() for _ in range(self.rng.randint(4, 12))]
        for _ in range(20_000):
            if not todo and all(one.ended for one in self.asked.values()):
                break
            if todo and self.rng.random() < 0.5 and self._submit(todo[0]):
                todo.pop(0)
            self._disturb()
            self._step()
        else:
            raise AssertionError(f"seed {self.seed}: not everything ended")
        for one in self.asked.values():
            self._compare(one)
        self.events.update(count_events(self.engine, self.now_s))
        self._empty()
        return self.events

    def _draw(self) -> Asked:
        rng = self.rng
        model = rng.choice(self.names)
        prompt = rng.choice(self.book.prompts[model])
        return Asked(model, prompt, rng.randint(1, NEW_TOKENS), rng.choice(("a", "a", "b")))

    def _submit(self, one: Asked) -> bool:
        state = self._state(one.model)
        assert state != "failed", f"seed {self.seed}: {one.model} cannot be hosted"
        if state != "resident":
            self.engine.load(one.model, self.now_s)
            return False
        name = str(len(self.asked))
        self.engine.submit(
            Submit(
                *(name, 1, one.tenant, one.model, one.prompt, one.num_new),
                *(SamplingParams(0.0), []),
            ),
            self.now_s,
        )
        self.asked[name] = one
        return True

    def _disturb(self) -> None:
        choice = self.rng.random()
        if choice < 0.06:
            self.events["forced kv moves"] += move_kv(self.engine, self.rng)
        elif choice < 0.09:
            self.events["forced weight moves"] += move_weights(self.engine, self.rng)
        elif choice < 0.12:
            self.events["forced compactions"] += compact(self.engine)
        elif choice < 0.13:
            self.engine.unload(self.rng.choice(self.names), self.now_s)

    def _step(self) -> None:
        self.now_s += 0.01
        for delta in self.engine.step(self.now_s):
            one = self.asked[delta.request_id]
            assert not one.ended, f"seed {self.seed}: a token after the end"
            one.tokens.extend(delta.token_ids)
            if delta.finish is not None:
                one.ended = delta.finish.reason
                assert one.ended == "length", (self.seed, delta)
                self.events["hit tokens"] += delta.finish.usage.cached_tokens
        self.engine.check_integrity()
        self.events["swaps"] += len(self.engine.take_swaps()[0])
        if not self.engine.has_work():
            time.sleep(0.0002)  # the loaders want the core

    def _compare(self, one: Asked) -> None:
        answer = self.book.answer(one.model, one.prompt)
        wanted = answer.tokens[: one.num_new]
        self.events["requests"] += 1
        self.events["tokens"] += len(wanted)
        if one.tokens == wanted:
            return
        pairs = zip(one.tokens, wanted, strict=True)
        place = next(i for i, (got, want) in enumerate(pairs) if got != want)
        what = (
            f"seed {self.seed}, {one.model}, prompt {one.prompt}: token {place} is "
            f"{one.tokens[place]}, transformers says {wanted[place]} by {answer.margins[place]:.2g}"
        )
        assert answer.margins[place] <= TIE, what
        print(f"tie: {what}")
        self.events["ties"] += 1

    def _state(self, name: str) -> str:
        rows = {row.model_id: row.state for row in self.engine.status(self.now_s).models}
        return rows.get(name, "cold")

    def _empty(self) -> None:
        for name in self.names:
            self.engine.unload(name, self.now_s)
        self._until(lambda: self.engine.pool.num_free == self.engine.pool.num_pages)
        self.engine.close()
        self.backend.close()

    def _until(self, reached: Callable[[], bool]) -> None:
        for _ in range(20_000):
            if reached():
                return
            self._step()
        raise AssertionError(f"seed {self.seed}: pages are still owned")


def _weight_pages(model: TinyModel) -> int:
    return sum(-(-segment.num_bytes // PAGE) for segment in read_index(model.pack_dir).segments)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    """Six families."""
    configs = {**tiny_configs(), **windowed_configs()}
    return make_tiny_models(tmp_path_factory.mktemp("families"), configs)


def run_mixes(
    book: Book, seeds: Sequence[int], make: Callable[[Book, int], Mix] = Mix
) -> Counter[str]:
    """All of them; their events together."""
    total: Counter[str] = Counter()
    for seed in seeds:
        try:
            total.update(make(book, seed).run())
        except BaseException:
            print(f"mix of seed {seed}")
            raise
        total["mixes"] += 1
    smallest = min(min(answer.margins) for answer in book.answers.values())
    print(dict(sorted(total.items())), f"smallest margin of a greedy token: {smallest:.3g}")
    return total


def test_greedy_tokens_are_those_of_transformers(families: dict[str, TinyModel]) -> None:
    total = run_mixes(Book.of(families, PROMPTS_PER_FAMILY[FEW_MIXES]), range(FEW_MIXES))
    assert total["requests"] > 4 * FEW_MIXES
    assert total["hit tokens"]
    assert total["preemptions"]
    assert total["swaps"] > FEW_MIXES


@pytest.mark.soak
def test_greedy_tokens_are_those_of_transformers_in_many_mixes(
    families: dict[str, TinyModel],
) -> None:
    book = Book.of(families, PROMPTS_PER_FAMILY[MANY_MIXES])
    total = run_mixes(book, range(1000, 1000 + MANY_MIXES))
    assert total["mixes"] == MANY_MIXES
    for event in ("hit tokens", "preemptions", "swaps", "forced kv moves", "forced weight moves"):
        assert total[event] > MANY_MIXES / 10, event
    assert total["ties"] < total["requests"] / 1000


def test_a_tie_is_told_and_anything_else_fails(
    families: dict[str, TinyModel], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    book = Book.of({"llama": families["llama"]}, 2)
    mix = Mix(book, 0)
    prompt = book.prompts["llama"][0]
    answer = book.answer("llama", prompt)
    one = Asked("llama", prompt, 5, "a", [*answer.tokens[:4], (answer.tokens[4] + 1) % VOCAB])
    with pytest.raises(AssertionError, match="token 4"):
        mix._compare(one)
    answer.margins[4] = TIE / 2
    mix._compare(one)
    assert mix.events["ties"] == 1
    assert "tie: seed 0" in capsys.readouterr().out
    mix._empty()
