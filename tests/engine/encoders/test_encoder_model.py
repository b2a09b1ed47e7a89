"""Ragged batches of all six families against transformers row by row; pooling, positions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

from engine.encoders.encoder_batch import EncoderBatch, build_encoder_batch, split_rows
from engine.encoders.encoder_model import POOLINGS, EncoderModel, pooled, position_ids
from engine.encoding import Encoding, Rows
from engine.pack import EncoderRecord, Task
from engine.request import Request
from engine.running.batch import ScheduledRow
from kernels.ragged_attention import BAND
from tests.engine.encoder_rig import (
    TinyEncoder,
    classifier_configs,
    encode_submit,
    family_configs,
    random_inputs,
    save_encoder,
)


def request_of(
    inputs: Sequence[Sequence[int]],
    record: EncoderRecord,
    types: Sequence[Sequence[int]] = (),
    states: bool = False,
) -> Request:
    submit = encode_submit("r", "m", inputs, types, states=states)
    request = Request.of(submit, 0.0)
    request.encoding = Encoding.of(submit, record)
    return request


def rows_by_step(model: EncoderModel, requests: Sequence[Request], budget: int) -> list[bytes]:
    """Whole inputs of all requests together, about `budget` tokens a step."""
    while any(r.num_computed < r.num_prompt for r in requests):
        scheduled = []
        for request in requests:
            assert request.encoding is not None
            ends = [end for end in request.encoding.ends if end > request.num_computed]
            fitting = [end for end in ends if end - request.num_computed <= budget] or ends[:1]
            if fitting:
                scheduled.append(ScheduledRow(request, fitting[-1] - request.num_computed))
        batch = build_encoder_batch(scheduled, torch.device("cpu"))
        for row, rows in zip(scheduled, split_rows(batch, model.rows(batch)), strict=True):
            assert row.request.encoding is not None
            row.request.encoding.take(row.first, row.end, rows)
            row.request.num_computed = row.end
    return [request.encoding.vectors() for request in requests if request.encoding]


def record_of(task: Task, name: str) -> EncoderRecord:
    segments = 2 if name in ("bert", "minilm") else 0
    if task == "embed":
        return EncoderRecord("mean", True, 24 if name == "minilm" else 32, segments=segments)
    return EncoderRecord("mean" if name == "modernbert" else "cls", False, 3, segments=segments)


@pytest.mark.parametrize("name", family_configs())
@pytest.mark.parametrize("task", ["embed", "classify"])
def test_each_family_row_by_row(tmp_path: Path, name: str, task: Task) -> None:
    classify = task == "classify"
    config = (classifier_configs() if classify else family_configs())[name]
    reference = save_encoder(config, tmp_path, 0, classify)
    record = record_of(task, name)
    model = EncoderModel(tmp_path, task, record, torch.float32)
    model.bind(dict(reference.state_dict(keep_vars=True)))
    # Padding tokens in the middle too: the families do not count positions alike.
    several = [random_inputs(seed, 9, low=0) for seed in range(3)]
    types = [[[i % 2 for i in range(len(ids))] for ids in inputs] for inputs in several]
    kinds: Any = types if record.segments > 1 else [()] * 3
    requests = [request_of(i, record, k) for i, k in zip(several, kinds, strict=True)]
    told = rows_by_step(model, requests, 60)
    encoder = TinyEncoder(name, tmp_path, tmp_path, reference)
    for inputs, segments, vectors in zip(several, kinds, told, strict=True):
        encoder.check(inputs, vectors, segments)
    model.unbind()
    with pytest.raises((RuntimeError, NotImplementedError)):
        rows_by_step(model, [request_of([[5, 6]], record)], 60)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_tokens_have_their_own_states_where_they_are_asked_for(tmp_path: Path, name: str) -> None:
    """Beside requests that ask for none, in steps that take a request apart."""
    reference = save_encoder(family_configs()[name], tmp_path, 0)
    record = record_of("embed", name)
    model = EncoderModel(tmp_path, "embed", record, torch.float32)
    model.bind(dict(reference.state_dict(keep_vars=True)))
    several = [random_inputs(seed, 7) for seed in range(3)]
    requests = [request_of(inputs, record, states=n != 1) for n, inputs in enumerate(several)]
    told = rows_by_step(model, requests, 40)
    encoder = TinyEncoder(name, tmp_path, tmp_path, reference)
    for n, (inputs, found) in enumerate(zip(several, told, strict=True)):
        rows = np.frombuffer(found, "<f4").reshape(-1, record.dim)
        encoder.check(inputs, rows[: len(inputs)].tobytes())
        assert len(rows) == len(inputs) + (n != 1) * sum(map(len, inputs))
        if n != 1:
            with torch.inference_mode():
                each = [reference(torch.tensor([ids])).last_hidden_state[0] for ids in inputs]
            assert np.allclose(rows[len(inputs) :], torch.cat(each).numpy(), atol=1e-4)


def test_inputs_longer_than_windows_and_bands(tmp_path: Path) -> None:
    config = family_configs()["modernbert"]
    config.max_position_embeddings = 3 * BAND
    reference = save_encoder(config, tmp_path, 0)
    model = EncoderModel(tmp_path, "embed", record_of("embed", "modernbert"), torch.float32)
    model.bind(dict(reference.state_dict(keep_vars=True)))
    inputs = random_inputs(1, 3, longest=3 * BAND - 1)
    inputs.append([5 + i % 80 for i in range(2 * BAND + 7)])
    (vectors,) = rows_by_step(model, [request_of(inputs, record_of("embed", "modernbert"))], 900)
    TinyEncoder("m", tmp_path, tmp_path, reference).check(inputs, vectors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_half_precision_stays_near(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    reference = save_encoder(family_configs()[name], tmp_path, 0)
    record = record_of("embed", name)
    model = EncoderModel(tmp_path, "embed", record, dtype)
    model.bind({n: t.to(dtype) for n, t in reference.state_dict().items()})
    inputs = random_inputs(2, 12)
    (vectors,) = rows_by_step(model, [request_of(inputs, record)], 200)
    rows = torch.from_numpy(np.frombuffer(vectors, "<f4").reshape(12, -1).copy())
    encoder = TinyEncoder("m", tmp_path, tmp_path, reference)
    expected = torch.stack([encoder.row(ids) for ids in inputs])
    assert functional.cosine_similarity(rows, expected).min() > 0.99
    torch.testing.assert_close(rows.norm(dim=-1), torch.ones(12))


GROUPS = [(3, 1), (2, 4), (1, 7)]
FORMULAS: dict[str, Any] = {
    "cls": lambda part: part[0],
    "last": lambda part: part[-1],
    "max": lambda part: torch.stack([column.max() for column in part.T]),
    "mean": lambda part: sum(part) / len(part),
    "mean_sqrt_len": lambda part: sum(part) / len(part) ** 0.5,
    "weighted_mean": lambda part: (
        sum((i + 1) * row for i, row in enumerate(part)) / sum(range(1, len(part) + 1))
    ),
}


@pytest.mark.parametrize("pooling", [*POOLINGS, "cls+mean", "max+last+cls"])
def test_pooling_formulas(pooling: str) -> None:
    states = torch.randn(18, 5, generator=torch.Generator().manual_seed(0))
    expected, start = [], 0
    for count, length in GROUPS:
        for _ in range(count):
            part = states[start : start + length]
            expected.append(torch.cat([FORMULAS[name](part) for name in pooling.split("+")]))
            start += length
    torch.testing.assert_close(pooled(states, GROUPS, pooling), torch.stack(expected))


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=6))
def test_positions_as_the_library_counts_them(inputs: list[list[int]]) -> None:
    inputs = sorted(inputs, key=len)
    groups = [(1, len(ids)) for ids in inputs]
    flat = torch.tensor([token for ids in inputs for token in ids])
    expected = [
        RobertaEmbeddings.create_position_ids_from_input_ids(torch.tensor([ids]), 1)[0]
        for ids in inputs
    ]
    assert torch.equal(position_ids(flat, groups, 1), torch.cat(expected))
    plain = [torch.arange(len(ids)) for ids in inputs]
    assert torch.equal(position_ids(flat, groups, None), torch.cat(plain))


REQUESTS = st.lists(
    st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=7), min_size=1, max_size=6),
    min_size=1,
    max_size=4,
)


@given(REQUESTS, st.data())
def test_every_token_finds_its_place_and_every_row_its_way_back(
    several: list[list[list[int]]], data: st.DataObject
) -> None:
    """The model's place is taken by sums: of ids, of type ids, and the length."""
    record = EncoderRecord("mean", False, 3, segments=2)
    requests = []
    for inputs in several:
        types = [[token % 2 for token in ids] for ids in inputs]
        requests.append(request_of(inputs, record, types if data.draw(st.booleans()) else ()))
    while pending := [r for r in requests if r.num_computed < r.num_prompt]:
        chosen = data.draw(st.lists(st.sampled_from(pending), min_size=1, unique=True))
        rows = []
        for request in chosen:
            assert request.encoding is not None
            ends = [end for end in request.encoding.ends if end > request.num_computed]
            rows.append(
                ScheduledRow(request, data.draw(st.sampled_from(ends)) - request.num_computed)
            )
        batch = build_encoder_batch(rows, torch.device("cpu"))
        for row, sums in zip(rows, split_rows(batch, _sums(batch)), strict=True):
            assert row.request.encoding is not None
            row.request.encoding.take(row.first, row.end, sums)
            row.request.num_computed = row.end
    for inputs, request in zip(several, requests, strict=True):
        assert request.encoding is not None
        assert request.encoding.is_complete
        typed = request.encoding.type_ids is not None
        expected = [
            [sum(ids), sum(token % 2 for token in ids) if typed else 0, len(ids)] for ids in inputs
        ]
        assert request.encoding.rows.tolist() == expected


def _sums(batch: EncoderBatch) -> torch.Tensor:
    rows: list[list[float]] = []
    types = torch.zeros_like(batch.input_ids) if batch.type_ids is None else batch.type_ids
    start = 0
    for count, length in batch.groups:
        for _ in range(count):
            part = slice(start, start + length)
            rows.append(
                [float(batch.input_ids[0, part].sum()), float(types[0, part].sum()), float(length)]
            )
            start += length
    assert start == batch.input_ids.shape[1]
    return torch.tensor(rows)


def test_the_mean_length_is_what_a_token_attends_over() -> None:
    request = request_of([[1] * 4, [1], [1, 1]], EncoderRecord("mean", False, 1))
    assert request.encoding is not None
    assert request.encoding.mean_length(0, 7) == (1 + 4 + 16) / 7
    assert request.encoding.mean_length(3, 7) == 4
    assert request.encoding.rows.dtype == np.dtype("<f4")
    told: Rows = np.zeros((1, 1), dtype=np.float32)
    request.encoding.take(0, 1, told)
    assert (request.encoding.num_known, request.encoding.is_complete) == (1, False)
