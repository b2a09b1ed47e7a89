"""Sampling: the right distribution, and the same token whatever a row is batched with."""

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine.protocol import SamplingParams
from engine.request import SampleInput, SamplingState, check_sampling, uniform
from engine.sampling.sampler import SampleOutput, sample
from engine.sampling.sampling_batch import build_sampling
from kernels.native_calls import library
from tests.engine.sampling_rig import assert_follows, exact_distribution

CPU = torch.device("cpu")
VOCAB = 45  # no whole block
NUM_DRAWS = 3000
FEW_DRAWS = 800  # of a pair: what two parameters do to each other is no small thing
PROMPT = [1, 2, 3, 4, 4, 30]
OUTPUT = [3, 5, 5, 6, 44, 5]
STOPS = [0, 7]

# Each parameter away from its default. "mask" stands for a constraint.
PARAMETERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 7},
    "min_p": {"min_p": 0.12},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "presence_penalty": {"presence_penalty": 0.9},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "logit_bias": {"logit_bias": {0: -3.0, 5: 2.0, 20: 1.5, 44: 1.0}},
    "min_tokens": {"min_tokens": 7},
    "mask": {},
}
CASES = [
    *((name,) for name in PARAMETERS),
    *itertools.combinations(PARAMETERS, 2),
    tuple(PARAMETERS),
]


@pytest.fixture(autouse=True, params=["operators", "kernel"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here holds for torch's operators and for the C++ kernel."""
    if request.param == "kernel":
        native = library()
        if native is None:
            pytest.skip("no C++ kernels for this processor")
        drawing = functools.partial(sample, drawer=native.draw)
        monkeypatch.setattr(sys.modules[__name__], "sample", drawing)


def logits_of(seed: int, num_rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab, generator=generator) * 1.5


def mask_of(allowed: Sequence[int], vocab: int = VOCAB) -> torch.Tensor:
    bits = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))


def draw(logits: torch.Tensor, rows: Sequence[SampleInput]) -> SampleOutput:
    return sample(logits.clone(), build_sampling(rows, CPU))


def counts_of(logits: torch.Tensor, rows: Sequence[SampleInput]) -> np.ndarray[Any, Any]:
    tokens = draw(logits.expand(len(rows), -1), rows).token_ids
    return torch.bincount(tokens, minlength=logits.shape[-1]).numpy()


@pytest.mark.parametrize("names", CASES, ids="-".join)
def test_frequencies_follow_the_exact_distribution(names: tuple[str, ...]) -> None:
    """Every parameter, every pair of parameters, and all of them together."""
    settings = {key: value for name in names for key, value in PARAMETERS[name].items()}
    allowed = [0, 3, 5, 7, *range(9, 33), 44] if "mask" in names else None
    mask = None if allowed is None else mask_of(allowed)
    logits = logits_of(11)
    rows = [
        SampleInput(
            SamplingState(SamplingParams(seed=seed, **settings), PROMPT, STOPS), OUTPUT, mask
        )
        for seed in range(FEW_DRAWS if len(names) == 2 else NUM_DRAWS)
    ]
    params = SamplingParams(**settings)
    exact = exact_distribution(logits[0].tolist(), params, PROMPT, OUTPUT, STOPS, allowed)
    assert_follows(counts_of(logits, rows), exact)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.5},
        {"top_p": 0.97},  # more tokens than the short list
        {"top_k": 100},
        {"top_k": 900},  # more than any short list
        {"top_k": 600, "top_p": 0.9},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 2.5, "top_p": 0.9},
        {},
    ],
    ids=str,
)
def test_a_larger_vocabulary(settings: dict[str, Any]) -> None:
    logits = logits_of(12, vocab=1500) * 2
    rows = [
        SampleInput(SamplingState(SamplingParams(seed=seed, **settings), PROMPT), [])
        for seed in range(NUM_DRAWS)
    ]
    exact = exact_distribution(logits[0].tolist(), SamplingParams(**settings))
    assert_follows(counts_of(logits, rows), exact)


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"top_p": 0.4}, {"min_p": 0.9}], ids=str)
def test_equal_logits_are_ranked_by_id(settings: dict[str, Any]) -> None:
    """Logits of bf16 models are full of ties; transformers and vLLM keep all or some of them."""
    logits = torch.zeros(1, 200)
    logits[0, 150:] = 1.0
    rows = [
        SampleInput(SamplingState(SamplingParams(seed=seed, **settings), []), [])
        for seed in range(2000)
    ]
    exact = exact_distribution(logits[0].tolist(), SamplingParams(**settings))
    assert_follows(counts_of(logits, rows), exact)


def test_top_k_1_is_greedy() -> None:
    logits = logits_of(1, 50, 300).bfloat16().float()
    rows = [SampleInput(SamplingState(SamplingParams(seed=i, top_k=1), []), []) for i in range(50)]
    assert torch.equal(draw(logits, rows).token_ids, logits.argmax(-1))


def mixed_rows(vocab: int) -> list[SampleInput]:
    """One row of each case, some greedy, with different seeds, prompts and outputs."""
    rows: list[SampleInput] = []
    for i, names in enumerate(CASES):
        settings = {key: value for name in names for key, value in PARAMETERS[name].items()}
        if i % 5 == 0:
            settings["temperature"] = 0.0
        if i % 7 == 0:
            settings["top_p"] = 0.999  # its nucleus is wider than the short list
        params = SamplingParams(seed=i * 77, **settings)
        state = SamplingState(params, [i % vocab, 2, 2, 9], STOPS, logprobs=i % 4 - 1)
        output = [(i * step) % vocab for step in range(i % 9)]
        mask = mask_of(range(0, vocab, 2), vocab) if "mask" in names else None
        rows.append(SampleInput(state, output, mask))
    return rows


@pytest.mark.parametrize("vocab", [45, 3000, 4096])
def test_a_row_draws_the_same_token_alone_and_in_any_batch(vocab: int) -> None:
    rows = mixed_rows(vocab)
    logits = logits_of(5, len(rows), vocab).bfloat16().float() * 2
    together = draw(logits, rows)
    assert not together.broken.any()
    assert int(together.token_ids.max()) < vocab
    for i, row in enumerate(rows):
        alone = draw(logits[i : i + 1], [row])
        assert int(alone.token_ids) == int(together.token_ids[i]), CASES[i]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3)).tolist()
    shuffled = draw(logits[order], [rows[i] for i in order])
    assert torch.equal(shuffled.token_ids, together.token_ids[order])


def test_a_rebuilt_state_draws_the_same_token() -> None:
    """A request that was sent again, or whose state was thrown away, goes on as it was."""
    vocab, params = 200, SamplingParams(
        seed=9, frequency_penalty=0.8, presence_penalty=0.3, repetition_penalty=1.3, top_k=40
    )  # fmt: skip
    kept = SamplingState(params, PROMPT)
    output: list[int] = []
    for step in range(60):
        logits = logits_of(step, 1, vocab)
        token = int(draw(logits, [SampleInput(kept, output)]).token_ids)
        fresh = SamplingState(params, PROMPT)
        assert int(draw(logits, [SampleInput(fresh, output)]).token_ids) == token
        output.append(token)


def test_position_and_seed_choose_the_number() -> None:
    logits = logits_of(1, 1, 3000)
    state = SamplingState(SamplingParams(seed=5), [1, 2, 3])
    longer = SamplingState(SamplingParams(seed=5), [1, 2])
    assert torch.equal(
        draw(logits, [SampleInput(state, [9])]).token_ids,
        draw(logits, [SampleInput(longer, [9, 9])]).token_ids,
    )
    others = [SampleInput(state, [0] * n) for n in range(40)]
    assert len(set(draw(logits.expand(40, -1), others).token_ids.tolist())) > 30


def test_min_tokens_holds_until_then_and_gives_way_to_a_mask() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 50.0
    state = SamplingState(SamplingParams(temperature=0.0, min_tokens=3), [1], STOPS)

    def token(output: list[int], mask: torch.Tensor | None = None) -> int:
        return int(draw(logits, [SampleInput(state, output, mask)]).token_ids)

    assert token([1, 1]) == 1
    assert token([1, 1, 1]) == 7
    assert token([1], mask_of([7, 31])) == 31
    only_the_end = mask_of([7])
    assert token([1], only_the_end) == 7
    assert torch.equal(only_the_end, mask_of([7])), "the caller's mask is not touched"


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-46, 1e-300])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(
    temperature: float, top_p: float
) -> None:
    state = SamplingState(SamplingParams(temperature, top_p, 1), [])
    output = draw(torch.tensor([[0.0, 1e4, 9.9e3]]), [SampleInput(state, [])])
    assert output.token_ids.tolist() == [1]
    assert not output.broken.any()


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-3, 1e38, 1e300])
def test_equals_share_at_any_temperature_and_nothing_else_is_drawn(temperature: float) -> None:
    """Also where float32 has no such number: 0 would be greedy, and infinity lose the mask."""
    params = [SamplingParams(temperature, seed=seed) for seed in range(16)]
    rows = [SampleInput(SamplingState(p, []), [], mask_of([8, 9, 10, 11])) for p in params]
    found = draw(torch.zeros(16, VOCAB), rows)
    assert found.token_ids.tolist() == [8 + int(4 * uniform(seed, 0)) for seed in range(16)]
    assert not found.broken.any()


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_broken_rows_are_named_and_harm_no_other(temperature: float) -> None:
    logits = logits_of(2, 6)
    logits[1, 2] = float("nan")
    logits[3, 0] = float("inf")
    logits[2, 1] = float("-inf")
    logits[4] = float("-inf")
    state = SamplingState(SamplingParams(temperature, top_p=0.9, seed=4), [])
    rows = [SampleInput(state, []) for _ in range(5)]
    rows.append(SampleInput(state, [], mask_of([])))
    output = draw(logits, rows)
    assert output.broken.tolist() == [False, True, False, True, True, True]
    for i in (0, 2):
        alone = draw(logits[i : i + 1], [rows[i]])
        assert int(alone.token_ids) == int(output.token_ids[i])


def test_default_rows_leave_the_logits_alone() -> None:
    logits = logits_of(3, 4)
    before = logits.clone()
    rows = [
        SampleInput(SamplingState(SamplingParams(temperature), []), [])
        for temperature in (0.0, 1.0, 0.5, 1.0)
    ]
    sample(logits, build_sampling(rows, CPU))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"frequency_penalty": 1e9}, "frequency_penalty"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias"),
        ({"logit_bias": {3: 1e30}}, "logit_bias"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ],
)
def test_what_cannot_be_sampled_is_refused_by_name(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        check_sampling(SamplingParams(**settings), VOCAB)


def test_what_can_be_sampled_is_let_through() -> None:
    check_sampling(SamplingParams(), VOCAB)
    for settings in PARAMETERS.values():
        check_sampling(SamplingParams(**settings), VOCAB, logprobs=20, prompt_logprobs=0)
    with pytest.raises(ValueError, match="prompt_logprobs"):
        check_sampling(SamplingParams(), VOCAB, prompt_logprobs=21)
