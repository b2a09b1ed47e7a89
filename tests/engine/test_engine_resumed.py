"""Requests that go on behind the tokens of an earlier attempt, on an engine that never saw it.

What comes is what would have come undisturbed, to the token and in fp32, however a token is chosen.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import LlamaConfig

from engine.errors import RequestRefused
from engine.protocol import (
    Constraint,
    EncodeInputs,
    Finish,
    SamplingParams,
    Submit,
    TokenDelta,
    TokenLogprobs,
)
from engine.registration.convert import inspect, write_pack
from tests.engine.grammar.test_structured import DEMO
from tests.engine.test_engine import MODES, Driver, Mode, in_each_mode
from tests.engine.tiny_models import TinyModel, make_tiny_models, save_folder, state_configs

VOCAB = 2048
EOS = 1
NEW = 24
GREEDY = SamplingParams(0.0)
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "word": {"enum": ["alpha", "beta", "gamma delta"]},
        "numbers": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
    },
    "required": ["ok", "word", "numbers"],
    "additionalProperties": False,
}
FORM = Constraint("json_schema", json.dumps(SCHEMA))
WORDS = Constraint("regex", "(red|green|blue)( (red|green|blue)){2,5}")
DRAWN = SamplingParams(
    1.2,
    0.95,
    seed=7,
    top_k=50,
    frequency_penalty=0.7,
    presence_penalty=0.4,
    repetition_penalty=1.3,
)
LONG = SamplingParams(1.5, seed=11, min_tokens=20, logit_bias={EOS: 8.0, 9: 3.0, 10: -50.0})


def submit_of(name: str, model: str = "llama", **fields: Any) -> Submit:
    """A request whose prompt depends on its name."""
    rng = random.Random(name)
    prompt = [rng.randrange(2, 64) for _ in range(rng.randint(3, 30))]
    given: dict[str, Any] = {"max_tokens": NEW, "sampling": GREEDY, "stop_token_ids": [EOS]}
    return Submit(name, 1, "t", model, prompt, **(given | fields))


KINDS: tuple[Submit, ...] = (
    submit_of("greedy"),
    submit_of("drawn", sampling=DRAWN),
    submit_of("not before", sampling=LONG, max_tokens=40),
    submit_of("judged", sampling=DRAWN, logprobs=3, prompt_logprobs=2),
    submit_of("form", constraint=FORM, max_tokens=80),
    submit_of("words", constraint=WORDS, sampling=DRAWN, max_tokens=60, logprobs=0),
)


class Recorder(Driver):
    """A driver that keeps all that is said."""

    def __init__(self, models: dict[str, TinyModel], mode: Mode = MODES[0], **more: Any) -> None:
        super().__init__(models, num_pages=800, mode=mode, **more)
        self.deltas: dict[str, list[TokenDelta]] = {}
        step = self.engine.step

        def recorded(now_s: float) -> list[TokenDelta]:
            deltas = step(now_s)
            for delta in deltas:
                self.deltas.setdefault(delta.request_id, []).append(delta)
            return deltas

        self.engine.step = recorded  # type: ignore[method-assign]
        for name in models:
            self.make_resident(name)

    def ask(self, *submits: Submit) -> None:
        """All of them, to their ends."""
        for submit in submits:
            self.engine.submit(submit, self.now_s)
        self.run(lambda: all(submit.request_id in self.finishes for submit in submits))

    def logprobs(self, name: str) -> list[TokenLogprobs]:
        return [score for delta in self.deltas[name] for score in delta.logprobs]


@pytest.fixture(scope="module", name="models")
def _models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    root = tmp_path_factory.mktemp("resumed")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        max_position_embeddings=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    folder = root / "llama"
    reference = save_folder(config, folder, 0)
    (folder / "tokenizer.json").write_bytes(Path(DEMO).read_bytes())
    pack_dir, _ = write_pack(inspect(folder), root / "packs", "float32", lambda *_: None)
    return {"llama": TinyModel("llama", folder, pack_dir, reference)}


@pytest.fixture(name="make")
def _make() -> Iterator[Any]:
    made: list[Recorder] = []

    def make(models: dict[str, TinyModel], mode: Mode = MODES[0], **more: Any) -> Recorder:
        made.append(Recorder(models, mode, **more))
        return made[-1]

    yield make
    for driver in made:
        driver.engine.close()
        driver.backend.close()


def later(submit: Submit, whole: Recorder, num_before: int) -> Submit:
    """Its second attempt, after so many of the tokens that the first one made."""
    return msgspec.structs.replace(
        submit,
        attempt=2,
        generated=whole.tokens[submit.request_id][:num_before],
        cached_tokens=whole.deltas[submit.request_id][0].cached_tokens,
    )


def usage_of(finish: Finish) -> tuple[str, int, int, int]:
    usage = finish.usage
    return finish.reason, usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens


def check_goes_on(whole: Recorder, rest: Recorder, submits: list[Submit]) -> None:
    """The later attempts have said what the first ones said from there on, and no more."""
    for submit in submits:
        name, num_before = submit.request_id, len(submit.generated)
        assert rest.tokens[name] == whole.tokens[name][num_before:], name
        assert usage_of(rest.finishes[name]) == usage_of(whole.finishes[name]), name
        scores, before = rest.logprobs(name), whole.logprobs(name)[num_before:]
        assert [score.logprob for score in scores] == pytest.approx(
            [score.logprob for score in before], abs=1e-4
        )
        assert not any(delta.prompt_logprobs for delta in rest.deltas[name])
        assert rest.finishes[name].usage.prefill_s > 0


@in_each_mode
def test_the_rest_is_what_would_have_come_however_tokens_are_chosen(
    models: dict[str, TinyModel], make: Any, mode: Mode
) -> None:
    rng = random.Random(str(mode))
    whole = make(models, mode)
    whole.ask(*KINDS)
    assert whole.finishes["form"].reason == whole.finishes["words"].reason == "stop"
    assert len(whole.tokens["not before"]) >= 20, "min_tokens"
    assert whole.deltas["judged"][0].prompt_logprobs
    for max_batch_tokens in (48, 9):  # in one step, and in chunks that end in mid-answer
        rest = make(models, mode, max_batch_tokens=max_batch_tokens)
        cut = [
            later(submit, whole, rng.randrange(1, len(whole.tokens[submit.request_id])))
            for submit in KINDS
        ]
        rest.ask(*cut)
        check_goes_on(whole, rest, cut)


def test_it_goes_on_from_every_token(models: dict[str, TinyModel], make: Any) -> None:
    whole = make(models)
    submits = [submit for submit in KINDS if submit.request_id in ("drawn", "form")]
    whole.ask(*submits)
    rest = make(models)
    for num_before in range(1, NEW):
        cut = [s for s in submits if num_before < len(whole.tokens[s.request_id])]
        cut = [later(submit, whole, num_before) for submit in cut]
        rest.ask(*cut)
        check_goes_on(whole, rest, cut)
        for record in (rest.tokens, rest.finishes, rest.deltas):
            record.clear()


@pytest.mark.parametrize("name", sorted(state_configs()))
def test_models_with_states_go_on(
    tmp_path_factory: pytest.TempPathFactory, make: Any, name: str
) -> None:
    models = make_tiny_models(tmp_path_factory.mktemp("states"), {name: state_configs()[name]})
    submits = [
        submit_of("greedy", name, stop_token_ids=[]),
        submit_of("drawn", name, stop_token_ids=[], sampling=DRAWN),
    ]
    whole = make(models)
    whole.ask(*submits)
    rest = make(models, max_batch_tokens=16)
    cut = [later(submit, whole, 9 + i) for i, submit in enumerate(submits)]
    rest.ask(*cut)
    check_goes_on(whole, rest, cut)


def test_what_was_cached_for_the_first_attempt_is_what_counts(
    models: dict[str, TinyModel], make: Any
) -> None:
    submit = msgspec.structs.replace(KINDS[0], prompt_token_ids=[5] * 21)
    whole = make(models)
    whole.ask(msgspec.structs.replace(submit, request_id="before"))
    whole.ask(submit)
    first = whole.deltas["greedy"][0]
    assert first.cached_tokens == whole.finishes["greedy"].usage.cached_tokens > 0
    assert not any(delta.cached_tokens for delta in whole.deltas["greedy"][1:])
    rest = make(models)  # which has nothing of the prompt
    cut = later(submit, whole, 3)
    rest.ask(cut)
    check_goes_on(whole, rest, [cut])
    # Nor is anything of what was generated a hit, where the cache has all of it.
    again = msgspec.structs.replace(cut, attempt=3)
    rest.tokens.clear()
    rest.finishes.clear()
    rest.ask(again)
    assert rest.finishes["greedy"].usage.cached_tokens == first.cached_tokens


def test_one_that_was_complete_ends_without_another_token(
    models: dict[str, TinyModel], make: Any
) -> None:
    (form,) = [submit for submit in KINDS if submit.request_id == "form"]
    whole = make(models)
    whole.ask(form)
    rest = make(models)
    rest.ask(later(form, whole, len(whole.tokens["form"])))
    assert rest.tokens["form"] == []
    assert usage_of(rest.finishes["form"]) == usage_of(whole.finishes["form"])


def test_what_its_constraint_does_not_allow_is_our_failure(
    models: dict[str, TinyModel], make: Any
) -> None:
    driver = make(models)
    driver.ask(submit_of("form", constraint=FORM, max_tokens=80, generated=[500, 501]))
    assert driver.finishes["form"].reason == "error"
    assert "constraint broke" in driver.finishes["form"].error
    driver.ask(KINDS[0])
    assert driver.finishes["greedy"].reason in ("stop", "length")


@pytest.mark.parametrize(
    ("fields", "code", "why"),
    [
        ({"generated": [4] * NEW}, "context_length_exceeded", "24 tokens were generated before"),
        ({"generated": [4, VOCAB]}, "context_length_exceeded", "token id"),
        ({"generated": [-1]}, "context_length_exceeded", "token id"),
        ({"generated": [4], "cached_tokens": 99}, "context_length_exceeded", "99 cached"),
        ({"generated": [4], "cached_tokens": -1}, "context_length_exceeded", "-1 cached"),
        ({"generated": [4], "encode": EncodeInputs([1])}, "wrong_task", "generates text"),
    ],
)
def test_nonsense_is_refused(
    models: dict[str, TinyModel], make: Any, fields: dict[str, Any], code: str, why: str
) -> None:
    driver = make(models)
    with pytest.raises(RequestRefused, match=why) as caught:
        driver.engine.submit(submit_of("odd", **fields), 0.0)
    assert caught.value.code == code
    assert not list(driver.engine.unfinished())
