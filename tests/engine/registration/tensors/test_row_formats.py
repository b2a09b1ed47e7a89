"""FP8, compressed-tensors and FP4 against transformers' own arithmetic, and what is refused."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from engine.errors import RegistrationRefused
from engine.registration.tensors import Declared
from engine.registration.tensors.files import SourceTensors
from engine.registration.tensors.row_formats import find_rows
from tests.engine.registration.quantized_kit import FP8, Tensors, fp8, integers, mxfp4, nvfp4


def value(folder: Path, tensors: Tensors, declared: Declared) -> torch.Tensor:
    """The one weight of a file."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    with SourceTensors([folder / "model.safetensors"]) as files:
        ((name, read),) = find_rows(files, declared)
        quantized, used = read()
        assert (name, used) == ("x.weight", set(tensors))
        rows = quantized.open()
        whole = torch.cat([rows(start, start + 1) for start in range(quantized.shape[0])])
    assert whole.shape == quantized.shape
    return whole


def named(tensors: Tensors) -> Tensors:
    return {f"x.{ending}": tensor for ending, tensor in tensors.items()}


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (0, 0), (1, 0)])
def test_fp8_is_what_transformers_makes_of_it(tmp_path: Path, block: tuple[int, int]) -> None:
    weight = torch.randn(256, 384)
    tensors, _ = fp8(block, "weight_scale_inv")(weight)
    ours = value(tmp_path, named(tensors), Declared("fp8", (block,) if block[0] > 1 else ()))
    theirs = Fp8Dequantize(None)._dequantize_one(
        tensors["weight"], tensors["weight_scale_inv"], torch.float32
    )
    assert torch.equal(ours, theirs)


def test_every_code_of_fp8_and_every_exponent_come_out(tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).reshape(16, 16)
    scale = torch.arange(110, 126, dtype=torch.uint8).reshape(16, 1)
    found = value(
        tmp_path, {"x.weight": codes, "x.weight_scale": scale}, Declared("fp8", ((1, 16),))
    )
    wanted = codes.to(torch.float32) * 2.0 ** (scale.to(torch.float32) - 127)
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    assert int(found.isnan().sum()) == 2  # 0x7f and 0xff, which the pack's writer refuses


def test_stacked_experts_have_scales_of_their_own(tmp_path: Path) -> None:
    codes = torch.randn(3, 32, 48).to(FP8)
    scale = torch.rand(3, 2, 3) + 0.5
    declared = Declared("fp8", ((16, 16),))
    found = value(tmp_path, {"x.weight": codes, "x.weight_scale_inv": scale}, declared)
    for one in range(3):
        each = scale[one].repeat_interleave(16, 0).repeat_interleave(16, 1)
        assert torch.equal(found[one], codes[one].to(torch.float32) * each)


@pytest.mark.parametrize("grid", [(), (1, 1), (32,), (32, 1), (32, 3), (2, 3)])
@pytest.mark.parametrize("kind", [torch.int8, torch.float32])
def test_stacked_integers_have_scales_and_zeros_of_their_own(
    tmp_path: Path, grid: tuple[int, ...], kind: torch.dtype
) -> None:
    codes = torch.randint(-128, 128, (3, 32, 48), dtype=torch.int8)
    scale = (torch.rand(3, *grid) + 0.5).to(torch.bfloat16)
    zero = torch.randint(-128, 128, scale.shape).to(kind)
    names = ("x.weight", "x.weight_scale", "x.weight_zero_point")
    tensors = dict(zip(names, (codes, scale, zero), strict=True))
    declared = Declared("compressed-tensors", ((1, 16), (16, 16)), (8,))
    found = value(tmp_path, tensors, declared)
    rows, columns = (*grid, 1, 1)[:2]
    for one, row, column in product(range(3), range(32), range(48)):
        place = (row * rows // 32, column * columns // 48)
        of = (one, *place[: len(grid)])
        wanted = (float(codes[one, row, column]) - float(zero[of])) * float(scale[of])
        assert float(found[one, row, column]) == wanted
    tensors["x.weight_zero_point"] = zero[:2].contiguous()
    with pytest.raises(RegistrationRefused, match=r"x\.weight_zero_point .* has the shape"):
        value(tmp_path, tensors, declared)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("k", [96, 61])
def test_zeros_may_be_packed_or_not(tmp_path: Path, packed: bool, bits: int, k: int) -> None:
    write = integers(32, bits, symmetric=False, packed_zeros=packed)
    tensors, values = write(torch.randn(21, k))
    declared = Declared("compressed-tensors", ((1, 32),), (bits,))
    assert torch.equal(value(tmp_path, named(tensors), declared), values)
    if not packed:
        tensors["weight_zero_point"] = tensors["weight_zero_point"][:, :1].contiguous()
        with pytest.raises(RegistrationRefused, match="not \\(21, "):
            value(tmp_path, named(tensors), declared)


def test_nvfp4s_second_scale_divides_or_multiplies(tmp_path: Path) -> None:
    weight = torch.randn(32, 64)
    found = []
    for modelopt in (False, True):
        tensors, values = nvfp4(modelopt)(weight)
        found.append(value(tmp_path, named(tensors), Declared("modelopt")))
        assert torch.equal(found[-1], values)
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=0)
    torch.testing.assert_close(found[0], weight, rtol=0.2, atol=0.4)


def _drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def _put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


def _spoil(name: str, number: float) -> Callable[[Tensors], object]:
    def spoil(tensors: Tensors) -> None:
        tensors[name].view(-1)[0] = number

    return spoil


BLOCKS = Declared("fp8", ((16, 16),))
GROUPS = Declared("compressed-tensors", ((1, 32),), (4,))
BY_INDEX = Declared("compressed-tensors", ((1, 32),), (4,), act_order=True)
FOUR = Declared("compressed-tensors")
fp8_blocks = fp8((16, 16), "weight_scale_inv")
ordered = integers(32, 4, symmetric=False, order=True)
zeros = torch.zeros
DAMAGE: list[tuple[str, Any, Declared, Callable[[Tensors], object], str]] = [
    ("no scales", fp8_blocks, BLOCKS, _drop("weight_scale_inv"), "is missing"),
    ("fused scales", fp8_blocks, BLOCKS, _put("weight_scale_inv", torch.ones(3)), "3 x 1 scales"),
    ("block unknown", fp8_blocks, Declared("fp8"), lambda t: None, "each block that config"),
    ("four axes", fp8_blocks, BLOCKS, _put("weight", zeros(2, 2, 2, 2).to(FP8)), "no matrix"),
    ("empty", fp8_blocks, BLOCKS, _put("weight", zeros(0, 64).to(FP8)), "no matrix"),
    ("NaN scale", fp8_blocks, BLOCKS, _spoil("weight_scale_inv", torch.nan), "not finite"),
    ("endless scale", fp8_blocks, BLOCKS, _spoil("weight_scale_inv", torch.inf), "not finite"),
    ("zero", fp8_blocks, BLOCKS, lambda t: t["weight_scale_inv"].zero_(), "no scale but zero"),
    ("integer scales", fp8_blocks, BLOCKS, _put("weight_scale_inv", zeros(4, 4).long()), "I64"),
    ("no shape", ordered, GROUPS, _drop("weight_shape"), "is missing"),
    ("no end", ordered, GROUPS, _put("weight_shape", torch.tensor([64, 1 << 60])), "words a row"),
    ("no rows", ordered, GROUPS, _put("weight_shape", torch.tensor([-1, 64])), "of -1 x 64"),
    ("zeros short", ordered, GROUPS, _put("weight_zero_point", zeros(7, 2).int()), "shape"),
    ("index beyond", ordered, GROUPS, _put("weight_g_idx", torch.full((64,), 2).int()), "beyond"),
    ("index below", ordered, GROUPS, _put("weight_g_idx", torch.arange(64) // 32 - 1), "beyond"),
    ("index short", ordered, GROUPS, _put("weight_g_idx", zeros(63).int()), "shape"),
    ("other bits", ordered, Declared("compressed-tensors", ((1, 32),), (8,)), lambda t: None, "8"),
    ("other group", ordered, Declared("c", ((1, 16),), (4,)), lambda t: None, "64 x 2 scales"),
    ("no index", ordered, BY_INDEX, _drop("weight_g_idx"), "is missing"),
    ("index unset", ordered, BY_INDEX, lambda t: t["weight_g_idx"].fill_(-1), "never set"),
    ("no global scale", nvfp4(False), FOUR, _drop("weight_global_scale"), "is missing"),
    ("two of them", nvfp4(False), FOUR, _put("weight_global_scale", torch.ones(2)), "one value"),
    ("zero of them", nvfp4(False), FOUR, _put("weight_global_scale", zeros(1)), "but zero"),
    ("scales short", nvfp4(True), FOUR, _put("weight_scale", zeros(64, 3).to(FP8)), "not (64, 4)"),
    ("exponent NaN", mxfp4, FOUR, _spoil("weight_scale", 255), "not finite"),
    ("exponents short", mxfp4, FOUR, _put("weight_scale", zeros(64, 1).byte()), "not (64, 2)"),
]


@pytest.mark.parametrize(
    ("write", "declared", "damage", "why"), [one[1:] for one in DAMAGE], ids=[d[0] for d in DAMAGE]
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, write: Any, declared: Declared, damage: Callable[[Tensors], object], why: str
) -> None:
    tensors, _ = write(torch.randn(64, 64))
    damage(tensors)
    with pytest.raises(RegistrationRefused) as caught:
        value(tmp_path, named(tensors), declared)
    assert caught.value.code == "bad_weights"
    assert why in str(caught.value)
    assert "tensor x." in str(caught.value)
