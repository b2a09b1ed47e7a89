"""Encoders in the whole engine: rows as transformers has them, whatever happens around them.

The engine's own driver: fences lag, freed pages are NaN, integrity is checked after every step.
What matters most runs in each of MODES, beside a generating model.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.encoders.encoder_batch import EncoderBatch
from engine.encoders.encoder_model import EncoderRunner
from engine.encoding import check_encode
from engine.errors import RequestRefused
from engine.models.status import ENCODER_TOKENS
from engine.pack import read_index
from engine.protocol import Constraint, EncodeInputs, SamplingParams, Submit
from tests.engine.encoder_rig import (
    POSITIONS,
    TOLERANCE,
    VOCAB,
    TinyEncoder,
    encode_submit,
    random_inputs,
    rows_of,
)
from tests.engine.test_engine import MODES, PAGE, Driver, Mode, generated, in_each_mode
from tests.engine.tiny_models import TinyModel

Encoders = dict[str, TinyEncoder]


class EncoderDriver(Driver):
    """A driver that keeps vectors, for encoders and perhaps generating models."""

    def __init__(
        self,
        encoders: Encoders,
        models: dict[str, TinyModel] | None = None,
        num_pages: int = 600,
        mode: Mode = MODES[0],
        **settings: Any,
    ) -> None:
        everything: Any = {**encoders, **(models or {})}
        super().__init__(everything, num_pages, fence_lag=1, mode=mode, **settings)
        self.encoders = encoders
        self.vectors: dict[str, bytes] = {}
        self.inputs: dict[str, tuple[str, list[list[int]], list[list[int]]]] = {}
        inner = self.engine.step

        def step(now_s: float) -> Any:
            deltas = inner(now_s)
            for delta in deltas:
                if delta.vectors:
                    assert delta.finish is not None
                    assert delta.finish.reason == "stop"
                    assert not delta.token_ids
                    self.vectors[delta.request_id] = delta.vectors
            return deltas

        self.engine.step = step  # type: ignore[method-assign]

    def encode(
        self,
        request_id: str,
        model_id: str,
        inputs: list[list[int]],
        types: list[list[int]] | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        self.inputs[request_id] = (model_id, inputs, types or [])
        submit = encode_submit(request_id, model_id, inputs, types or [], timeout_s=timeout_s)
        self.engine.submit(submit, self.now_s)

    def check_rows(self, *request_ids: str) -> None:
        """These have ended well, with transformers' rows."""
        for request_id in request_ids:
            model_id, inputs, types = self.inputs[request_id]
            self.encoders[model_id].check(inputs, self.vectors[request_id], types)
            usage = self.finishes[request_id].usage
            assert usage.prompt_tokens == sum(map(len, inputs))
            assert (usage.cached_tokens, usage.generated_tokens) == (0, 0)

    def encoder(self, model_id: str) -> EncoderRunner:
        runner = self.engine.runner(self.engine._manager.catalog.instance_of(model_id))
        assert isinstance(runner, EncoderRunner)
        return runner

    def progress(self, request_id: str) -> int:
        """Rows known of an unfinished request."""
        (encoding,) = (
            request.encoding
            for request in self.engine.unfinished()
            if request.submit.request_id == request_id
        )
        assert encoding is not None
        return encoding.num_known


@in_each_mode
def test_rows_beside_generated_tokens(
    encoders: Encoders, tiny_models: dict[str, TinyModel], mode: Mode
) -> None:
    llama = {"llama": tiny_models["llama"]}
    driver = EncoderDriver(encoders, llama, mode=mode)
    for name in (*encoders, "llama"):
        driver.make_resident(name)
    driver.submit("text", "llama", [3, 4, 5], 20)
    for seed, name in enumerate(encoders):
        driver.encode(name, name, random_inputs(seed, 17))
        driver.encode(f"{name} again", name, random_inputs(10 + seed, 3))
    pair = [[2, 9, 3, 11, 3], [2, 7, 3]]
    driver.encode("pairs", "bert", pair, [[0, 0, 0, 1, 1], [0, 1, 1]])
    driver.run(lambda: len(driver.finishes) == 10)
    driver.check_rows("pairs", *encoders, *(f"{name} again" for name in encoders))
    assert driver.tokens["text"] == generated(tiny_models["llama"], [3, 4, 5], 20)
    told = sum(finish.usage.service_s for finish in driver.finishes.values())
    assert told + driver.counter("unbilled_seconds") == pytest.approx(
        driver.counter("busy_seconds")
    )
    of_encoders = sum(sum(map(len, inputs)) for _, inputs, _ in driver.inputs.values())
    assert driver.counter("prompt_tokens") == of_encoders + 3
    driver.empty()


@in_each_mode
def test_a_large_request_leaves_turns_to_others(
    encoders: Encoders, tiny_models: dict[str, TinyModel], mode: Mode
) -> None:
    driver = EncoderDriver(encoders, {"llama": tiny_models["llama"]}, mode=mode, min_run_steps=1)
    for name in ("bert", "xlm-roberta", "llama"):
        driver.make_resident(name)
    driver.encode("large", "bert", random_inputs(1, 150))
    driver.run(lambda: driver.progress("large") > 0)
    driver.encode("query", "bert", [[5, 6, 7]])
    driver.encode("other model", "xlm-roberta", [[5, 6, 7]])
    driver.submit("text", "llama", [3, 4, 5], 3)
    driver.run(lambda: len(driver.finishes) == 3)
    assert "large" not in driver.finishes
    driver.run(lambda: "large" in driver.finishes)
    driver.check_rows("large", "query", "other model")
    assert driver.counter("batch_tokens") == sum(
        sum(map(len, inputs)) for _, inputs, _ in driver.inputs.values()
    ) + (3 + 2)
    driver.empty()


@in_each_mode
def test_ends_in_the_middle(encoders: Encoders, mode: Mode) -> None:
    driver = EncoderDriver(encoders, mode=mode)
    driver.make_resident("bert")
    many = random_inputs(2, 200)
    driver.encode("aborted", "bert", many)
    driver.encode("too late", "bert", many, timeout_s=0.1)
    driver.encode("never begun", "bert", many, timeout_s=-1.0)
    driver.encode("whole", "bert", many[:40])
    driver.run(lambda: driver.progress("aborted") > 0)
    driver.engine.abort("aborted", 1)
    driver.run(lambda: len(driver.finishes) == 4)
    reasons = {name: finish.reason for name, finish in driver.finishes.items()}
    assert reasons == {
        "aborted": "abort",
        "too late": "timeout",
        "never begun": "timeout",
        "whole": "stop",
    }
    assert set(driver.vectors) == {"whole"}
    assert driver.finishes["aborted"].usage.service_s > 0
    assert driver.finishes["never begun"].usage.service_s == 0
    assert driver.counter("prompt_tokens") == sum(map(len, many[:40]))
    driver.check_rows("whole")
    driver.empty()


@in_each_mode
def test_swapped_out_in_the_middle_and_back(encoders: Encoders, mode: Mode) -> None:
    """What is known stays known: every token is computed once."""
    driver = EncoderDriver(encoders, mode=mode, drain_timeout_s=0.0)
    driver.make_resident("modernbert")
    driver.encode("large", "modernbert", random_inputs(3, 120))
    left = 0
    for _ in range(3):
        known = driver.progress("large")
        driver.run(lambda: driver.progress("large") > known)  # noqa: B023 - runs at once
        driver.engine.unload("modernbert", driver.now_s)
        left += 1
        driver.run(lambda: driver.state("modernbert") != "resident")
        driver.run(lambda: driver.state("modernbert") == "resident")
    driver.run(lambda: "large" in driver.finishes)
    assert left == 3
    driver.check_rows("large")
    assert driver.counter("batch_tokens") == sum(map(len, random_inputs(3, 120)))
    assert driver.counter("preemptions") == 3
    driver.empty()


def test_two_that_do_not_fit_together(encoders: Encoders) -> None:
    pages = max(_weights([encoders[name].pack_dir]) for name in ("bert", "modernbert"))
    driver = EncoderDriver(encoders, num_pages=pages, drain_timeout_s=0.0, starvation_s=0.05)
    for round_number in range(3):
        for name in ("bert", "modernbert"):
            driver.make_resident(name)
            request_id = f"{name} {round_number}"
            driver.encode(request_id, name, random_inputs(round_number, 5))
            driver.run(lambda: request_id in driver.finishes)  # noqa: B023 - runs at once
            driver.check_rows(request_id)
    driver.empty()


@in_each_mode
def test_a_row_that_is_not_finite_ends_its_request_alone(
    encoders: Encoders, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    driver = EncoderDriver(encoders, mode=mode)
    driver.make_resident("bert")
    runner = driver.encoder("bert")
    encode = runner.encode

    def broken(batch: EncoderBatch) -> torch.Tensor:
        rows = encode(batch).clone()
        for row, places in zip(batch.rows, batch.places, strict=True):
            if row.request.submit.request_id == "bad":
                rows[int(places[-1]), 3] = float("nan")
        return rows

    monkeypatch.setattr(runner, "encode", broken)
    driver.encode("bad", "bert", random_inputs(4, 30))
    driver.encode("good", "bert", random_inputs(5, 30))
    driver.run(lambda: len(driver.finishes) == 2)
    assert driver.finishes["bad"].reason == "error"
    assert "not finite" in driver.finishes["bad"].error
    assert "bad" not in driver.vectors
    driver.check_rows("good")
    driver.empty()


@in_each_mode
def test_a_failed_step_ends_its_requests_and_nobody_elses(
    encoders: Encoders,
    tiny_models: dict[str, TinyModel],
    monkeypatch: pytest.MonkeyPatch,
    mode: Mode,
) -> None:
    driver = EncoderDriver(encoders, {"llama": tiny_models["llama"]}, mode=mode)
    for name in ("bert", "xlm-roberta", "llama"):
        driver.make_resident(name)
    runner = driver.encoder("bert")
    encode, failures = runner.encode, iter([RuntimeError("no memory")])

    def fail_once(batch: EncoderBatch) -> torch.Tensor:
        for error in failures:
            raise error
        return encode(batch)

    monkeypatch.setattr(runner, "encode", fail_once)
    driver.submit("text", "llama", [3, 4, 5], 20)
    driver.encode("in it", "bert", random_inputs(6, 50))
    driver.encode("elsewhere", "xlm-roberta", random_inputs(7, 50))
    driver.run(lambda: "in it" in driver.finishes)
    driver.encode("later", "bert", random_inputs(8, 50))
    driver.run(lambda: len(driver.finishes) == 4)
    assert driver.finishes["in it"].reason == "error"
    assert "no memory" in driver.finishes["in it"].error
    driver.check_rows("elsewhere", "later")
    assert driver.tokens["text"] == generated(tiny_models["llama"], [3, 4, 5], 20)
    assert driver.counter("steps_failed") == 1
    driver.empty()


def test_a_busy_encoder_does_not_keep_others_from_their_memory(
    encoders: Encoders, tiny_models: dict[str, TinyModel]
) -> None:
    """An idle model's weights hold the KV a prompt lacks, and the encoder never rests."""
    models = {name: tiny_models[name] for name in ("llama", "qwen3")}
    packs = [encoders["bert"].pack_dir, *(model.pack_dir for model in models.values())]
    driver = EncoderDriver(encoders, models, num_pages=_weights(packs) + 6, load_kv_tokens=4)
    for name in ("bert", "qwen3", "llama"):
        driver.make_resident(name)
    prompt = [5 + i % 60 for i in range(100)]
    feed = _feed(driver)
    next(feed)
    driver.submit("text", "llama", prompt, 20)

    def done() -> bool:
        next(feed)
        return "text" in driver.finishes

    driver.run(done, steps=3000)
    assert driver.finishes["text"].reason == "length"
    assert driver.tokens["text"] == generated(tiny_models["llama"], prompt, 20)
    assert driver.state("qwen3") != "resident"


def test_tenants_shares_of_kv_are_not_about_encoders(
    encoders: Encoders, tiny_models: dict[str, TinyModel]
) -> None:
    driver = EncoderDriver(encoders, {"llama": tiny_models["llama"]}, tenant_kv_share=0.5)
    for name in ("bert", "llama"):
        driver.make_resident(name)
    driver.encode("large", "bert", random_inputs(1, 150))
    driver.run(lambda: driver.progress("large") > 0)
    for tenant in ("t", "other"):
        driver.submit(tenant, "llama", [3, 4, 5], 3, tenant)
    driver.run(lambda: {"t", "other"} <= driver.finishes.keys())
    assert "large" not in driver.finishes
    driver.run(lambda: "large" in driver.finishes)
    driver.check_rows("large")
    driver.empty()


def _weights(packs: list[Path]) -> int:
    """Pages of all of them."""
    return sum(
        -(-segment.num_bytes // PAGE) for pack in packs for segment in read_index(pack).segments
    )


def _feed(driver: EncoderDriver) -> Iterator[None]:
    """There is always an encoder request."""
    number = 0
    while True:
        if sum(r.encoding is not None for r in driver.engine.unfinished()) < 2:
            driver.encode(f"e{number}", "bert", random_inputs(number, 10))
            number += 1
        yield


def test_states_are_asked_only_where_they_are_as_wide_as_rows(encoders: Encoders) -> None:
    index = read_index(encoders["bert"].pack_dir)
    submit = encode_submit("r", "bert", [[5, 6]], states=True)
    check_encode(submit, index)
    assert index.encoder is not None
    several = msgspec.structs.replace(index.encoder, pooling="cls+mean", dim=64)
    for other in (
        msgspec.structs.replace(index, encoder=several),
        msgspec.structs.replace(index, task="classify"),
    ):
        with pytest.raises(RequestRefused, match="tokens have no rows"):
            check_encode(submit, other)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no inputs": ({"encode": EncodeInputs([])}, "wrong_task"),
    "an empty input": ({"encode": EncodeInputs([0, 4])}, "wrong_task"),
    "a negative length": ({"encode": EncodeInputs([-1, 5])}, "wrong_task"),
    "lengths of more tokens": ({"encode": EncodeInputs([3, 2])}, "wrong_task"),
    "lengths beyond all numbers": ({"encode": EncodeInputs([2**64 - 1, 5])}, "wrong_task"),
    "type ids of fewer tokens": ({"encode": EncodeInputs([4], [0])}, "wrong_task"),
    "a segment too many": ({"encode": EncodeInputs([4], [0, 1, 2, 0])}, "wrong_task"),
    "a negative segment": ({"encode": EncodeInputs([4], [0, -1, 0, 0])}, "wrong_task"),
    "no inputs at all": ({"encode": None}, "wrong_task"),
    "tokens to generate": ({"max_tokens": 1}, "wrong_task"),
    "a constraint": ({"constraint": Constraint("json_object")}, "wrong_task"),
    "logprobs": ({"logprobs": 0}, "wrong_task"),
    "too many inputs": (
        {"prompt_token_ids": [5] * 2049, "encode": EncodeInputs([1] * 2049)},
        "wrong_task",
    ),
    "an input too long": (
        {"prompt_token_ids": [5] * (POSITIONS + 1), "encode": EncodeInputs([POSITIONS + 1])},
        "context_length_exceeded",
    ),
    "an id too large": ({"prompt_token_ids": [5, 5, 5, VOCAB]}, "context_length_exceeded"),
    "a negative id": ({"prompt_token_ids": [5, 5, 5, -1]}, "context_length_exceeded"),
}


@pytest.mark.parametrize(("change", "code"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(encoders: Encoders, change: dict[str, Any], code: str) -> None:
    driver = EncoderDriver(encoders)
    driver.make_resident("bert")
    good = encode_submit("r", "bert", [[5, 6, 7, 8]])
    with pytest.raises(RequestRefused) as caught:
        driver.engine.submit(msgspec.structs.replace(good, **change), driver.now_s)
    assert caught.value.code == code
    assert not driver.engine.has_work()
    driver.engine.submit(good, driver.now_s)
    driver.run(lambda: "r" in driver.finishes)


def test_a_generating_model_is_not_asked_for_rows(
    encoders: Encoders, tiny_models: dict[str, TinyModel]
) -> None:
    driver = EncoderDriver(encoders, {"llama": tiny_models["llama"]})
    driver.make_resident("llama")
    with pytest.raises(RequestRefused) as caught:
        driver.engine.submit(encode_submit("r", "llama", [[5, 6]]), driver.now_s)
    assert caught.value.code == "wrong_task"
    with pytest.raises(RequestRefused) as caught:
        driver.engine.submit(
            Submit("r", 1, "t", "bert", [5], 4, SamplingParams(), []), driver.now_s
        )
    assert caught.value.code == "not_resident"


@pytest.mark.parametrize(("family", "looks"), [("xlm-roberta", False), ("bert", True)])
def test_families_without_segments_do_not_look_at_type_ids(
    encoders: Encoders, family: str, looks: bool
) -> None:
    """Both are in one step, so where they are equal they may differ by a rounding all the same."""
    driver = EncoderDriver(encoders)
    driver.make_resident(family)
    driver.encode("r", family, [[5, 6, 7]])
    driver.engine.submit(encode_submit("with", family, [[5, 6, 7]], [[0, 1, 1]]), driver.now_s)
    driver.run(lambda: len(driver.finishes) == 2)
    plain, typed = (rows_of(driver.vectors[name], 1) for name in ("r", "with"))
    assert (abs(plain - typed).max() > 100 * TOLERANCE) == looks
    if not looks:
        assert abs(plain - typed).max() < TOLERANCE


def test_its_lease_is_bound_by_requests_and_by_what_is_still_to_be_computed(
    encoders: Encoders, tiny_models: dict[str, TinyModel]
) -> None:
    driver = EncoderDriver(encoders, {"llama": tiny_models["llama"]})
    for name in ("bert", "llama"):
        driver.make_resident(name)
    before = driver.engine.status(driver.now_s)
    leases = {lease.model_id: lease for lease in before.leases}
    assert leases["bert"].kv_bytes_per_token == 0
    assert leases["bert"].kv_tokens == ENCODER_TOKENS
    assert leases["bert"].num_requests == before.free_requests == leases["llama"].num_requests
    driver.encode("r", "bert", [[5] * POSITIONS] * 300)
    driver.step()
    status = driver.engine.status(driver.now_s)
    left = {lease.model_id: lease.kv_tokens for lease in status.leases}["bert"]
    assert ENCODER_TOKENS - 300 * POSITIONS < left < ENCODER_TOKENS
    assert status.free_requests == before.free_requests - 1
    assert status.free_kv_bytes == before.free_kv_bytes
    row = next(row for row in status.models if row.model_id == "bert")
    assert (row.num_running, row.kv_bytes_used) == (1, 0)
    driver.run(lambda: "r" in driver.finishes)


def test_requests_beyond_those_that_run_wait_and_are_bounded(encoders: Encoders) -> None:
    driver = EncoderDriver(encoders, max_num_seqs=3, max_waiting=2)
    driver.make_resident("bert")
    for number in range(2):
        driver.encode(f"r{number}", "bert", random_inputs(number, 30))
    driver.step()
    for number in range(2, 5):
        driver.encode(f"r{number}", "bert", random_inputs(number, 30))
        driver.step()
    row = driver.engine.status(driver.now_s).models[0]
    assert (row.num_running, row.num_waiting) == (3, 2)
    with pytest.raises(RequestRefused) as caught:
        driver.encode("one more", "bert", [[5]])
    assert caught.value.code == "overloaded"
    driver.run(lambda: len(driver.finishes) == 5)
    driver.check_rows(*(f"r{number}" for number in range(5)))
