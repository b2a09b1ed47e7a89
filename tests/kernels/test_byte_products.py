"""Products of bytes in C++ against their definition in torch: every build that the processor runs.

The definition: x rounded to eight bits in groups of 32, times what the stored weights stand for.
"""

from typing import Any

import pytest
import torch
from torch.nn import functional

from engine.registration.quantize import dequantize, quantize_rows
from kernels import int4_blocks
from kernels.int4_blocks import FORMS, INT4_BLOCKS
from kernels.native_calls import NativeLibrary, find, format_of
from tests.kernels.guarded import Guards
from tests.kernels.test_native_calls import BUILDS, NOTHING, close, random

# NativeRows, columns, outputs: ends in the middle of groups, blocks, panels, tiles and pieces.
SIZES = [
    (1, 32, 16),
    (1, 896, 304),
    (2, 70, 48),
    (3, 31, 16),
    (5, 897, 272),
    (7, 352, 128),
    (16, 2100, 32),
    (131, 96, 80),
]
ODD = [(1, 64, 5), (4, 100, 17), (13, 65, 250)]


@pytest.fixture(name="native", scope="module", params=[*map(pytest.param, BUILDS)] or [NOTHING])
def _native(request: pytest.FixtureRequest) -> NativeLibrary:
    path = find(request.param)
    assert path is not None
    built = NativeLibrary(path)
    built.set_threads(3)
    return built


class Case:
    """Weights of both kinds and what they stand for."""

    def __init__(self, native: NativeLibrary, kind: str, n: int, k: int) -> None:
        weight = random(n, k, seed=2, scale=k**-0.5)
        self.scale: torch.Tensor | None = None
        self.rounds = kind in FORMS or native.rounds_int8
        self.how: dict[str, Any] = {}
        if kind in FORMS:
            self.weight = int4_blocks.quantize(weight, scheme=kind)
            self.exact = int4_blocks.dequantize(self.weight, k, kind).double()
            self.how = {"scheme": kind}
        else:
            self.weight, self.scale = quantize_rows(weight, torch.bfloat16)
            self.exact = dequantize(self.weight, self.scale).double()

    def meets(self, x: torch.Tensor) -> torch.Tensor:
        """x as the product takes it."""
        return (int4_blocks.rounded_rows(x) if self.rounds else x).double()


@pytest.mark.parametrize("kind", ["int8", *FORMS])
@pytest.mark.parametrize("sizes", SIZES)
def test_products_are_those_of_rounded_rows(
    native: NativeLibrary, kind: str, sizes: tuple[int, int, int]
) -> None:
    num_rows, k, n = sizes
    case, guards = Case(native, kind, n, k), Guards()
    x, bias = guards.input(random(num_rows, k, seed=1)), guards.input(random(n, seed=3))
    scale = None if case.scale is None else guards.input(case.scale)
    wanted = functional.linear(case.meets(x), case.exact, bias.double())
    found = native.linear(x, case.weight, bias, wide=True, scale=scale, **case.how)
    assert close(found, wanted, 1e-6)
    rounded = native.linear(x, case.weight, bias, scale=scale, **case.how)
    assert torch.equal(rounded, found.bfloat16())
    bare = native.linear(x, case.weight, wide=True, scale=scale, **case.how)
    assert close(bare, wanted - bias.double(), 1e-6)
    guards.check()


@pytest.mark.parametrize("sizes", ODD)
def test_int8_of_any_number_of_outputs(native: NativeLibrary, sizes: tuple[int, int, int]) -> None:
    num_rows, k, n = sizes
    case, x = Case(native, "int8", 2 * n, k), random(num_rows, k, seed=1)
    assert case.scale is not None
    single = native.linear(x, case.weight[:n].contiguous(), wide=True, scale=case.scale[:n])
    gate, up = functional.linear(case.meets(x), case.exact).chunk(2, -1)
    assert close(single, gate, 1e-6)
    both = native.linear(x, case.weight, activation="silu", wide=True, scale=case.scale)
    assert close(both, functional.silu(gate) * up, 3e-6)


@pytest.mark.parametrize("kind", ["int8", *FORMS])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("sizes", SIZES)
def test_gate_and_up(
    native: NativeLibrary, kind: str, sizes: tuple[int, int, int], activation: str
) -> None:
    num_rows, k, n = sizes
    case, x = Case(native, kind, 2 * n, k), random(num_rows, k, seed=1)
    gate, up = functional.linear(case.meets(x), case.exact).chunk(2, -1)
    if activation == "silu":
        acted = functional.silu(gate)
    else:
        acted = functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    how: Any = {"wide": True, "scale": case.scale} | case.how
    found = native.linear(x, case.weight, activation=activation, **how)
    assert close(found, acted * up, 3e-6)


@pytest.mark.parametrize("kind", ["int8", *FORMS])
def test_a_row_is_the_same_alone_and_among_others(native: NativeLibrary, kind: str) -> None:
    """To the bit, for any number of threads, and of rows where x is rounded: floats are added up in
    another order for few rows."""
    case, x = Case(native, kind, 272, 900), random(40, 900, seed=1)
    how: Any = {"wide": True, "scale": case.scale} | case.how
    together = native.linear(x, case.weight, **how)
    for count in (1, 2, 5, 6, 7, 13, 39) if case.rounds else ():
        assert torch.equal(native.linear(x[:count], case.weight, **how), together[:count])
    for threads in (1, 2, 5):
        native.set_threads(threads)
        assert torch.equal(native.linear(x, case.weight, **how), together)
    native.set_threads(3)


@pytest.mark.parametrize("kind", ["int8", *FORMS])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_seen(native: NativeLibrary, kind: str, broken: float) -> None:
    """In its own row, and in no other."""
    case, x = Case(native, kind, 80, 300), random(8, 300, seed=1)
    how: Any = {"wide": True, "scale": case.scale} | case.how
    fine = native.linear(x, case.weight, **how)
    x[3, 297] = broken
    found = native.linear(x, case.weight, **how)
    assert not found[3].isfinite().any()
    assert not case.rounds or bool(found[3].isnan().all())
    keep = [row for row in range(8) if row != 3]
    assert torch.equal(found[keep], fine[keep])


@pytest.mark.parametrize("kind", ["int8", *FORMS])
def test_nothing_large_and_tiny_rows(native: NativeLibrary, kind: str) -> None:
    case, bias = Case(native, kind, 48, 130), random(48, seed=3)
    how: Any = {"wide": True, "scale": case.scale} | case.how
    x = random(5, 130, seed=1)
    x[0] = 0
    x[1] *= 1e-36  # 127 over its largest is beyond all floats
    x[2] *= 1e30
    x[3, :40] = 0  # a whole group, and a part of the next
    x[4, 5] = 1e4  # costs its group, and no other
    wanted = functional.linear(case.meets(x), case.exact, bias.double())
    found = native.linear(x, case.weight, bias, **how)
    assert torch.equal(found[0], bias.float())
    for row in range(5):
        assert close(found[row], wanted[row], 1e-6), row
    assert torch.equal(native.linear(x[:0], case.weight, **how), found[:0])


def test_full_bytes_on_both_sides(native: NativeLibrary) -> None:
    """Sums of the largest products: nothing is cut off on the way, and no group runs over."""
    for sign in (1, -1):
        x = torch.full((2, 4096), 1.0).bfloat16() * sign
        weight = torch.full((16, 4096), 127, dtype=torch.int8)
        weight[::2] = -127
        scale = torch.full((16,), 1 / 128).bfloat16()
        found = native.linear(x, weight, wide=True, scale=scale)
        assert close(found, x.double() @ dequantize(weight, scale).double().T, 1e-6)


@pytest.mark.parametrize("scheme", FORMS)
@pytest.mark.parametrize("num_rows", [1, 4, 6])
def test_the_largest_of_four_bits_on_both_sides(
    native: NativeLibrary, scheme: str, num_rows: int
) -> None:
    """Sums in 16 bits hold the steps that they are given: for few rows and for many."""
    form = FORMS[scheme]
    for sign in (1, -1):
        x = torch.full((num_rows, 4096), 1.0).bfloat16() * sign
        codes = torch.full((16, 4096), form.values.index(max(form.values)), dtype=torch.uint8)
        codes[::2] = form.values.index(min(form.values))
        ones = torch.ones(16, 4096 // form.neighbours)
        blocks = int4_blocks.pack(codes, ones, ones if form.zeros else None)
        exact = int4_blocks.dequantize(blocks, 4096, scheme).double()
        found = native.linear(x, blocks, wide=True, scheme=scheme)
        assert close(found, x.double() @ exact.T, 1e-6)


def test_which_forms_there_are_kernels_for() -> None:
    for scheme, form in FORMS.items():
        known = format_of(torch.uint8, scheme)
        assert known is not None
        assert known.surplus == -min(form.values)
        assert (known.table is None) == (form.values == FORMS[INT4_BLOCKS].values)
    assert format_of(torch.float32) is None


def test_the_comparison_notices_what_is_wrong(native: NativeLibrary) -> None:
    """Another scale, another nibble, a row of x taken for its neighbour."""
    x = random(4, 256, seed=1)
    case = Case(native, "int4_blocks", 32, 256)
    wanted = functional.linear(case.meets(x), case.exact)
    for place in (0, 33, 64, 575):
        wrong = case.weight.clone()
        wrong[1, 2, place] ^= 0x30
        assert not close(native.linear(x, wrong, wide=True), wanted, 1e-6), place
    assert not close(native.linear(x.roll(1, 0), case.weight, wide=True), wanted, 1e-6)
    assert not close(native.linear(x.roll(1, 1), case.weight, wide=True), wanted, 1e-6)
