"""Encoders through the real worker process: over its real socket, in a thread of its own."""

from collections.abc import Iterator

import pytest
import torch

from engine.pack import read_index
from engine.protocol import (
    AckUsage,
    LoadModel,
    Refused,
    StepOutput,
    TokenDelta,
)
from tests.engine.encoder_rig import (
    TinyEncoder,
    classifier_configs,
    encode_submit,
    family_configs,
    make_encoders,
    random_inputs,
)
from tests.engine.worker import test_worker_real as real


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> list[TinyEncoder]:
    """One that embeds, one that ranks; the worker has room for one of them."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("encoders")
    wide = {"hidden_size": 64, "intermediate_size": 96}
    embeds = {"bert": family_configs(**wide)["bert"]}
    ranks = {"xlm-roberta": classifier_configs(1, **wide)["xlm-roberta"]}
    made = make_encoders(root / "a", embeds) | make_encoders(root / "b", ranks, classify=True)
    return list(made.values())


@pytest.fixture(scope="module")
def running(
    encoders: list[TinyEncoder], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[real.Running]:
    """A worker with both in its catalog."""
    models = [
        real.TinyModel(e.name, e.pack_dir, read_index(e.pack_dir).total_bytes, []) for e in encoders
    ]
    with real.serving(tmp_path_factory.mktemp("w"), models) as made:
        yield made


def deltas(running: real.Running, request_id: str) -> list[TokenDelta]:
    """Everything the gateway was told of a request."""
    return [
        delta
        for output in running.gateway.all(StepOutput)
        for delta in output.deltas
        if delta.request_id == request_id
    ]


def test_rows_come_in_one_delta_however_often_swapped(
    running: real.Running, encoders: list[TinyEncoder]
) -> None:
    for tag in "ab":
        for seed, encoder in enumerate(encoders):
            running.gateway.send(LoadModel(encoder.name))
            running.until(lambda name=encoder.name: running.state(name) == "resident")  # type: ignore[misc]
            name, inputs = f"{encoder.name}-{tag}", random_inputs(seed, 25)
            running.gateway.send(encode_submit(name, encoder.name, inputs))
            running.until(lambda name=name: bool(deltas(running, name)))  # type: ignore[misc]
            (delta,) = deltas(running, name)
            encoder.check(inputs, delta.vectors)
            assert delta.finish is not None
            assert delta.finish.reason == "stop"
            assert delta.finish.usage.prompt_tokens == sum(map(len, inputs))
            assert delta.finish.usage.service_s > 0
            running.gateway.send(AckUsage([(name, 1)]))


def test_what_does_not_fit_the_model_is_refused(
    running: real.Running, encoders: list[TinyEncoder]
) -> None:
    name = encoders[1].name
    running.ask("generate", name, [5, 6], 3)
    running.until(lambda: bool(running.gateway.all(Refused)))
    (refused,) = running.gateway.all(Refused)
    assert (refused.request_id, refused.code, refused.retryable) == (
        "generate",
        "wrong_task",
        False,
    )
