"""Constrained requests on the real engine: the tokens that a plain loop over the masks would give.

Tiny random models with the demo's tokenizer, so that whatever comes out was forced by the masks.
"""

import functools
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from engine.constraints.constrained_rows import ConstrainedRows
from engine.errors import RequestRefused
from engine.grammar.structured import Compiler, Matcher
from engine.protocol import Constraint, SamplingParams, Submit
from engine.registration.convert import inspect, write_pack
from tests.engine.grammar.test_structured import DEMO, tokenizer
from tests.engine.test_engine import MODES, Driver, Mode, in_each_mode, weight_pages
from tests.engine.tiny_models import TinyModel, save_folder

VOCAB = 2048
EOS = 1
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "word": {"enum": ["alpha", "beta", "gamma delta"]},
        "numbers": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
    },
    "required": ["ok", "word", "numbers"],
}
FORM = Constraint("json_schema", json.dumps({**SCHEMA, "additionalProperties": False}))
WORDS = Constraint("regex", "(red|green|blue)( (red|green|blue)){2,5}")
MANY_WORDS = Constraint("regex", "(red|green|blue)( (red|green|blue)){15,20}")
PROMPT = [7, 100, 200, 300, 400, 500, 600]
GREEDY = SamplingParams(0.0)


@pytest.fixture(scope="module", name="models")
def _models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    root = tmp_path_factory.mktemp("constrained")
    common = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 256}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    configs = {
        "llama": LlamaConfig(vocab_size=VOCAB, **common, **heads),
        "qwen3": Qwen3Config(vocab_size=VOCAB, head_dim=8, **common, **heads),
        # Fewer logits than its tokenizer has tokens.
        "narrow": LlamaConfig(vocab_size=1000, **common, **heads),
    }
    made = {}
    for seed, (name, config) in enumerate(configs.items()):
        folder = root / name
        reference = save_folder(config, folder, seed)
        (folder / "tokenizer.json").write_bytes(Path(DEMO).read_bytes())
        pack_dir, _ = write_pack(inspect(folder), root / "packs", "float32", lambda *_: None)
        made[name] = TinyModel(name, folder, pack_dir, reference)
    return made


class Rig(Driver):
    """A driver whose models are resident and whose constraints can be looked at."""

    def ask(
        self,
        request_id: str,
        constraint: Constraint | None = FORM,
        prompt: list[int] = PROMPT,
        sampling: SamplingParams = GREEDY,
        new: int = 80,
        model: str = "llama",
        **fields: Any,
    ) -> None:
        submit = Submit(
            *(request_id, 1, "t", model, prompt, new, sampling, [EOS]),
            constraint=constraint,
            **fields,
        )
        self.engine.submit(submit, self.now_s)

    @property
    def rows(self) -> ConstrainedRows:
        return self.engine._constrained

    def finish_all(self, *request_ids: str) -> None:
        self.run(lambda: all(name in self.finishes for name in request_ids))

    def text(self, request_id: str) -> str:
        return tokenizer().decode(self.tokens[request_id])

    def signal_child(self, number: int) -> None:
        constraints = self.rows._constraints
        assert constraints is not None
        child = constraints._process._child
        assert child is not None
        child.send_signal(number)

    def wait_until_ready(self) -> None:
        """Every mask has been computed and the process has nothing to do."""
        constraints = self.rows._constraints
        assert constraints is not None
        constraints.wait([row.session for row in self.rows._live.values()], 120)

    def assert_all_closed(self) -> None:
        assert not self.rows._live
        constraints = self.rows._constraints
        assert constraints is not None
        self.run(lambda: not constraints._sessions)


@pytest.fixture(name="rigs")
def _rigs(models: dict[str, TinyModel]) -> Iterator[Any]:
    made: list[Rig] = []

    def make(*names: str, num_pages: int = 600, mode: Mode = MODES[0], **settings: Any) -> Rig:
        chosen = {name: models[name] for name in names or ("llama",)}
        rig = Rig(chosen, num_pages=num_pages, mode=mode, **settings)
        made.append(rig)
        rig.make_resident(next(iter(chosen)))
        return rig

    yield make
    for rig in made:
        rig.engine.close()
        rig.backend.close()


@functools.cache
def compiler(vocab: int) -> Compiler:
    return Compiler(DEMO, vocab, (EOS,))


def expected(
    model: TinyModel,
    constraint: Constraint,
    prompt: list[int] = PROMPT,
    new: int = 80,
    bias: dict[int, float] | None = None,
) -> list[int]:
    """Greedy tokens of transformers' own model under the masks, without the end token."""
    biases = tuple((bias or {}).items())
    return _expected(model.reference, constraint.kind, constraint.text, tuple(prompt), new, biases)


@functools.cache
def _expected(
    reference: Any,
    kind: Any,
    text: str,
    prompt: tuple[int, ...],
    new: int,
    biases: tuple[tuple[int, float], ...],
) -> list[int]:
    vocab = reference.config.vocab_size
    matcher = Matcher(compiler(vocab).compile(Constraint(kind, text)))
    row = bytearray(compiler(vocab).mask_bytes)
    output: list[int] = []
    while len(output) < new and not matcher.finished:
        matcher.mask_into(memoryview(row))
        bits = np.unpackbits(np.frombuffer(row, np.uint8), bitorder="little")[:vocab]
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *output]])).logits[0, -1].clone()
        for token, value in biases:
            logits[token] += value
        logits[torch.from_numpy(bits == 0)] = -torch.inf
        token = int(logits.argmax())
        output.append(token)
        if token == EOS:
            break
        matcher.accept(token)
    return output


@in_each_mode
def test_constrained_rows_among_free_ones(
    models: dict[str, TinyModel], rigs: Any, mode: Mode
) -> None:
    rig = rigs(mode=mode)
    rig.ask("alone")
    rig.finish_all("alone")
    prompts = {f"free {i}": [9 + i, 50, 60 + i] for i in range(3)}
    for name, prompt in prompts.items():
        rig.ask(name, None, prompt, new=30)
    rig.ask("form")
    rig.ask("words", WORDS)
    rig.finish_all(*prompts, "form", "words")
    want = expected(models["llama"], FORM)
    assert rig.tokens["alone"] == rig.tokens["form"] == want
    assert rig.finishes["form"].reason == "stop"
    assert rig.finishes["form"].usage.generated_tokens == len(want)
    jsonschema.validate(json.loads(rig.text("form")), SCHEMA)
    assert rig.tokens["words"] == expected(models["llama"], WORDS)
    for name, prompt in prompts.items():
        free = models["llama"].generate(prompt, 30)
        if EOS in free:
            free = free[: free.index(EOS) + 1]
        assert rig.tokens[name] == free
    rig.assert_all_closed()
    rig.empty()


@in_each_mode
def test_preempted_and_swapped_out_in_the_middle(
    models: dict[str, TinyModel], rigs: Any, mode: Mode
) -> None:
    rig = rigs(mode=mode, num_pages=weight_pages(models["llama"]) + 6, load_kv_tokens=16)
    prompts = {str(i): [3 + i, 40 + i, 90] * 5 for i in range(8)}
    for name, prompt in prompts.items():
        rig.ask(name, FORM if int(name) % 4 == 0 else MANY_WORDS, prompt)
    rig.run(lambda: rig.counter("preemptions") > 2)
    # The weights go and come back while masks are under way.
    rig.engine.unload("llama", rig.now_s)
    rig.run(lambda: rig.state("llama") != "resident")
    rig.engine.load("llama", rig.now_s)
    rig.finish_all(*prompts)
    for name, prompt in prompts.items():
        constraint = FORM if int(name) % 4 == 0 else MANY_WORDS
        assert rig.tokens[name] == expected(models["llama"], constraint, prompt), name
    rig.assert_all_closed()
    rig.empty()


@in_each_mode
def test_seeded_rows_repeat_alone_batched_preempted_and_after_a_swap(
    models: dict[str, TinyModel], rigs: Any, mode: Mode
) -> None:
    """The issue's promise, on the real engine in fp32, for free and for constrained requests."""

    def ask(rig: Rig, name: str, number: int) -> None:
        sampling = SamplingParams(1.3, 0.95, seed=number, frequency_penalty=0.5, min_p=0.001)
        constraint = (None, WORDS, FORM)[number % 3]
        rig.ask(name, constraint, [5 + number, 33, 44 + number] * 4, sampling, new=30)

    numbers = range(9)
    rig = rigs("llama", "qwen3", mode=mode)
    for number in numbers:
        ask(rig, f"alone {number}", number)
        rig.finish_all(f"alone {number}")
    for number in numbers:
        ask(rig, f"batched {number}", number)
    rig.finish_all(*(f"batched {number}" for number in numbers))
    rig.engine.unload("llama", rig.now_s)
    rig.run(lambda: rig.state("llama") in ("cold", "warm"))
    rig.make_resident("qwen3")
    rig.make_resident("llama")
    for number in numbers:
        ask(rig, f"swapped {number}", number)
    rig.finish_all(*(f"swapped {number}" for number in numbers))
    small = rigs(mode=mode, num_pages=weight_pages(models["llama"]) + 5, load_kv_tokens=16)
    for number in numbers:
        ask(small, f"preempted {number}", number)
    small.finish_all(*(f"preempted {number}" for number in numbers))
    assert small.counter("preemptions") > 0
    for number in numbers:
        alone = rig.tokens[f"alone {number}"]
        assert rig.tokens[f"batched {number}"] == alone
        assert rig.tokens[f"swapped {number}"] == alone
        assert small.tokens[f"preempted {number}"] == alone
    assert len({tuple(tokens) for tokens in rig.tokens.values()}) > 6


def test_the_prompt_is_computed_while_the_grammar_compiles(rigs: Any) -> None:
    rig = rigs(max_batch_tokens=8)
    rig.ask("warm up")  # the process starts and reads its tokenizer
    rig.finish_all("warm up")
    rig.signal_child(signal.SIGSTOP)
    prompt = list(range(10, 40))
    rig.ask("a", WORDS, prompt)
    rig.ask("free", None, [8, 9], new=25)
    rig.finish_all("free")
    (request,) = rig.rows._live
    assert request.num_computed == len(prompt) - 1
    assert request.num_generated == 0
    rig.signal_child(signal.SIGCONT)
    rig.finish_all("a")
    assert rig.text("a").split()[0] in ("red", "green", "blue")


def test_a_mask_that_does_not_come_holds_nobody_up(models: dict[str, TinyModel], rigs: Any) -> None:
    rig = rigs()
    rig.ask("bound")
    rig.run(lambda: len(rig.tokens.get("bound", ())) == 4)
    rig.signal_child(signal.SIGSTOP)
    rig.ask("free", None, [8, 9], new=25)
    rig.finish_all("free")
    assert len(rig.tokens["bound"]) <= 5, "one whose mask had come already"
    rig.signal_child(signal.SIGCONT)
    rig.finish_all("bound")
    assert rig.tokens["bound"] == expected(models["llama"], FORM)
    rig.empty()


@in_each_mode
def test_requests_survive_the_end_of_the_process(
    models: dict[str, TinyModel], rigs: Any, mode: Mode
) -> None:
    rig = rigs(mode=mode)
    rig.ask("a")
    rig.ask("b", WORDS)
    for _ in range(3):
        before = len(rig.tokens.get("b", ()))
        rig.run(lambda before=before: len(rig.tokens.get("b", ())) >= before + 3)
        rig.wait_until_ready()
        rig.signal_child(signal.SIGKILL)
    rig.finish_all("a", "b")
    assert rig.counter("constraint_restarts") == 3
    assert rig.tokens["a"] == expected(models["llama"], FORM)
    assert rig.tokens["b"] == expected(models["llama"], WORDS)
    rig.empty()


def test_a_request_that_cannot_go_on_is_our_failure(rigs: Any) -> None:
    rig = rigs()
    rig.ask("a")
    rig.run(lambda: len(rig.tokens.get("a", ())) == 3)
    rig.wait_until_ready()
    constraints = rig.rows._constraints
    assert constraints is not None
    (row,) = rig.rows._live.values()
    constraints.give_up(row.session, "as if it were out of fuel")
    rig.finish_all("a")
    assert rig.finishes["a"].reason == "error"
    assert "out of fuel" in rig.finishes["a"].error
    assert rig.counter("constraints_broken") == 1
    rig.assert_all_closed()


def test_a_form_that_costs_too_much_to_go_on_with_is_the_clients(rigs: Any) -> None:
    """Its lexer runs out of fuel only where the repeat ends."""
    rig = rigs()
    costly = r"[a-z]{40}((.*[a-m].{14}x1)|(.*[b-z0-9].{17}y)|(.*[c-q].{15}z))"
    rig.ask("a", Constraint("regex", costly), new=160)
    rig.finish_all("a")
    assert rig.finishes["a"].reason == "refused"
    assert "too many" in rig.finishes["a"].error
    assert rig.tokens["a"]
    rig.assert_all_closed()


def test_refused_constraints_end_before_a_token_and_are_remembered(rigs: Any) -> None:
    rig = rigs()
    lookahead = Constraint("regex", "(?=a)b")
    rig.ask("late", lookahead)
    rig.ask("n", Constraint("json_schema", '{"not": {"type": "string"}}'))
    rig.finish_all("late", "n")
    assert rig.finishes["late"].reason == rig.finishes["n"].reason == "refused"
    assert "look" in rig.finishes["late"].error
    assert "not" in rig.finishes["n"].error
    assert not rig.tokens["late"]
    with pytest.raises(RequestRefused) as caught:
        rig.ask("again", lookahead)
    assert caught.value.code == "invalid_constraint"
    assert rig.counter("constraints_refused") == 3
    rig.assert_all_closed()
    rig.empty()


def test_a_model_without_an_end_token_cannot_be_constrained(rigs: Any) -> None:
    rig = rigs()
    endless = Submit("a", 1, "t", "llama", PROMPT, 8, GREEDY, [], constraint=FORM)
    rig.engine.submit(endless, rig.now_s)
    rig.finish_all("a")
    assert rig.finishes["a"].reason == "refused"
    assert "needs an end token" in rig.finishes["a"].error


def test_aborts_and_time_outs_in_every_state_give_their_sessions_back(rigs: Any) -> None:
    rig = rigs(max_num_seqs=3)
    for i in range(8):  # opening, prefilling, waiting for a row
        rig.ask(f"early {i}", Constraint("regex", f"a{{{i + 3}}}"))
    rig.step()
    for i in range(8):
        rig.engine.abort(f"early {i}", 1)
    rig.finish_all(*(f"early {i}" for i in range(8)))
    for count in (1, 3):
        rig.ask(f"after {count}")
        rig.run(lambda count=count: len(rig.tokens.get(f"after {count}", ())) == count)
        rig.engine.abort(f"after {count}", 1)
        rig.finish_all(f"after {count}")
        assert rig.finishes[f"after {count}"].reason == "abort"
    rig.ask("slow", timeout_s=0.05)
    rig.finish_all("slow")
    assert rig.finishes["slow"].reason == "timeout"
    rig.assert_all_closed()
    rig.ask("next")
    rig.finish_all("next")
    assert rig.finishes["next"].reason == "stop"
    rig.empty()


def test_max_tokens_ends_a_form_before_it_is_complete(
    models: dict[str, TinyModel], rigs: Any
) -> None:
    rig = rigs()
    rig.ask("a", new=5)
    rig.finish_all("a")
    assert rig.finishes["a"].reason == "length"
    assert rig.tokens["a"] == expected(models["llama"], FORM, new=5)
    rig.assert_all_closed()


def test_the_mask_wins_over_everything_else(models: dict[str, TinyModel], rigs: Any) -> None:
    rig = rigs()
    outside, inside = 700, tokenizer().encode("blue", add_special_tokens=False).ids[0]
    bias = {outside: 100.0, inside: 100.0}
    rig.ask("bias", WORDS, sampling=SamplingParams(0.0, logit_bias=bias))
    late = SamplingParams(0.0, min_tokens=60, presence_penalty=2.0)
    rig.ask("min", Constraint("regex", "yes|no"), sampling=late)
    rig.finish_all("bias", "min")
    assert rig.tokens["bias"] == expected(models["llama"], WORDS, bias=bias)
    assert rig.text("min") in ("yes", "no")
    assert rig.finishes["min"].reason == "stop"


def test_a_constraint_that_leaves_no_token_of_the_model_is_an_error(rigs: Any) -> None:
    rig = rigs("narrow")
    rig.ask("a", Constraint("grammar", 'start: "ab" <[1500]>'), model="narrow")
    rig.ask("b", WORDS, model="narrow")
    rig.finish_all("a", "b")
    assert rig.text("a") == "ab"
    assert rig.finishes["a"].reason == "error"
    assert "none of the model's tokens" in rig.finishes["a"].error
    assert rig.finishes["b"].reason == "stop"


def test_an_empty_answer_can_be_what_was_asked_for(rigs: Any) -> None:
    rig = rigs()
    rig.ask("a", Constraint("regex", ""))
    rig.finish_all("a")
    assert rig.text("a") == ""
    assert rig.finishes["a"].reason == "stop"
