"""Experts in C++ against their definition in float64: every build that the processor runs."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional

from engine.registration.quantize import dequantize, quantize_rows
from kernels import int4_blocks
from kernels.int4_blocks import E2M1, FORMS, INT4_BLOCKS
from kernels.native_calls import (
    ACTIVATIONS,
    Experts,
    Gate,
    Linear,
    Mixture,
    NativeLibrary,
    Router,
    find,
    format_of,
)
from tests.kernels.guarded import Guards
from tests.kernels.test_native_calls import BUILDS, NOTHING, close, random

# y is rounded once; an inner value that rounding tips over is one of many.
BOUND = 4e-3
KINDS = ("bfloat16", "int8", INT4_BLOCKS, E2M1)
# Tokens, choices of each, experts, hidden, inner: one row an expert, many, none; ragged widths.
SIZES = [
    (1, 2, 4, 64, 32),
    (3, 4, 9, 96, 80),
    (16, 2, 3, 272, 48),
    (40, 3, 16, 80, 112),
    (70, 1, 2, 2112, 16),
]


@pytest.fixture(name="native", scope="module", params=[*map(pytest.param, BUILDS)] or [NOTHING])
def _native(request: pytest.FixtureRequest) -> NativeLibrary:
    path = find(request.param)
    assert path is not None
    built = NativeLibrary(path)
    built.set_threads(3)
    return built


@dataclass
class Stack:
    """Weights of all experts as they are kept, and what they stand for."""

    kept: torch.Tensor
    scale: torch.Tensor | None
    exact: torch.Tensor  # float64 [E, n, k]
    bias: torch.Tensor | None
    scheme: str = ""

    def linear(self) -> Linear:
        known = format_of(self.kept.dtype, self.scheme)
        assert known is not None
        _, n, k = self.exact.shape
        bias, scale = (None if t is None else t.data_ptr() for t in (self.bias, self.scale))
        return known.linear(self.kept.data_ptr(), bias, scale, n, k)

    @property
    def stride(self) -> int:
        return self.kept.stride(0) * self.kept.element_size()


def stack_of(guards: Guards, kind: str, num: int, n: int, k: int, biased: bool) -> Stack:
    weight = random(num * n, k, seed=n + k, scale=k**-0.5).view(num, n, k)
    bias = guards.input(random(num, n, seed=3)) if biased else None
    if kind in FORMS:
        kept = torch.stack([int4_blocks.quantize(one, scheme=kind) for one in weight])
        exact = torch.stack([int4_blocks.dequantize(one, k, kind) for one in kept])
        return Stack(guards.input(kept), None, exact.double(), bias, kind)
    if kind == "int8":
        values, scale = quantize_rows(weight.view(num * n, k), torch.bfloat16)
        exact = dequantize(values, scale).double().view(num, n, k)
        kept = guards.input(values.view(num, n, k))
        return Stack(kept, guards.input(scale.view(num, n)), exact, bias)
    return Stack(guards.input(weight), None, weight.double(), bias)


class Case:
    """One layer's experts."""

    def __init__(
        self, native: NativeLibrary, kind: str, sizes: Any, how: str = "silu", biased: bool = False
    ) -> None:
        _, _, num, size, inner = sizes
        self.native, self.guards, self.how = native, Guards(), how
        self.up = stack_of(self.guards, kind, num, 2 * inner, size, biased)
        self.down = stack_of(self.guards, kind, num, size, inner, biased)
        self.rounds = kind in FORMS or (kind == "int8" and native.rounds_int8)
        gate = Gate(0, ACTIVATIONS.get(how, 1), 1.0, float("inf"), 0.0)
        if how == "clamped":
            gate = Gate(1, ACTIVATIONS["silu"], 1.702, 0.8, 1.0)
        self.experts = Experts(
            self.up.linear(), self.down.linear(), self.up.stride, self.down.stride, gate, num
        )

    def meets(self, x: torch.Tensor) -> torch.Tensor:
        return (int4_blocks.rounded_rows(x) if self.rounds else x).double()

    def gated(self, both: torch.Tensor) -> torch.Tensor:
        if self.how == "clamped":
            gate, up = both[::2].clamp(max=0.8), both[1::2].clamp(-0.8, 0.8)
            return (up + 1) * gate * torch.sigmoid(1.702 * gate)
        gate, up = both.chunk(2)
        if self.how == "silu":
            return functional.silu(gate) * up
        return functional.gelu(gate, approximate="tanh" if self.how == "gelu_tanh" else "none") * up

    def wanted(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """float64, by its definition: slot by slot."""
        out = torch.zeros(x.shape, dtype=torch.float64)
        rows = self.meets(x)
        for t, of_token in enumerate(chosen.tolist()):
            for place, number in enumerate(of_token):
                if not 0 <= number < len(self.up.exact):
                    continue
                both = self.up.exact[number] @ rows[t]
                if self.up.bias is not None:
                    both = both + self.up.bias[number].double()
                inner = self.gated(both).to(torch.bfloat16)
                said = self.down.exact[number] @ self.meets(inner[None])[0]
                if self.down.bias is not None:
                    said = said + self.down.bias[number].double()
                out[t] += float(weights[t, place]) * said
        return out

    def run(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.native.experts(self.experts, x, chosen, weights)


def choices(sizes: Any, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, and distinct experts for each of its rows with their weights."""
    tokens, top_k, num, size, _ = sizes
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, num, generator=generator)
    weights, chosen = scores.topk(top_k, -1)
    return random(tokens, size, seed=1), chosen, weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
def test_experts_are_their_definition(native: NativeLibrary, kind: str, sizes: Any) -> None:
    case = Case(native, kind, sizes)
    x, chosen, weights = map(case.guards.input, choices(sizes))
    assert close(case.run(x, chosen, weights), case.wanted(x, chosen, weights), BOUND)
    case.guards.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["gelu", "gelu_tanh", "clamped"])
@pytest.mark.parametrize("biased", [False, True])
def test_gates_and_biases(native: NativeLibrary, kind: str, how: str, biased: bool) -> None:
    sizes = SIZES[1]
    case = Case(native, kind, sizes, how, biased)
    x, chosen, weights = choices(sizes)
    assert close(case.run(x, chosen, weights), case.wanted(x, chosen, weights), BOUND)
    case.guards.check()


@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_to_one_expert_and_numbers_of_none(native: NativeLibrary, kind: str) -> None:
    sizes = (33, 2, 5, 96, 48)
    case = Case(native, kind, sizes)
    x, chosen, weights = choices(sizes)
    chosen[:, 0], chosen[:, 1] = 3, 5
    chosen[4:6, 1], chosen[7:9] = -1, 1 << 40
    found = case.run(x, chosen, weights)
    assert close(found, case.wanted(x, chosen, weights), BOUND)
    assert not found[7:9].any()
    nothing = torch.full_like(chosen, 5)
    assert not case.run(x, nothing, weights).any()
    assert case.run(x[:0], chosen[:0], weights[:0]).shape == (0, 96)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_alone_and_among_others(native: NativeLibrary, kind: str) -> None:
    """To the bit, for any number of threads and of rows, and over several turns of work space."""
    sizes = (300, 4, 6, 96, 48)
    case = Case(native, kind, sizes)
    x, chosen, weights = choices(sizes)
    together = case.run(x, chosen, weights)
    for begin, end in ((0, 1), (17, 18), (3, 8), (40, 171)):
        part = slice(begin, end)
        found = case.run(x[part].contiguous(), chosen[part], weights[part])
        assert torch.equal(found, together[part])
    for threads in (1, 2, 5):
        native.set_threads(threads)
        assert torch.equal(case.run(x, chosen, weights), together)
    native.set_threads(3)
    many = 40
    again = case.run(x.repeat(many, 1), chosen.repeat(many, 1), weights.repeat(many, 1))
    assert torch.equal(again, together.repeat(many, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row(
    native: NativeLibrary, kind: str, broken: float
) -> None:
    sizes = (8, 2, 3, 96, 48)
    case = Case(native, kind, sizes)
    x, chosen, weights = choices(sizes)
    fine = case.run(x, chosen, weights)
    x[3, 90] = broken
    found = case.run(x, chosen, weights)
    assert not found[3].isfinite().any()
    keep = [row for row in range(8) if row != 3]
    assert torch.equal(found[keep], fine[keep])


@pytest.mark.parametrize("normalize", [False, True])
def test_the_router_is_a_softmax_of_the_likeliest(native: NativeLibrary, normalize: bool) -> None:
    sizes = (40, 3, 16, 80, 112)
    case = Case(native, "bfloat16", sizes)
    x, _, _ = choices(sizes)
    gate, bias = random(16, 80, seed=9, scale=0.2), random(16, seed=10)
    plain = format_of(torch.bfloat16)
    assert plain is not None
    router = Router(plain.linear(gate.data_ptr(), bias.data_ptr(), None, 16, 80), 3, normalize)
    scores = functional.linear(x.float(), gate.float(), bias.float())
    weights, chosen = scores.softmax(-1).topk(3, -1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    found = native.mixture(Mixture(router, case.experts), x)
    assert close(found, case.wanted(x, chosen, weights), BOUND)
    level = torch.zeros_like(gate)  # all alike: the first ones
    router.gate = plain.linear(level.data_ptr(), None, None, 16, 80)
    first = torch.arange(3).expand(40, 3)
    even = torch.full((40, 3), 1 / 3 if normalize else 1 / 16)
    found = native.mixture(Mixture(router, case.experts), x)
    assert torch.equal(found, case.run(x, first, even))
    x[5] = torch.nan
    assert native.mixture(Mixture(router, case.experts), x)[5].isnan().all()
    # A score that is NaN shows, whichever it is and though it is never chosen.
    gate[11, 7] = torch.nan
    router.gate = plain.linear(gate.data_ptr(), None, None, 16, 80)
    assert native.mixture(Mixture(router, case.experts), x).isnan().all()


def test_the_comparison_notices_what_is_wrong(native: NativeLibrary) -> None:
    """Another expert's weights, another weight of the sum, a row taken for its neighbour."""
    sizes = SIZES[3]
    case = Case(native, INT4_BLOCKS, sizes)
    x, chosen, weights = choices(sizes)
    wanted = case.wanted(x, chosen, weights)
    assert not close(case.run(x, (chosen + 1) % 16, weights), wanted, BOUND)
    assert not close(case.run(x, chosen, weights.roll(1, 1)), wanted, BOUND)
    assert not close(case.run(x.roll(1, 0), chosen, weights), wanted, BOUND)
    case.experts.down_bytes = 0
    assert not close(case.run(x, chosen, weights), wanted, BOUND)
