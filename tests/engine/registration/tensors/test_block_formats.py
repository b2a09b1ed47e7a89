"""gpt-oss' experts against transformers, bitsandbytes' blocks, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.errors import RegistrationRefused
from engine.registration.tensors import Declared
from engine.registration.tensors.block_formats import find_bitsandbytes, find_mxfp4
from engine.registration.tensors.files import SourceTensors
from tests.engine.registration.quantized_kit import Tensors, llm_int8, mxfp4_experts, nf4

STATE = "weight.quant_state.bitsandbytes__nf4"
BNB = Declared("bitsandbytes")


def value(folder: Path, tensors: Tensors, declared: Declared) -> torch.Tensor:
    """The one weight of a file, a row at a time."""
    save_file(tensors, folder / "model.safetensors")
    find = find_mxfp4 if declared.method == "mxfp4" else find_bitsandbytes
    with SourceTensors([folder / "model.safetensors"]) as files:
        ((_, read),) = find(files, declared)
        quantized, used = read()
        assert used == tensors.keys()
        rows = quantized.open()
        return torch.cat([rows(start, start + 1) for start in range(quantized.shape[0])])


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    blocks = torch.randint(0, 256, (3, 6, 4, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 6, 4), dtype=torch.uint8)
    found = value(tmp_path, {"x_blocks": blocks, "x_scales": scales}, Declared("mxfp4"))
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(found, theirs)
    half = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(found.to(torch.bfloat16), half)
    assert torch.equal(found, half.to(torch.float32))  # bfloat16 holds all of it


@pytest.mark.parametrize("columns", [64, 96, 7])
def test_nf4s_blocks_run_over_the_rows(tmp_path: Path, columns: int) -> None:
    for nested in (False, True):
        tensors, values = nf4(nested)(torch.randn(64, columns))
        found = value(tmp_path, {f"x.{name}": t for name, t in tensors.items()}, BNB)
        assert torch.equal(found, values)


@pytest.mark.parametrize(("block", "outer"), [(64, 256), (128, 16), (32, 48)])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_blocks_of_blocks(tmp_path: Path, block: int, outer: int, kind: str, nested: bool) -> None:
    tensors, values = nf4(nested, block, outer, kind)(torch.randn(64, 96))
    if nested:
        assert tensors["weight.nested_absmax"].numel() == -(-64 * 96 // block // outer)
    assert torch.equal(
        value(tmp_path, {f"x.{name}": t for name, t in tensors.items()}, BNB), values
    )


@pytest.mark.parametrize("write", [nf4(False), nf4(True), llm_int8])
def test_a_weight_of_zeros_is_one(tmp_path: Path, write: Any) -> None:
    tensors, values = write(torch.randn(64, 64))
    for name in tensors.keys() & {"weight.nested_absmax", "SCB"} or {"weight.absmax"}:
        tensors[name].zero_()
    if STATE in tensors:
        _state(nested_offset=0.0)(tensors)
    found = value(tmp_path, {f"x.{name}": t for name, t in tensors.items()}, BNB)
    assert torch.equal(found, torch.zeros_like(values))


def _state(**change: Any) -> Callable[[Tensors], object]:
    def edit(tensors: Tensors) -> None:
        said = json.loads(bytes(tensors[STATE].tolist())) | change
        tensors[STATE] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)

    return edit


def _drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def _put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


byte = torch.zeros(1, dtype=torch.uint8)
text = torch.tensor(list(b"[1]"), dtype=torch.uint8)
MXFP4 = Declared("mxfp4")
DAMAGE: list[tuple[str, Any, Declared, Callable[[Tensors], object], str]] = [
    ("state no JSON", nf4(True), BNB, _put(STATE, byte), "is not JSON"),
    ("state a list", nf4(True), BNB, _put(STATE, text), "no object|not a JSON object"),
    ("state huge", nf4(True), BNB, _put(STATE, byte.expand(1 << 17).clone()), "is larger"),
    ("shape beyond", nf4(True), BNB, _state(shape=[1 << 40, 1]), "names the shape"),
    ("shape another", nf4(True), BNB, _state(shape=[64, 65]), "for a weight of 64 x 65"),
    ("shape of three", nf4(True), BNB, _state(shape=[4, 16, 64]), "no matrix"),
    ("blocks of 0", nf4(True), BNB, _state(blocksize=0), "names blocks of"),
    ("blocks of 8", nf4(True), BNB, _state(blocksize=8), "names blocks of"),
    ("factors of 8", nf4(True), BNB, _state(nested_blocksize=8), "names blocks of"),
    ("blocks of a word", nf4(True), BNB, _state(nested_blocksize="x"), "names blocks of"),
    ("offset endless", nf4(True), BNB, _state(nested_offset=float("inf")), "names the offset"),
    ("offset beyond", nf4(True), BNB, _state(nested_offset=10**400), "names the offset"),
    ("offset too large", nf4(True), BNB, _state(nested_offset=1e39), "names the offset"),
    ("factors missing", nf4(True), BNB, _drop("weight.absmax"), "is missing"),
    ("table missing", nf4(True), BNB, _drop("weight.quant_map"), "is missing"),
    ("no tables", nf4(True), BNB, _drop("weight.nested_quant_map"), "is missing"),
    ("factors short", nf4(False), BNB, _put("weight.absmax", torch.ones(63)), "not (64,)"),
    ("factors NaN", nf4(False), BNB, lambda t: t["weight.absmax"].fill_(torch.nan), "not finite"),
    ("by columns", llm_int8, BNB, _put("weight_format", byte + 1), "by rows"),
    ("rows differ", llm_int8, BNB, _put("SCB", torch.ones(63)), "not (64,)"),
    ("no exponents", mxfp4_experts, MXFP4, _drop("_scales"), "is missing"),
    ("exponents short", mxfp4_experts, MXFP4, _put("_scales", byte.view(1, 1, 1)), "not (2, 64"),
    ("exponents NaN", mxfp4_experts, MXFP4, lambda t: t["_scales"].fill_(255), "not finite"),
    ("groups of 2", mxfp4_experts, MXFP4, _put("_blocks", byte.view(1, 1, 1, 1)), "[experts, n"),
]


@pytest.mark.parametrize(
    ("write", "declared", "damage", "why"), [one[1:] for one in DAMAGE], ids=[d[0] for d in DAMAGE]
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, write: Any, declared: Declared, damage: Callable[[Tensors], object], why: str
) -> None:
    is_stacked = declared.method == "mxfp4"
    tensors, _ = write(torch.randn(2, 64, 64) if is_stacked else torch.randn(64, 64))
    damage(tensors)
    dot = "" if is_stacked else "."
    with pytest.raises(RegistrationRefused) as caught:
        value(tmp_path, {f"x{dot}{name}": tensor for name, tensor in tensors.items()}, declared)
    assert caught.value.code == "bad_weights"
    assert any(one in str(caught.value) for one in why.split("|"))
