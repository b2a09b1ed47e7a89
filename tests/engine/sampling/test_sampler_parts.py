"""What sampling is made of: random numbers, used tokens, cut tails, searches, logprobs."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import SamplingParams
from engine.request import PenaltyState, SampleInput, SamplingState, uniform, uniforms
from engine.sampling.sampler import PROMPT_SLICE, Logprobs, logprobs_of, prompt_logprobs, sample
from engine.sampling.sampling_batch import build_sampling
from engine.sampling.truncation import argmax, cut_below_, invert, top, truncate_
from tests.engine.sampling_rig import assert_follows, exact_distribution

CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def reference_uniform(seed: int, position: int) -> float:
    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
        return value ^ (value >> 31)

    state = mix(((seed & MASK) + 0x9E3779B97F4A7C15 * (position + 1)) & MASK)
    return min(((mix(state ^ (seed & MASK)) >> 11) + 0.5) / (1 << 53), 1 - 2**-53)


@given(st.lists(st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**31)), min_size=1))
def test_uniform_numbers_are_splitmix64(pairs: list[tuple[int, int]]) -> None:
    numbers = uniforms([seed for seed, _ in pairs], [position for _, position in pairs])
    assert numbers.tolist() == [reference_uniform(*pair) for pair in pairs]
    assert uniform(*pairs[0]) == numbers[0]
    assert ((numbers > 0) & (numbers < 1)).all()


def test_seeds_give_independent_uniform_numbers() -> None:
    numbers = uniforms(range(4000), [0] * 4000)
    counts = np.histogram(numbers, bins=8, range=(0, 1))[0]
    assert_follows(counts, np.full(8, 1 / 8))
    following = uniforms(range(4000), [1] * 4000)
    assert abs(float(((numbers - 0.5) * (following - 0.5)).mean()) * 12) < 0.06


TOKENS = st.lists(st.integers(0, 30), max_size=80)


@given(TOKENS, st.lists(TOKENS, max_size=6))
def test_penalty_states_count_what_was_generated(prompt: list[int], steps: list[list[int]]) -> None:
    state = PenaltyState(SamplingParams(repetition_penalty=2.0), prompt)
    plain = PenaltyState(SamplingParams(presence_penalty=2.0), prompt)
    output: list[int] = []
    for step in steps:
        output += step
        counted = Counter(output)
        for each, known in ((state, set(prompt) | set(output)), (plain, set(output))):
            each.update(output)
            assert sorted(each.ids.tolist()) == sorted(known)
            seen = dict(zip(each.ids.tolist(), each.counts.tolist(), strict=True))
            assert all(seen[token] == counted[token] for token in known)
    state.update(output[:1])
    assert sorted(state.ids.tolist()) == sorted(set(prompt) | set(output[:1]))


def weights_of(seed: int, vocab: int, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, vocab, generator=generator) * 3
    if kind == "ties":
        logits = logits.round()
    weights = logits.softmax(-1)
    if kind == "sparse":
        weights[:, ::3] = 0
        weights[0, 4:] = 0
    return weights


def truncated(weights: torch.Tensor, top_k: int, top_p: float, short_list: int) -> torch.Tensor:
    rows = len(weights)
    result = weights.clone()
    truncate_(
        result,
        torch.full((rows,), top_k),
        torch.full((rows,), top_p, dtype=torch.float64),
        short_list,
    )
    return result


@pytest.mark.parametrize("kind", ["plain", "ties", "sparse"])
@pytest.mark.parametrize("vocab", [5, 64, 700])
@pytest.mark.parametrize("top_k", [1, 4, 33, 300, 10**9])
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 0.99999, 1.0])
def test_the_short_list_and_the_full_sort_cut_alike(
    kind: str, vocab: int, top_k: int, top_p: float
) -> None:
    weights = weights_of(vocab, vocab, kind)
    wanted = truncated(weights, top_k, top_p, 0)
    for short_list in (1, 3, 34, 129):
        assert torch.equal(truncated(weights, top_k, top_p, short_list), wanted), short_list
    for row in range(len(weights)):
        logs = weights[row].double().log().tolist()
        params = SamplingParams(top_k=min(top_k, vocab), top_p=top_p)
        exact = exact_distribution(logs, params)
        assert ((wanted[row] > 0).numpy() == (exact > 0)).all()
        assert torch.equal(truncated(weights[row : row + 1], top_k, top_p, 34)[0], wanted[row])


def test_min_p_cuts_relative_to_the_likeliest() -> None:
    weights = torch.tensor([[0.5, 0.25, 0.05, 0.2], [0.1, 0.1, 0.7, 0.1]])
    cut_below_(weights, torch.tensor([0.45, 1.0]))
    assert weights.tolist() == [[0.5, 0.25, 0.0, 0.0], [0.0, 0.0, pytest.approx(0.7), 0.0]]


@pytest.mark.parametrize("vocab", [1, 3, 64, 65, 1000])
def test_searches_agree_with_torchs_own(vocab: int) -> None:
    values = weights_of(3, vocab, "plain")
    assert torch.equal(argmax(values), values.argmax(-1))
    assert torch.equal(argmax(-values), (-values).argmax(-1))
    for count in (1, 2, 20, 2000):
        found, index = top(values, count)
        assert torch.equal(found, values.topk(min(count, vocab)).values)
        assert torch.equal(values.gather(-1, index), found)
    running = values.double().cumsum(-1)
    for number in (1e-12, 0.1, 0.5, 0.999, 1 - 2**-53, 1.0):
        found = invert(values, torch.full((5,), number).double())
        before = running.gather(-1, found[:, None]).squeeze(-1) - values.gather(
            -1, found[:, None]
        ).squeeze(-1)
        after = running.gather(-1, found[:, None]).squeeze(-1)
        target = number * running[:, -1]
        assert ((before - 1e-6 <= target) & (target <= after + 1e-6)).all()


def test_the_first_of_equal_largest_entries_is_found() -> None:
    values = torch.zeros(2, 300)
    values[1, 70:90] = 1.0
    assert argmax(values).tolist() == [0, 70]


def test_a_weight_of_zero_is_never_found() -> None:
    weights = torch.zeros(1, 500)
    weights[0, [130, 131, 300]] = torch.tensor([1e-30, 1.0, 1e-30])
    for number in (1e-300, 1e-12, 0.3, 1 - 2**-53, 1.0):
        assert int(invert(weights, torch.tensor([number]).double())) in (130, 131, 300)


def reference_logprobs(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().log_softmax(-1)


def test_logprobs_are_the_models_own() -> None:
    """Whatever is done to the logits afterwards; each row gets the list it asked for."""
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)) * 3
    exact = reference_logprobs(logits)
    params = SamplingParams(
        temperature=0.3, seed=2, logit_bias={5: 9.0}, presence_penalty=2.0, top_k=3
    )
    counts = [3, -1, 0, 20]
    rows = [SampleInput(SamplingState(params, [1], (), count), [7, 8]) for count in counts]
    output = sample(logits.clone(), build_sampling(rows, CPU))
    assert output.logprobs is not None
    messages = output.logprobs.messages([count for count in counts if count >= 0])
    for row, message in zip((0, 2, 3), messages, strict=True):
        token = int(output.token_ids[row])
        assert message.logprob == pytest.approx(float(exact[row, token]), abs=1e-5)
        assert len(message.top) == counts[row]
        best = exact[row].topk(max(counts[row], 1))
        for (token, value), wanted, index in zip(
            message.top, best.values.tolist(), best.indices.tolist(), strict=False
        ):
            assert token == index
            assert value == pytest.approx(wanted, abs=1e-5)
    none = [SampleInput(SamplingState(params, [1]), [])] * 4
    assert sample(logits.clone(), build_sampling(none, CPU)).logprobs is None


def test_a_list_of_equal_logprobs_is_in_order_of_ids() -> None:
    logs = torch.zeros(1, 90).log_softmax(-1)
    found = logprobs_of(logs, torch.tensor([3]), 90)
    assert found.top_ids[0].tolist() == list(range(90))


@pytest.mark.parametrize("length", [0, 1, PROMPT_SLICE, PROMPT_SLICE * 2 + 7])
def test_prompt_logprobs_are_computed_in_slices(length: int) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(length, 8, generator=generator).bfloat16()
    head = torch.randn(8, 77, generator=generator).bfloat16()
    ids = torch.randint(77, (length,), generator=generator)
    sizes: list[int] = []

    def project(piece: torch.Tensor) -> torch.Tensor:
        sizes.append(len(piece))
        return piece @ head

    sliced = prompt_logprobs(hidden, ids, 5, project)
    whole = prompt_logprobs(hidden @ head, ids, 5)
    exact = reference_logprobs((hidden @ head).float())
    assert max(sizes, default=0) <= PROMPT_SLICE
    for found in (sliced, whole):
        assert isinstance(found, Logprobs)
        assert torch.allclose(found.chosen.double(), exact.gather(-1, ids[:, None])[:, 0])
        assert torch.allclose(found.top_values.double(), exact.topk(5).values)
        assert torch.allclose(exact.gather(-1, found.top_ids), exact.topk(5).values)
    assert len(sliced.messages([5] * length)) == length
