"""Rows sampled on a device draw what engine/sampling/sampler.py draws: by references, and by the
kernels.
"""

import random
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.gpu.device_sampling import (
    ALIGN,
    SAMPLING_KERNELS,
    SAMPLING_REFERENCE,
    Packer,
    SamplingOperations,
    pack_sampling,
    sample_rows,
)
from engine.protocol import SamplingParams
from engine.request import SampleInput, SamplingState
from engine.sampling.sampler import SampleOutput, sample
from engine.sampling.sampling_batch import build_sampling

CPU = torch.device("cpu")
VOCAB = 300


def draw_input(rng: random.Random) -> SampleInput:
    """A request that asks for some of everything."""
    hot = rng.random() < 0.7
    params = SamplingParams(
        temperature=rng.choice((0.3, 1.0, 1.7)) if hot else 0.0,
        top_k=rng.choice((0, 0, 1, 7, 1000)),
        top_p=rng.choice((1.0, 1.0, 0.9, 0.1)),
        min_p=rng.choice((0.0, 0.0, 0.2)),
        seed=rng.randrange(1 << 40),
        min_tokens=rng.choice((0, 5)),
        frequency_penalty=rng.choice((0.0, 0.0, 1.5)),
        presence_penalty=rng.choice((0.0, 0.0, -1.0)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        logit_bias={rng.randrange(VOCAB): 4.0} if rng.random() < 0.3 else {},
    )
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
    stops = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 3))]
    logprobs = rng.choice((-1, -1, 0, 4))
    state = SamplingState(params, prompt, stops, logprobs)
    output = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 9))]
    mask = None
    if rng.random() < 0.25:
        words = np.random.default_rng(rng.randrange(1 << 30)).integers(
            0, 1 << 32, -(-VOCAB // 32), dtype=np.uint32
        )
        words[-1] &= (1 << VOCAB % 32) - 1
        mask = torch.from_numpy(words.view(np.int32))
    return SampleInput(state, output, mask)


def on_device(
    logits: torch.Tensor,
    inputs: list[SampleInput],
    operations: SamplingOperations,
    before: torch.Tensor | None = None,
) -> SampleOutput:
    packer, states = Packer(), [row.state for row in inputs]
    positions = [row.state.num_prompt + row.num_output for row in inputs]
    fields = pack_sampling(packer, states, positions)
    run = torch.full((packer.num_bytes,), 0xFF, dtype=torch.uint8)
    packer.write(run.numpy())
    edits = any(row.is_masked or row.state.edits_logits(row.num_output) for row in inputs)
    batch = build_sampling(inputs if edits else (), CPU)
    return sample_rows(logits, fields, run, batch, operations, torch.clone, before)


@pytest.mark.parametrize(
    "operations", [SAMPLING_REFERENCE, SAMPLING_KERNELS], ids=["ref", "kernel"]
)
def test_tokens_and_logprobs_are_the_samplers(operations: SamplingOperations) -> None:
    generator = torch.Generator().manual_seed(3)
    rounds = 30 if operations is SAMPLING_REFERENCE else 4
    for seed in range(rounds):
        rng = random.Random(seed)
        inputs = [draw_input(rng) for _ in range(6)]
        logits = 3 * torch.randn(len(inputs), VOCAB, generator=generator)
        broken = rng.randrange(len(inputs)) if rng.random() < 0.3 else -1
        if broken >= 0:
            logits[broken, 17] = rng.choice((float("nan"), float("inf")))
        wanted = sample(logits.clone(), build_sampling(inputs, CPU))
        got = on_device(logits.clone(), inputs, operations)
        assert got.token_ids.tolist() == wanted.token_ids.tolist(), seed
        assert got.broken.tolist() == wanted.broken.tolist()
        assert (got.logprobs is None) == (wanted.logprobs is None)
        if got.logprobs is not None and wanted.logprobs is not None and broken < 0:
            torch.testing.assert_close(got.logprobs.chosen, wanted.logprobs.chosen)
            counts = [row.state.logprobs for row in inputs if row.state.logprobs >= 0]
            for a, b in zip(
                got.logprobs.messages(counts), wanted.logprobs.messages(counts), strict=True
            ):
                assert [token for token, _ in a.top] == [token for token, _ in b.top]


@pytest.mark.parametrize(
    "operations", [SAMPLING_REFERENCE, SAMPLING_KERNELS], ids=["ref", "kernel"]
)
def test_penalties_count_tokens_that_are_on_their_way(operations: SamplingOperations) -> None:
    """One step ahead, on a device and by the sampler: as if the last token had been known."""
    generator = torch.Generator().manual_seed(5)
    rounds = 60 if operations is SAMPLING_REFERENCE else 4
    for seed in range(rounds):
        rng = random.Random(seed)
        known = [draw_input(rng) for _ in range(6)]
        before = torch.tensor([rng.randrange(VOCAB) for _ in range(9)])
        places = rng.sample(range(9), 6)
        inputs = []
        for row, place in zip(known, places, strict=True):
            inputs.append(row)
            if row.output_ids and rng.random() < 0.7:
                before[place] = row.output_ids[-1]
                if len(row.output_ids) > 1 and rng.random() < 0.5:  # it has an entry
                    row = replace(row, output_ids=[row.output_ids[-1], *row.output_ids[1:]])
                    known[len(inputs) - 1] = row
                inputs[-1] = replace(
                    row,
                    state=deepcopy(row.state),
                    output_ids=row.output_ids[:-1],
                    num_in_flight=1,
                    pending=place,
                )
        logits = 3 * torch.randn(len(known), VOCAB, generator=generator)
        wanted = sample(logits.clone(), build_sampling(known, CPU)).token_ids.tolist()
        got = on_device(logits.clone(), inputs, operations, before)
        assert got.token_ids.tolist() == wanted, seed
        batch = build_sampling(inputs, CPU)
        if batch.penalties is not None:
            batch.penalties.fill_in(before)
        assert sample(logits.clone(), batch).token_ids.tolist() == wanted, seed


def test_an_edit_does_not_hide_what_is_broken() -> None:
    """A mask that forbids the token whose logit is NaN would leave a row that looks sound."""
    state = SamplingState(SamplingParams(0.0), [1])
    mask = torch.full((-(-VOCAB // 32),), 0b10, dtype=torch.int32)
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = float("nan")
    got = on_device(logits, [SampleInput(state, [], mask)], SAMPLING_REFERENCE)
    assert got.broken.tolist() == [True]
    assert got.token_ids.tolist() == [0]


def test_plain_rows_edit_nothing() -> None:
    assert not SamplingState(SamplingParams(0.0), [1], [7]).edits_logits(0)
    early = SamplingState(SamplingParams(0.0, min_tokens=3), [1], [7])
    assert early.edits_logits(2)
    assert not early.edits_logits(3)
    assert SamplingState(SamplingParams(0.0, logit_bias={3: 1.0}), [1]).edits_logits(9)


def test_packed_arrays_come_back_aligned() -> None:
    arrays: list[Any] = [
        np.arange(5, dtype=np.int32),
        np.arange(6, dtype=np.float64).reshape(2, 3),
        np.zeros(0, dtype=np.int64),
        np.array([1.5], dtype=np.float32),
    ]
    packer = Packer()
    fields = [packer.add(array) for array in arrays]
    run = torch.full((packer.num_bytes,), 0xFF, dtype=torch.uint8)
    packer.write(run.numpy())
    for field, array in zip(fields, arrays, strict=True):
        assert field.offset % ALIGN == 0
        assert field.of(run).tolist() == array.tolist()
