"""Formats whose codes lie column by column, the weight transposed: GPTQ and AWQ.

    GPTQ  x.qweight I32 [k bits / 32, n], field i of word r is the code of column 32 / bits r + i;
          x.qzeros I32 [groups, n bits / 32] (in version 1 one less than they are, which is undone
          word by word, as borrows went over the fields); x.scales [groups, n]; x.g_idx I32 [k], the
          group of each column, in any order
    AWQ   x.qweight I32 [k, n / 8], nibble i of word c is row 8 c + ORDER[i]; x.qzeros likewise

Some rows of the weight are some columns of every packed row, so the packed tensor (a quarter of
what it stands for in bfloat16) is read whole, and its rows are made in pieces.
"""

from collections.abc import Callable
from functools import partial

import torch

from engine.registration.tensors.declared import Declared
from engine.registration.tensors.files import SourceTensors
from engine.registration.tensors.row_formats import STEP_BITS, Found, group_index, has_index
from engine.registration.tensors.scaled import (
    Grid,
    Kept,
    Quantized,
    Rows,
    bad,
    fields,
    is_kept,
    need,
    read_scale,
    steps_of,
)
from kernels.int4_blocks import INT4_BLOCKS, ZEROS, Steps

WEIGHT = ".qweight"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
AWQ_BITS = 4
_SCALES = frozenset({"F16", "BF16", "F32"})


def find_gptq(files: SourceTensors, declared: Declared) -> Found:
    """Every quantized weight of such a checkpoint."""
    for key in files.shapes:
        if key.endswith(WEIGHT):
            base = key.removesuffix(WEIGHT)
            yield f"{base}.weight", partial(_gptq, files, base, declared)


def find_awq(files: SourceTensors, declared: Declared) -> Found:
    """Every quantized weight of such a checkpoint."""
    for key in files.shapes:
        if key.endswith(WEIGHT):
            base = key.removesuffix(WEIGHT)
            yield f"{base}.weight", partial(_awq, files, base, declared)


def _gptq(files: SourceTensors, base: str, declared: Declared) -> tuple[Quantized, set[str]]:
    (bits,) = declared.bits
    per_word = 32 // bits
    key, scales = _matrices(files, base)
    k, (groups, n) = files.shapes[key][0] * per_word, files.shapes[scales]
    need(files, key, ("I32",), (k // per_word, n))
    zeros = need(files, f"{base}.qzeros", ("I32",), (groups, -(-n // per_word)))
    used, index = {key, zeros, scales}, f"{base}.g_idx"
    by_index = has_index(files, index, k, groups, declared)
    if by_index:
        used.add(index)
    group = _group(scales, k, groups, declared)

    def open_rows() -> Rows:
        words = files.read(key)
        full = Grid(
            read_scale(files, scales).T.contiguous(),
            (1, group),
            _gptq_zeros(files, zeros, n, declared).T.to(torch.float32),
            group_index(files, index, groups, declared) if by_index else None,
        )

        def rows(start: int, stop: int) -> torch.Tensor:
            codes = fields(words[:, start:stop].T.contiguous(), bits)
            return full.apply(codes.to(torch.float32), start)

        return rows

    def kept() -> Kept | None:
        if bits != STEP_BITS:
            return None
        if by_index:
            groups_of = group_index(files, index, groups, declared)
            if groups_of is not None and bool((groups_of != torch.arange(k) // group).any()):
                return None
        of_codes = _gptq_zeros(files, zeros, n, declared).T.to(torch.float32)
        even = bool((of_codes == 1 << (STEP_BITS - 1)).all())
        return _kept(files, scales, INT4_BLOCKS if even else ZEROS, group, k, lambda: of_codes)

    return Quantized((n, k), open_rows, kept), used


def _kept(
    files: SourceTensors,
    scales: str,
    scheme: str,
    group: int,
    k: int,
    zeros: Callable[[], torch.Tensor],
) -> Kept | None:
    """In blocks of that form, from scales [groups, n] and zeros [n, groups]."""
    if not is_kept(scheme, group, k):
        return None

    def steps() -> Steps:
        return steps_of(scheme, group, k, read_scale(files, scales).T.contiguous(), zeros())

    return Kept(scheme, steps)


def _gptq_zeros(files: SourceTensors, key: str, n: int, declared: Declared) -> torch.Tensor:
    """Zeros int32 [groups, n].

    Where all are said to be in the middle their values tell the version: writers of version 2 have
    called it 1, and one step off is a model that still speaks.
    """
    (bits,) = declared.bits
    words = files.read(key)
    if declared.symmetric:
        stored, middle = fields(words, bits)[:, :n], 1 << (bits - 1)
        if not any(bool((stored == middle - offset).all()) for offset in (0, 1)):
            raise bad(key, "has zeros that are not in the middle, but config.json says sym")
        return torch.full_like(stored, middle)
    if declared.zero_offset:
        ones = sum(1 << shift for shift in range(0, 32, bits))
        words = words + torch.tensor(ones, dtype=torch.int64).to(torch.int32)
    return fields(words, bits)[:, :n]


def _awq(files: SourceTensors, base: str, declared: Declared) -> tuple[Quantized, set[str]]:
    per_word = 32 // AWQ_BITS
    key, scales = _matrices(files, base)
    k, (groups, n) = files.shapes[key][0], files.shapes[scales]
    if n % per_word:
        raise bad(scales, f"has {n} channels, no multiple of {per_word}")
    need(files, key, ("I32",), (k, n // per_word))
    zeros = need(files, f"{base}.qzeros", ("I32",), (groups, n // per_word))
    group = _group(scales, k, groups, declared)

    def read_zeros() -> torch.Tensor:
        return _in_order(files.read(zeros)).T.to(torch.float32)

    def open_rows() -> Rows:
        words = files.read(key)
        full = Grid(read_scale(files, scales).T.contiguous(), (1, group), read_zeros())

        def rows(start: int, stop: int) -> torch.Tensor:
            first, last = start // per_word, -(-stop // per_word)
            codes = _in_order(words[:, first:last])
            skipped = start - first * per_word
            codes = codes[:, skipped : skipped + stop - start].T
            return full.apply(codes.to(torch.float32, memory_format=torch.contiguous_format), start)

        return rows

    kept = _kept(files, scales, ZEROS, group, k, read_zeros)
    return Quantized((n, k), open_rows, lambda: kept), {key, scales, zeros}


def _matrices(files: SourceTensors, base: str) -> tuple[str, str]:
    """The codes and their scales, if both are matrices."""
    key, scales = need(files, base + WEIGHT, ("I32",)), need(files, f"{base}.scales", _SCALES)
    for name in (key, scales):
        if len(files.shapes[name]) != 2 or 0 in files.shapes[name]:
            raise bad(name, f"has the shape {files.shapes[name]}, which is no matrix")
    return key, scales


def _group(scales: str, k: int, groups: int, declared: Declared) -> int:
    """Columns of a group: by the configuration, and by the scales there are."""
    for _, size in (*declared.blocks, (1, k)):
        if -(-k // size) == groups:
            return size
    raise bad(scales, f"has {groups} groups for {k} columns, which config.json does not say")


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """AWQ's words [a, b] as codes [a, 8 b]."""
    place = torch.tensor([AWQ_ORDER.index(channel) for channel in range(len(AWQ_ORDER))])
    return fields(words, AWQ_BITS).view(*words.shape, -1)[..., place].view(len(words), -1)
