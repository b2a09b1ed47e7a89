"""GGUF files as transformers reads them, and hostile headers."""

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.gguf import GgufHeader, load_gguf_state_dict
from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize

from engine.errors import RegistrationRefused
from engine.registration.tensors import GgufFile
from tests.engine.registration.gguf_kit import Blocks, plain, q8_0, text, value, write_gguf

ARCH = {"general.architecture": "llama"}


def test_every_block_type_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Blocks] = {}
    for kind, (count, size) in GGML_BLOCK.items():
        content = torch.randint(0, 256, (4 * 2 * size,), generator=generator, dtype=torch.uint8)
        tensors[f"t{kind}"] = ((4, 2 * count), kind, content.numpy().tobytes())
    assert len(tensors) == 17
    path = write_gguf(tmp_path / "all.gguf", ARCH, tensors)
    theirs = load_gguf_state_dict(GgufHeader.from_file(str(path)))
    with GgufFile(path) as file:
        assert file.shapes.keys() == theirs.keys()
        for name, lazy in theirs.items():
            wanted = dequantize(lazy[:].reshape(-1), lazy.ggml_type).view(file.shapes[name])
            found = torch.cat([file.values(name, file.rows(name, n, n + 1)) for n in range(4)])
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_values_are_read_as_they_are(tmp_path: Path) -> None:
    weight = torch.randn(5, 64)
    half, brain = weight.to(torch.float16), weight.to(torch.bfloat16)
    blocks, values = q8_0(weight)
    tensors = {
        "f32": plain(weight),
        "f16": ((5, 64), 1, half.view(torch.uint8).numpy().tobytes()),
        "bf16": ((5, 64), 30, brain.view(torch.uint8).numpy().tobytes()),
        "q8_0": blocks,
    }
    with GgufFile(write_gguf(tmp_path / "x.gguf", ARCH, tensors)) as file:
        assert file.dtypes == {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
        for name, wanted in (("f32", weight), ("f16", half), ("bf16", brain), ("q8_0", values)):
            found = file.values(name, file.rows(name, 1, 4))
            assert torch.equal(found, wanted[1:4].to(torch.float32)), name


@pytest.mark.parametrize("kind", [6, 7])
def test_five_bits_by_hand(tmp_path: Path, kind: int) -> None:
    codes = torch.randint(0, 32, (4, 32))
    content = b""
    for row in codes.tolist():
        upper = sum((code >> 4) << place for place, code in enumerate(row))
        lower = bytes(row[j] & 15 | (row[j + 16] & 15) << 4 for j in range(16))
        halves = struct.pack("<e", 0.5) if kind == 6 else struct.pack("<ee", 0.5, -3.0)
        content += halves + struct.pack("<I", upper) + lower
    wanted = (codes - 16) * 0.5 if kind == 6 else codes * 0.5 - 3
    path = write_gguf(tmp_path / "x.gguf", ARCH, {"t": ((2, 64), kind, content)})
    with GgufFile(path) as file:
        assert torch.equal(file.values("t", file.rows("t", 0, 2)), wanted.view(2, 64))


def test_long_arrays_are_counted_and_not_kept(tmp_path: Path) -> None:
    said = ARCH | {"x.tokens": ["a"] * 5000, "x.types": [1] * 5000, "x.sections": [1, 2]}
    with GgufFile(write_gguf(tmp_path / "x.gguf", said, {"t": plain(torch.ones(4))})) as file:
        assert file.metadata["x.tokens"] == file.metadata["x.types"] == 5000
        assert file.metadata["x.sections"] == [1, 2]


def _entry(name: str = "t", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return (
        text(name)
        + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        + struct.pack("<IQ", kind, offset)
    )


def _file(
    *entries: bytes,
    version: int = 3,
    count: int | None = None,
    keys: bytes = b"",
    num_keys: int = 1,
) -> bytes:
    said = keys or text("general.architecture") + value("llama")
    number = len(entries) if count is None else count
    head = b"GGUF" + struct.pack("<IQQ", version, number, num_keys) + said + b"".join(entries)
    return head + b"\0" * (-len(head) % 32) + b"\0" * 64


def _array(kind: int, count: int) -> bytes:
    return text("x") + struct.pack("<IIQ", 9, kind, count)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has no end"),
    "another": (b"PK\3\4" + b"\0" * 64, "is no GGUF file"),
    "version 1": (_file(_entry(), version=1), "version 1"),
    "cut": (_file(_entry())[:30], "has no end"),
    "cut in tensors": (_file(_entry(shape=(32,)))[:-40], "too short"),
    "tensors without end": (_file(_entry(), count=10**7), "10000000 tensors"),
    "a table without end": (_file(_entry(), count=60_000), "twice, or with 0 axes"),
    "keys without end": (_file(_entry(), num_keys=1 << 60), "keys"),
    "a name without end": (_file(struct.pack("<Q", 1 << 62)), "has no end"),
    "a name of no text": (_file(struct.pack("<Q", 1) + b"\xff" + _entry()[9:]), "damaged"),
    "no axes": (_file(_entry(shape=())), "with 0 axes"),
    "axes without end": (_file(text("t") + struct.pack("<I", 1 << 31)), "axes"),
    "too many values": (_file(_entry(shape=(1 << 30, 1 << 30))), "of the shape"),
    "no values": (_file(_entry(shape=(4, 0))), "of the shape"),
    "half a block": (_file(_entry(shape=(48, 2), kind=8)), "of the shape"),
    "twice": (_file(_entry(), _entry(offset=32)), "twice"),
    "over another": (_file(_entry("a", (8,)), _entry("b", (8,), offset=16)), "over another"),
    "beyond the end": (_file(_entry(offset=1 << 40)), "too short"),
    "an array without end": (_file(_entry(), keys=_array(8, 1 << 50)), "an array of"),
    "an array to the end": (_file(_entry(), keys=_array(4, 4_000_000)), "has no end"),
    "an array of arrays": (_file(_entry(), keys=_array(9, 1)), "an array of type"),
    "an unknown value": (_file(_entry(), keys=text("x") + struct.pack("<I", 77)), "of type 77"),
    "alignment of 0": (
        _file(_entry(), keys=text("general.alignment") + value(0)),
        "the alignment 0",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused(tmp_path: Path, name: str) -> None:
    content, why = HOSTILE[name]
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(RegistrationRefused) as caught:
        GgufFile(tmp_path / "x.gguf")
    assert caught.value.code == "bad_weights"
    assert why in str(caught.value)


def test_an_unknown_block_type_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(_file(_entry(kind=31)))
    with pytest.raises(RegistrationRefused, match="ggml's type 31") as caught:
        GgufFile(tmp_path / "x.gguf")
    assert caught.value.code == "quantized_weights"


def test_a_good_one_passes(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(_file(_entry("a", (8,)), _entry("b", (8,), offset=32)))
    with GgufFile(tmp_path / "x.gguf") as file:
        shapes: Any = file.shapes
    assert shapes == {"a": (8,), "b": (8,)}
