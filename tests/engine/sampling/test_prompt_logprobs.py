"""Logprobs of prompts on the real engine: what transformers' own model says of every position."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, GPT2Config, OPTConfig, PretrainedConfig

from engine.protocol import SamplingParams, Submit, TokenLogprobs
from tests.engine.test_engine import MODES, Driver, Mode, in_each_mode, random_prompt, weight_pages
from tests.engine.tiny_models import MAX_CONTEXT, VOCAB, TinyModel, make_tiny_models


class Rig(Driver):
    """A driver that keeps prompts' logprobs, and sees that they come once, with the first delta."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.scores: dict[str, list[TokenLogprobs]] = {}
        step = self.engine.step

        def watched(now_s: float) -> Any:
            deltas = step(now_s)
            for delta in deltas:
                if delta.prompt_logprobs:
                    assert not self.tokens.get(delta.request_id)
                    self.scores[delta.request_id] = delta.prompt_logprobs
            return deltas

        self.engine.step = watched  # type: ignore[method-assign]

    def ask(
        self, request_id: str, model: str, prompt: list[int], count: int = 3, new: int = 2
    ) -> None:
        submit = Submit(
            *(request_id, 1, "t", model, prompt, new, SamplingParams(0.0), []),
            prompt_logprobs=count,
        )
        self.engine.submit(submit, self.now_s)


@contextmanager
def rigs_of(num_pages: int) -> Iterator[Callable[..., Rig]]:
    """Makes rigs with all of their models resident, and closes them."""
    made: list[Rig] = []

    def make(models: dict[str, TinyModel], **settings: Any) -> Rig:
        rig = Rig(models, **{"num_pages": num_pages, **settings})
        made.append(rig)
        for name in models:
            rig.make_resident(name)
        return rig

    yield make
    for rig in made:
        rig.engine.close()
        rig.backend.close()


@pytest.fixture(name="rigs")
def _rigs() -> Iterator[Any]:
    with rigs_of(600) as make:
        yield make


def assert_scores(
    model: TinyModel, prompt: list[int], scores: list[TokenLogprobs], count: int
) -> None:
    with torch.no_grad():
        logs = model.reference(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    assert len(scores) == len(prompt) - 1
    for position, told in enumerate(scores):
        assert told.logprob == pytest.approx(float(logs[position, prompt[position + 1]]), abs=2e-4)
        best = logs[position].sort(descending=True)
        assert [value for _, value in told.top] == pytest.approx(
            best.values[:count].tolist(), abs=2e-4
        )


@in_each_mode
def test_over_chunks_beside_others_and_through_preemptions(
    tiny_models: dict[str, TinyModel], rigs: Any, mode: Mode
) -> None:
    model = tiny_models["llama"]
    rng = random.Random(3)
    room = weight_pages(model) + 16
    rig = rigs({"llama": model}, num_pages=room, mode=mode, max_batch_tokens=16, load_kv_tokens=16)
    prompts = {str(i): random_prompt(rng, 60) for i in range(10)}
    for name, prompt in prompts.items():
        count = int(name) % 4
        if count:
            rig.ask(name, "llama", prompt, count, new=40)
        else:
            rig.submit(name, "llama", prompt, 40)
    rig.run(lambda: len(rig.finishes) == len(prompts))
    assert rig.counter("preemptions") > 0
    for name, prompt in prompts.items():
        assert rig.tokens[name] == model.generate(prompt, 40)
        if int(name) % 4:
            assert_scores(model, prompt, rig.scores[name], int(name) % 4)
        else:
            assert name not in rig.scores
    rig.empty()


def test_what_is_cached_is_computed_again(tiny_models: dict[str, TinyModel], rigs: Any) -> None:
    model = tiny_models["qwen3"]
    rig = rigs({"qwen3": model})
    prompt = random_prompt(random.Random(5), 50) + [7] * 20
    rig.submit("first", "qwen3", prompt, 3)
    rig.run(lambda: "first" in rig.finishes)
    rig.ask("scored", "qwen3", prompt)
    rig.run(lambda: "scored" in rig.finishes)
    assert rig.finishes["scored"].usage.cached_tokens == 0
    assert_scores(model, prompt, rig.scores["scored"], 3)
    rig.submit("third", "qwen3", prompt, 3)
    rig.run(lambda: "third" in rig.finishes)
    assert rig.finishes["third"].usage.cached_tokens > 0
    assert rig.tokens["first"][:2] == rig.tokens["scored"] == rig.tokens["third"][:2]


def test_shortest_prompts_and_lists(tiny_models: dict[str, TinyModel], rigs: Any) -> None:
    rig = rigs({"llama": tiny_models["llama"]})
    rig.ask("one", "llama", [5])
    rig.ask("two", "llama", [5, 6], count=0, new=1)
    rig.run(lambda: len(rig.finishes) == 2)
    assert "one" not in rig.scores
    assert_scores(tiny_models["llama"], [5, 6], rig.scores["two"], 0)
    assert len(rig.tokens["two"]) == 1


def families() -> dict[str, PretrainedConfig]:
    """What stands between the last hidden states and the logits differs."""
    common = {"vocab_size": VOCAB, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 0}
    llama_like = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_CONTEXT,
    }
    return {
        "gemma2": Gemma2Config(
            num_key_value_heads=2, head_dim=12, final_logit_softcapping=2.0, **llama_like, **common
        ),
        "gpt2": GPT2Config(n_embd=48, n_layer=2, n_head=4, n_positions=MAX_CONTEXT, **common),
        "opt": OPTConfig(
            hidden_size=48,
            word_embed_proj_dim=24,
            ffn_dim=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=MAX_CONTEXT,
            **common,
        ),
    }


def test_families_with_other_heads(tmp_path_factory: pytest.TempPathFactory, rigs: Any) -> None:
    models = make_tiny_models(tmp_path_factory.mktemp("heads"), families())
    rig = rigs(models, num_pages=900, mode=MODES[0])
    prompt = random_prompt(random.Random(6), 60) + [9] * 70  # more than a slice of positions
    prompt = prompt[:100]
    for name, model in models.items():
        rig.ask(name, name, prompt, 5, new=8)
        rig.run(lambda name=name: name in rig.finishes)
        assert_scores(model, prompt, rig.scores[name], 5)
        assert rig.tokens[name] == model.generate(prompt, 8)
