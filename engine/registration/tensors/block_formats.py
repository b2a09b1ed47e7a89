"""Formats with blocks of their own: MXFP4 as gpt-oss has it, and bitsandbytes.

MXFP4         x_blocks U8 [experts, n, k / 32, 16], two codes a byte, the lower first; x_scales U8
              [experts, n, k / 32], exponents of two. Stands for x [experts, k, n]
bitsandbytes  x.weight U8, two codes a byte, the upper first, of all rows one after the other;
              x.weight.quant_map [16], their values; x.weight.absmax, the factor of each block of
              64, itself in eight bits with a table, a factor for 256 of them and an offset; which
              and how many is a JSON object in x.weight.quant_state.bitsandbytes__nf4. In eight
              bits: x.weight I8 [n, k] and x.SCB [n], what 127 of a row is
"""

import json
from functools import partial
from typing import Any

import torch

from engine.registration.tensors.declared import MAX_GROUP, MIN_GROUP, Declared
from engine.registration.tensors.files import SourceTensors
from engine.registration.tensors.row_formats import MXFP4_GROUP, Found
from engine.registration.tensors.scaled import (
    Grid,
    Kept,
    Quantized,
    Rows,
    bad,
    is_kept,
    need,
    nibbles,
    read_scale,
    steps_of,
)
from kernels.int4_blocks import E2M1, FORMS, FP4, NF4, Steps

BLOCKS, SCALES = "_blocks", "_scales"
STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
MAX_STATE_BYTES = 1 << 16
LIMIT = 127
MAX_FLOAT = torch.finfo(torch.float32).max


def find_mxfp4(files: SourceTensors, declared: Declared) -> Found:
    """Every quantized weight of such a checkpoint."""
    for key in files.shapes:
        if key.endswith(BLOCKS):
            base = key.removesuffix(BLOCKS)
            yield base, partial(_experts, files, base)


def _experts(files: SourceTensors, base: str) -> tuple[Quantized, set[str]]:
    key, scale = need(files, base + BLOCKS, ("U8",)), f"{base}{SCALES}"
    shape = files.shapes[key]
    if len(shape) != 4 or 0 in shape or shape[3] * 2 != MXFP4_GROUP:
        raise bad(key, f"has the shape {shape}, not [experts, n, k / 32, 16]")
    experts, n, groups, _ = shape
    need(files, scale, ("U8", "F8_E8M0"), shape[:3])

    def open_rows() -> Rows:
        scales = read_scale(files, scale)

        def rows(start: int, stop: int) -> torch.Tensor:
            values = nibbles(files.rows(key, start, stop))
            values *= scales[start:stop, :, :, None]
            return values.view(stop - start, n, -1).transpose(1, 2).contiguous()

        return rows

    def kept() -> Kept | None:
        unit = FORMS[E2M1].unit
        return Kept(E2M1, lambda: Steps(read_scale(files, scale) * unit))

    return Quantized((experts, groups * MXFP4_GROUP, n), open_rows, kept), {key, scale}


def find_bitsandbytes(files: SourceTensors, declared: Declared) -> Found:
    """Every quantized weight of such a checkpoint."""
    for key in files.shapes:
        for suffix in STATES:
            if key.endswith(suffix):
                base = key.removesuffix(suffix)
                yield base, partial(_four_bits, files, base, key)
        if key.endswith(".SCB"):
            base = key.removesuffix(".SCB")
            yield f"{base}.weight", partial(_eight_bits, files, base, key)


def _four_bits(files: SourceTensors, base: str, state: str) -> tuple[Quantized, set[str]]:
    said = _state(files, state)
    n, k = said["shape"]
    block, nested = said["blocksize"], f"{base}.nested_absmax" in files.shapes
    key, absmax = need(files, base, ("U8",)), f"{base}.absmax"
    if torch.Size(files.shapes[key]).numel() != -(-n * k // 2):
        raise bad(key, f"has the shape {files.shapes[key]} for a weight of {n} x {k}")
    blocks = -(-n * k // block)
    need(files, absmax, ("U8",) if nested else ("F32",), (blocks,))
    table = need(files, f"{base}.quant_map", ("F32",), (16,))
    used = {key, absmax, table, state}
    if nested:
        outer = -(-blocks // said["nested_blocksize"])
        used.add(need(files, f"{base}.nested_absmax", ("F32",), (outer,)))
        used.add(need(files, f"{base}.nested_quant_map", ("F32",), (256,)))

    def factors_of_blocks() -> torch.Tensor:
        if not nested:
            return read_scale(files, absmax, may_be_zero=True)
        steps = read_scale(files, f"{base}.nested_quant_map")[files.read(absmax).long()]
        factors = read_scale(files, f"{base}.nested_absmax", may_be_zero=True)
        largest = steps * factors.repeat_interleave(said["nested_blocksize"])[:blocks]
        largest += said["nested_offset"]
        return largest

    def open_rows() -> Rows:
        values, largest = read_scale(files, table), factors_of_blocks()

        def rows(start: int, stop: int) -> torch.Tensor:
            first, last = start * k, stop * k
            codes = files.flat_bytes(key, first // 2, -(-last // 2))
            swapped = (codes << 4) | (codes >> 4)
            found = nibbles(swapped, values)[first % 2 :][: last - first]
            head = first - first % block
            factors = largest[head // block : -(-last // block)].repeat_interleave(block)
            return (found * factors[first - head :][: last - first]).view(-1, k)

        return rows

    def kept() -> Kept | None:
        scheme = _scheme_of(read_scale(files, table))
        if not scheme or k % block or not is_kept(scheme, block, k):
            return None
        return Kept(scheme, lambda: steps_of(scheme, block, k, factors_of_blocks().view(n, -1)))

    return Quantized((n, k), open_rows, kept), used


def _scheme_of(values: torch.Tensor) -> str:
    """The form that has such a table, "" for none: its numbers are whole, so within a half."""
    for scheme in (NF4, FP4):
        table = torch.tensor(FORMS[scheme].values) * FORMS[scheme].unit
        if bool(((values - table).abs() <= FORMS[scheme].unit / 2).all()):
            return scheme
    return ""


def _state(files: SourceTensors, key: str) -> dict[str, Any]:
    """The numbers of a quantization state, each in its range."""
    need(files, key, ("U8",))
    if torch.Size(files.shapes[key]).numel() > MAX_STATE_BYTES:
        raise bad(key, f"is larger than {MAX_STATE_BYTES} bytes")
    try:
        said = json.loads(bytes(files.read(key).view(-1).tolist()))
    except (ValueError, RecursionError) as error:
        raise bad(key, f"is not JSON ({error})") from error
    if not isinstance(said, dict):
        raise bad(key, "is not a JSON object")
    shape = said.get("shape")
    counts = [said.get("blocksize"), said.get("nested_blocksize", MIN_GROUP)]
    if not isinstance(shape, list) or len(shape) != 2:
        raise bad(key, f"names the shape {shape!r:.60}, which is no matrix")
    if not all(type(size) is int and 0 < size < 1 << 31 for size in shape):
        raise bad(key, f"names the shape {shape!r:.60}")
    if not all(type(count) is int and MIN_GROUP <= count <= MAX_GROUP for count in counts):
        raise bad(key, f"names blocks of {counts!r:.60}")
    offset = said.get("nested_offset", 0.0)
    if type(offset) not in (int, float) or not abs(offset) <= MAX_FLOAT:
        raise bad(key, f"names the offset {offset!r:.60}")
    return {
        "shape": shape,
        "blocksize": counts[0],
        "nested_blocksize": counts[1],
        "nested_offset": float(offset),
    }


def _eight_bits(files: SourceTensors, base: str, factors: str) -> tuple[Quantized, set[str]]:
    key, kind = need(files, f"{base}.weight", ("I8",)), f"{base}.weight_format"
    if len(files.shapes[key]) != 2 or 0 in files.shapes[key]:
        raise bad(key, f"has the shape {files.shapes[key]}, which is no matrix")
    n, k = files.shapes[key]
    need(files, factors, ("F32", "F16"), (n,))
    used = {key, factors}
    if kind in files.shapes:
        used.add(need(files, kind, ("U8",)))
        if torch.Size(files.shapes[kind]).numel() != 1:
            raise bad(kind, f"has the shape {files.shapes[kind]}, not one value")
        if bool(files.read(kind).any()):
            raise bad(kind, "says that the weight is not laid out by rows")

    def open_rows() -> Rows:
        full = Grid(read_scale(files, factors, may_be_zero=True)[:, None] / LIMIT, (1, k))
        return lambda start, stop: full.apply(files.rows(key, start, stop).float(), start)

    return Quantized((n, k), open_rows), used
