"""GPTQ and AWQ by hand, in any order of columns, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import RegistrationRefused
from engine.registration.tensors import Declared
from engine.registration.tensors.column_formats import find_awq, find_gptq
from engine.registration.tensors.files import SourceTensors
from kernels.int4_blocks import INT4_BLOCKS, ZEROS, Steps
from tests.engine.registration.quantized_kit import Tensors, awq, gptq

GPTQ = Declared("gptq", ((1, 8),), (4,), zero_offset=1)
AWQ = Declared("awq", ((1, 32),))


def value(folder: Path, tensors: Tensors, declared: Declared) -> torch.Tensor:
    """The one weight of a file."""
    save_file({f"x.{name}": t for name, t in tensors.items()}, folder / "model.safetensors")
    find = find_gptq if declared.method == "gptq" else find_awq
    with SourceTensors([folder / "model.safetensors"]) as files:
        ((name, read),) = find(files, declared)
        assert name == "x.weight"
        quantized, _ = read()
        rows = quantized.open()
        return torch.cat([rows(start, start + 1) for start in range(quantized.shape[0])])


def word(*fields: int) -> int:
    """Eight nibbles, the first in the lowest bits, as int32."""
    found = sum(nibble << 4 * place for place, nibble in enumerate(fields))
    return found - (1 << 32) if found >= 1 << 31 else found


def test_gptq_by_hand(tmp_path: Path) -> None:
    # Eight columns in one group, eight channels: channel n has the codes n, n + 1, ...
    codes = [[(row + column) % 16 for column in range(8)] for row in range(8)]
    tensors = {
        "qweight": torch.tensor([[word(*row) for row in codes]], dtype=torch.int32),
        "qzeros": torch.tensor([[word(*range(8))]], dtype=torch.int32),
        "scales": torch.full((1, 8), 0.5, dtype=torch.float16),
    }
    for version, offset in ((1, 1), (2, 0)):
        declared = Declared("gptq", ((1, 8),), (4,), zero_offset=2 - version)
        zero = torch.arange(8)[:, None] + offset
        wanted = (torch.tensor(codes) - zero).to(torch.float32) * 0.5
        assert torch.equal(value(tmp_path, tensors, declared), wanted)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("says_first", [True, False])
@pytest.mark.parametrize("is_first", [True, False])
def test_zeros_in_the_middle_tell_the_version(
    tmp_path: Path, bits: int, says_first: bool, is_first: bool
) -> None:
    weight = torch.randn(16, 64)
    tensors, values = gptq(bits, 32, first_version=is_first, symmetric=True)(weight)
    declared = Declared("gptq", ((1, 32),), (bits,), zero_offset=int(says_first), symmetric=True)
    assert torch.equal(value(tmp_path, tensors, declared), values)
    assert (kept(tmp_path, tensors, declared) is not None) == (bits == 4)
    tensors["qzeros"][0, 0] += 1
    with pytest.raises(RegistrationRefused, match="not in the middle"):
        value(tmp_path, tensors, declared)


@pytest.mark.parametrize("k", [1, 2])
def test_act_order_needs_its_index(tmp_path: Path, k: int) -> None:
    tensors, values = gptq(4, 32, first_version=True)(torch.randn(16, 32 * k))
    declared = Declared("gptq", ((1, 32),), (4,), zero_offset=1, act_order=True)
    lacking = {name: tensor for name, tensor in tensors.items() if name != "g_idx"}
    unset = tensors | {"g_idx": torch.full((32 * k,), -1, dtype=torch.int32)}
    for damaged, why in ((lacking, "is missing"), (unset, "never set")):
        plain = Declared("gptq", ((1, 32),), (4,), zero_offset=1)
        assert torch.equal(value(tmp_path, damaged, plain), values)
        if k == 1:  # one group: any order is the same
            assert torch.equal(value(tmp_path, damaged, declared), values)
            continue
        with pytest.raises(RegistrationRefused, match=why):
            value(tmp_path, damaged, declared)


def test_a_zero_of_zero_borrows_from_its_neighbour(tmp_path: Path) -> None:
    # In the first version 0 is kept as -1, and the word as a whole is less by 0x11111111.
    kept = (word(0, 5, 0, 9, 0, 0, 1, 2) - 0x11111111 + (1 << 31)) % (1 << 32) - (1 << 31)
    tensors = {
        "qweight": torch.zeros(1, 8, dtype=torch.int32),
        "qzeros": torch.tensor([[kept]], dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    found = value(tmp_path, tensors, GPTQ)
    assert (-found[:, 0]).tolist() == [0, 5, 0, 9, 0, 0, 1, 2]


def test_awq_by_hand(tmp_path: Path) -> None:
    # Nibble i of a word is the channel (0, 2, 4, 6, 1, 3, 5, 7)[i].
    tensors = {
        "qweight": torch.tensor([[word(0, 2, 4, 6, 1, 3, 5, 7)]], dtype=torch.int32),
        "qzeros": torch.tensor([[word(8, 8, 8, 8, 9, 9, 9, 9)]], dtype=torch.int32),
        "scales": torch.full((1, 8), 2.0, dtype=torch.float16),
    }
    found = value(tmp_path, tensors, AWQ)
    assert found[:, 0].tolist() == [2.0 * (n - (8, 9)[n % 2]) for n in range(8)]


def test_columns_in_any_order_are_where_they_belong(tmp_path: Path) -> None:
    weight = torch.randn(16, 64)
    tensors, values = gptq(4, 16, first_version=True, order=True)(weight)
    declared = Declared("gptq", ((1, 16),), (4,), zero_offset=1)
    assert torch.equal(value(tmp_path, tensors, declared), values)
    # As it is in the files: sorting it would be a different weight.
    tensors["g_idx"] = tensors["g_idx"].sort().values
    assert not torch.equal(value(tmp_path, tensors, declared), values)
    del tensors["g_idx"]  # then groups are what lies side by side
    assert not torch.equal(value(tmp_path, tensors, declared), values)


def _drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def _put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


def _ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


g32 = Declared("gptq", ((1, 32),), (4,), zero_offset=1)
write_gptq = gptq(4, 32, first_version=True)
DAMAGE: list[tuple[str, Any, Declared, Callable[[Tensors], object], str]] = [
    ("no zeros", write_gptq, g32, _drop("qzeros"), "is missing"),
    ("no scales", write_gptq, g32, _drop("scales"), "is missing"),
    ("halves for words", write_gptq, g32, _put("qweight", torch.zeros(8, 64)), "F32"),
    ("one axis", write_gptq, g32, _put("qweight", _ints(8)), "no matrix"),
    ("no channels", write_gptq, g32, _put("scales", torch.zeros(2, 0)), "no matrix"),
    ("channels differ", write_gptq, g32, _put("qweight", _ints(8, 32)), "not (8, 64)"),
    ("zeros differ", write_gptq, g32, _put("qzeros", _ints(2, 9)), "not (2, 8)"),
    ("group of 16", write_gptq, Declared("gptq", ((1, 16),), (4,)), lambda t: None, "2 groups"),
    ("group beyond", write_gptq, g32, _put("g_idx", torch.full((64,), 2)), "beyond"),
    ("index short", write_gptq, g32, _put("g_idx", _ints(32)), "not (64,)"),
    ("NaN", write_gptq, g32, lambda t: t["scales"].fill_(torch.nan), "not finite"),
    ("awq, no zeros", awq(32), AWQ, _drop("qzeros"), "is missing"),
    ("awq, words differ", awq(32), AWQ, _put("qweight", _ints(64, 7)), "not (64, 8)"),
    ("awq, odd channels", awq(32), AWQ, _put("scales", torch.ones(2, 60)), "multiple of 8"),
    ("awq, group of 64", awq(32), Declared("awq", ((1, 64),)), lambda t: None, "2 groups"),
    ("awq, zero", awq(32), AWQ, lambda t: t["scales"].zero_(), "no scale but zero"),
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
        value(tmp_path, tensors, declared)
    assert caught.value.code == "bad_weights"
    assert why in str(caught.value)


def test_codes_are_kept_where_columns_are_in_order(tmp_path: Path) -> None:
    weight = torch.randn(16, 128)
    declared = Declared("gptq", ((1, 64),), (4,), zero_offset=1)
    tensors, _ = gptq(4, 64, first_version=True, symmetric=True)(weight)
    wanted = tensors["scales"].T.to(torch.float32).repeat_interleave(2, 1)
    found = kept(tmp_path, tensors, declared)
    assert found is not None
    scheme, steps = found
    assert scheme == INT4_BLOCKS
    assert torch.equal(steps.scale, wanted)
    assert steps.zero is None
    tensors, _ = gptq(4, 64, first_version=True, symmetric=False)(weight)
    found = kept(tmp_path, tensors, declared)
    assert found is not None
    scheme, steps = found
    assert scheme == ZEROS
    assert steps.zero is not None
    assert steps.zero.shape == wanted.shape
    tensors, _ = gptq(4, 64, first_version=True, symmetric=True, order=True)(weight)
    assert kept(tmp_path, tensors, declared) is None
    narrow = Declared("gptq", ((1, 16),), (4,), zero_offset=1)
    tensors, _ = gptq(4, 16, first_version=True, symmetric=True)(weight)
    assert kept(tmp_path, tensors, narrow) is None


def kept(folder: Path, tensors: Tensors, declared: Declared) -> tuple[str, Steps] | None:
    save_file({f"x.{name}": t for name, t in tensors.items()}, folder / "model.safetensors")
    with SourceTensors([folder / "model.safetensors"]) as files:
        ((_, read),) = find_gptq(files, declared)
        quantized, _ = read()
        found = quantized.kept()
        return None if found is None else (found.scheme, found.steps())
