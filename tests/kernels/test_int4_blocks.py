"""int4 in blocks: the layout, how weights are rounded, and torch's way against the definition."""

import pytest
import torch
from torch.nn import functional

from kernels import int4_blocks
from kernels.int4_blocks import (
    FORMS,
    GROUP,
    INT4_BLOCKS,
    Steps,
    block_shape,
    dequantize,
    fits,
    pack,
    quantize,
    rounded_rows,
)


@pytest.mark.parametrize("scheme", FORMS)
def test_where_a_weight_lies(scheme: str) -> None:
    """Every nibble, scale and zero by the words of the module's docstring."""
    generator, form = torch.Generator().manual_seed(1), FORMS[scheme]
    codes = torch.randint(0, 16, (32, 128), generator=generator, dtype=torch.uint8)
    groups = 128 // form.neighbours
    scale = torch.randn(32, groups, generator=generator).bfloat16()
    zero = torch.randn(32, groups, generator=generator).bfloat16() if form.zeros else None
    blocks = pack(codes, scale, zero)
    head = 128 if form.zeros or form.halves else 64
    assert blocks.shape == block_shape((32, 128), scheme) == (2, 2, head + 512)
    for row, column in [(0, 0), (3, 5), (15, 63), (16, 64), (31, 127), (20, 100), (7, 31), (7, 32)]:
        block = blocks[row // 16, column // 64]
        line, place = divmod(column % 64, 8)
        byte = int(block[head + 64 * line + 4 * (row % 16) + place % 4])
        assert (byte >> 4 if place >= 4 else byte & 15) == codes[row, column]
        heads = block[:head].view(torch.bfloat16).view(2, -1, 16)[column % 64 // 32, :, row % 16]
        half = column % 32 // 16 if form.halves else 0
        assert heads[half] == scale[row, column // form.neighbours]
        assert zero is None or heads[1] == zero[row, column // 32]
    wide = torch.tensor(form.values)[codes.long()].float()
    if zero is not None:
        wide = wide - zero.float().repeat_interleave(32, 1)
    wide = wide * scale.float().repeat_interleave(form.neighbours, 1)
    assert torch.equal(dequantize(blocks, 128, scheme), wide)


@pytest.mark.parametrize("scheme", FORMS)
def test_each_form_rounds_as_its_codes_can(scheme: str) -> None:
    """Root mean squares of what is lost, over those of normal weights: as others have them."""
    most = {INT4_BLOCKS: 0.084, "int4_zeros": 0.076, "int4_e2m1": 0.095, "int4_e2m1_16": 0.088}
    most |= {"int4_nf4": 0.081, "int4_fp4": 0.112, "int4_iq4": 0.078}
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(5))
    lost = dequantize(quantize(weight, scheme=scheme), 512, scheme) - weight
    assert float(lost.norm() / weight.norm()) < most[scheme]


@pytest.mark.parametrize("k", [32, 64, 70, 352, 1000])
def test_rounding_is_within_half_a_step_or_better_in_sum(k: int) -> None:
    weight = torch.randn(48, k) * torch.logspace(-6, 3, 48)[:, None]
    weight[7] = 0
    weight[8] = 1e-44  # its scale is nothing
    kept = dequantize(quantize(weight), k)
    assert kept.shape == weight.shape
    assert not kept[7:9].any()
    groups = functional.pad(weight, (0, -k % GROUP)).view(48, -1, GROUP)
    found = functional.pad(kept, (0, -k % GROUP)).view(48, -1, GROUP)
    # The plain rule: the largest of a group is minus eight steps.
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    step = (largest / -8).bfloat16().float()
    step = torch.where(step == 0, torch.ones_like(step), step)
    plain = (groups / step).round().clamp(-8, 7) * step
    ours, theirs = ((it - groups).square().sum(-1) for it in (found, plain))
    assert bool((ours <= theirs * 1.0001 + 1e-30).all())
    assert float(ours[:7].sum()) < float(theirs[:7].sum()) or k < 64


def test_weights_on_the_grid_stay() -> None:
    values = torch.randint(-8, 8, (16, 64), generator=torch.Generator().manual_seed(2)).float()
    values[:, ::32] = -8  # so that every group's largest is known
    assert torch.equal(dequantize(quantize(values * 0.25), 64), values * 0.25)


@pytest.mark.parametrize("scheme", FORMS)
def test_a_transposed_weight_is_rounded_like_any(scheme: str) -> None:
    weight = torch.randn(128, 32, generator=torch.Generator().manual_seed(8))
    turned = quantize(weight.T, scheme=scheme)
    assert torch.equal(turned, quantize(weight.T.contiguous(), scheme=scheme))


@pytest.mark.parametrize("scheme", FORMS)
def test_zeros_stay_zeros(scheme: str) -> None:
    """Also where the table has none."""
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(7))
    weight[:, 32:64] = 0
    weight[5] = 0
    kept = dequantize(quantize(weight, scheme=scheme), 128, scheme)
    assert not kept[:, 32:64].any()
    assert not kept[5].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    weight = torch.ones(16, 64)
    weight[3, 40] = bad
    with pytest.raises(ValueError, match="not finite"):
        quantize(weight)


def test_what_fits() -> None:
    assert fits((16, 33))
    assert fits(torch.Size((128, 64)))
    assert not fits((24, 64))
    assert not fits((16, 64, 2))
    assert not fits((16,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "k"), [(1, 64), (3, 70), (40, 352)])
@pytest.mark.parametrize("scheme", FORMS)
def test_torchs_way_is_the_definition(scheme: str, dtype: torch.dtype, rows: int, k: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, rows, k, generator=generator).to(dtype)
    blocks = quantize(torch.randn(64, k, generator=generator) * k**-0.5, scheme=scheme)
    bias = torch.randn(64, generator=generator).to(dtype)
    wanted = int4_blocks.int4_blocks_linear_ref(x, blocks, bias, scheme)
    found = int4_blocks.int4_blocks_linear(x, blocks, bias, scheme)
    assert found.shape == (2, rows, 64)
    assert found.dtype == dtype
    bound = 1e-5 if dtype == torch.float32 else 0.03
    assert torch.allclose(found.float(), wanted.float(), atol=bound, rtol=bound)


def test_torchs_way_goes_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, blocks = torch.randn(3, 64), quantize(torch.randn(160, 64))
    whole = int4_blocks.int4_blocks_linear(x, blocks)
    monkeypatch.setattr(int4_blocks, "WIDE_BYTES", 3 * 64 * 16 * 4)
    assert torch.allclose(int4_blocks.int4_blocks_linear(x, blocks), whole, atol=1e-6)


def test_rows_are_rounded_in_groups() -> None:
    x = torch.randn(3, 70, generator=torch.Generator().manual_seed(4))
    x[1, 3] = 1000.0
    found = rounded_rows(x)
    assert found.shape == x.shape
    groups = functional.pad(x, (0, 26)).view(3, 3, 32)
    step = (groups.abs().amax(-1, keepdim=True) / 127).expand(3, 3, 32).reshape(3, 96)[:, :70]
    assert bool(((found - x).abs() <= step * 0.5001).all())
    assert bool(((found / step) - (found / step).round()).abs().max() < 1e-4)
    assert found[1, 40] != 0  # another group does not feel the 1000
    x[2, 5] = torch.inf
    broken = rounded_rows(x)
    assert bool(broken[2, :32].isnan().all())
    assert not broken[2, 32:].isnan().any()


def test_steps_that_weights_were_rounded_to_are_kept() -> None:
    codes = torch.randint(-8, 8, (32, 96))
    codes[:, 32:64] //= 4  # few of the sixteen: a search would take a larger step
    steps = (torch.rand(32, 3) + 0.5).to(torch.bfloat16).to(torch.float32)
    weight = codes * steps.repeat_interleave(32, 1)
    kept = int4_blocks.quantize(weight, steps=Steps(steps))
    assert torch.equal(int4_blocks.dequantize(kept, 96), weight)
    # Steps that fit badly are not taken: the search is still there.
    wrong = int4_blocks.quantize(weight, steps=Steps(steps * 100))
    assert torch.equal(wrong, int4_blocks.quantize(weight))


@pytest.mark.parametrize("scheme", FORMS)
def test_codes_of_every_form_are_kept(scheme: str) -> None:
    generator, form = torch.Generator().manual_seed(6), FORMS[scheme]
    codes = torch.randint(0, 16, (32, 192), generator=generator, dtype=torch.uint8)
    groups = 192 // form.neighbours
    scale = (torch.rand(32, groups, generator=generator) + 0.5).bfloat16().float()
    zero = torch.randn(32, groups, generator=generator).mul(4).bfloat16().float()
    steps = Steps(scale, zero if form.zeros else None)
    weight = dequantize(pack(codes, scale, steps.zero), 192, scheme)
    kept = quantize(weight, steps=steps, scheme=scheme)
    assert torch.equal(dequantize(kept, 192, scheme), weight)
    for start in (0, 16):  # some rows by themselves
        part = steps.of_rows(start, start + 16)
        some = quantize(weight[start : start + 16], steps=part, scheme=scheme)
        assert torch.equal(some, kept[start // 16 : start // 16 + 1])
