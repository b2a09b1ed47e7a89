"""Codes of GGUF's four-bit blocks in the blocks of an int4 pack, against transformers' values."""

import struct
from pathlib import Path

import pytest
import torch
from transformers.integrations.gguf.dequant import GGML_BLOCK, GGML_NAME

from engine.registration.tensors.gguf_file import GgufFile
from engine.registration.tensors.gguf_names import find_gguf
from engine.registration.tensors.gguf_steps import kept_of
from kernels.int4_blocks import FORMS, INT4_BLOCKS, IQ4, ZEROS, Steps, dequantize, quantize
from tests.engine.registration.gguf_kit import Blocks, write_gguf

ARCH = {"general.architecture": "qwen3", "qwen3.attention.head_count": 2}
NUMBERS = {name: number for number, name in GGML_NAME.items()}
# Form, places of the halves in a block, and how far off the values may be: scales are float16 there
# and bfloat16 here, zeros too, and llama.cpp's table has other steps.
TYPES = {
    "Q4_0": (INT4_BLOCKS, (0,), 0.0025),
    "Q4_1": (ZEROS, (0, 2), 0.004),
    "Q4_K": (ZEROS, (0, 2), 0.004),
    "IQ4_NL": (IQ4, (0,), 0.009),
    "IQ4_XS": (IQ4, (0,), 0.009),
}
ROWS, COLUMNS = 32, 512


def blocks_of(name: str) -> Blocks:
    """Any codes and six-bit scales, and halves as models have them."""
    count, size = GGML_BLOCK[NUMBERS[name]]
    generator = torch.Generator().manual_seed(2)
    number = ROWS * COLUMNS // count
    content = torch.randint(0, 256, (number, size), generator=generator, dtype=torch.uint8)
    for place in TYPES[name][1]:
        halves = torch.rand(number, generator=generator) * 0.01 + 0.002
        content[:, place : place + 2] = halves.half()[:, None].view(torch.uint8)
    return (ROWS, COLUMNS), NUMBERS[name], content.numpy().tobytes()


@pytest.mark.parametrize("name", TYPES)
def test_codes_are_kept(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, _, allowed = TYPES[name]
    monkeypatch.setattr("engine.registration.tensors.gguf_steps.PIECE_BYTES", 5000)
    order = torch.randperm(ROWS)
    with GgufFile(write_gguf(tmp_path / "x.gguf", ARCH, {"t": blocks_of(name)})) as file:
        values = file.values("t", file.rows("t", 0, ROWS))
        assert bool(values.isfinite().all())
        for rows, wanted in ((None, values), (order, values[order])):
            kept = kept_of(file, "t", rows, 0, ROWS)
            assert kept is not None
            assert kept.scheme == scheme
            made = quantize(wanted, steps=kept.steps(), scheme=scheme)
            found = dequantize(made, COLUMNS, scheme)
            assert float((found - wanted).norm() / wanted.norm()) <= allowed
            if scheme != INT4_BLOCKS:
                anew = dequantize(quantize(wanted), COLUMNS)
                assert float((anew - wanted).norm() / wanted.norm()) > 2 * allowed
        expert = kept_of(file, "t", None, 16, 16)
        assert expert is not None
        assert torch.equal(expert.steps().scale, kept_of_whole(file).scale[16:])


def kept_of_whole(file: GgufFile) -> Steps:
    kept = kept_of(file, "t", None, 0, ROWS)
    assert kept is not None
    return kept.steps()


def test_scales_of_nothing_are_searched_for(tmp_path: Path) -> None:
    """A scale of zero makes a group one value, whatever its codes."""
    size = GGML_BLOCK[NUMBERS["Q4_1"]][1]
    block = struct.pack("<ee", 0.0, -0.25) + bytes(range(16))
    assert len(block) == size
    with GgufFile(
        write_gguf(tmp_path / "x.gguf", ARCH, {"t": ((16, 32), NUMBERS["Q4_1"], block * 16)})
    ) as file:
        values = file.values("t", file.rows("t", 0, 16))
        kept = kept_of(file, "t", None, 0, 16)
        assert kept is not None
        found = dequantize(quantize(values, steps=kept.steps(), scheme=ZEROS), 32, ZEROS)
        assert torch.allclose(found, values, rtol=0.005)


def test_other_blocks_have_no_form(tmp_path: Path) -> None:
    others = {name: NUMBERS[name] for name in ("Q8_0", "Q6_K", "Q5_K", "IQ2_S")}
    tensors: dict[str, Blocks] = {}
    for name, number in others.items():
        count, size = GGML_BLOCK[number]
        tensors[name] = ((1, count), number, b"\0" * size)
    with GgufFile(write_gguf(tmp_path / "x.gguf", ARCH, tensors)) as file:
        assert all(kept_of(file, name, None, 0, 1) is None for name in others)


def test_a_model_keeps_them_by_its_names(tmp_path: Path) -> None:
    """Linears do, vectors do not."""
    vector: Blocks = ((64,), 0, b"\0" * 256)
    tensors = {"blk.0.attn_q.weight": blocks_of("Q4_K"), "blk.0.attn_norm.weight": vector}
    with GgufFile(write_gguf(tmp_path / "x.gguf", ARCH, tensors)) as file:
        found = dict(find_gguf(file))
        query = found["model.layers.0.self_attn.q_proj.weight"].kept()
        assert query is not None
        assert query.scheme in FORMS
        assert found["model.layers.0.input_layernorm.weight"].kept() is None
