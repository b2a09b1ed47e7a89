"""Formats whose codes lie row by row, as the weight does: FP8, compressed-tensors, ModelOpt.

    FP8                 x.weight F8_E4M3 [n, k]; x.weight_scale_inv (or weight_scale) multiplies:
                        one number, [n], [n, 1], or one for each block (128 x 128)
    compressed-tensors  the same with x.weight I8 or F8_E4M3 and x.weight_scale; or
                        x.weight_packed I32, codes of 2, 4 or 8 bits from -2^(bits - 1) on, lowest
                        first, x.weight_shape, x.weight_scale [n, groups], x.weight_zero_point
                        packed along n (or I8 [n, groups]), x.weight_g_idx [k]; or FP4 (below)
    FP4                 bytes of two codes, scales F8_E4M3 for 16 (NVFP4) or powers of two for 32
                        (MXFP4). NVFP4's second scale divides the first in compressed-tensors
                        (x.weight_global_scale) and multiplies it in ModelOpt (x.weight_scale_2)

Experts that are stacked ([experts, n, k]) are read one by one.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from engine.pack import FP8_SCHEME
from engine.registration.tensors.declared import Declared
from engine.registration.tensors.files import SourceTensors
from engine.registration.tensors.scaled import (
    SCALE_DTYPES,
    Grid,
    Kept,
    Quantized,
    Rows,
    bad,
    block_of,
    fields,
    is_kept,
    need,
    nibbles,
    read_scale,
    steps_of,
)
from kernels.int4_blocks import E2M1, E2M1_HALVES, INT4_BLOCKS, ZEROS, Steps

PACKED = ".weight_packed"
STEP_BITS = 4
NVFP4_GROUP = 16
MXFP4_GROUP = 32

Found = Iterator[tuple[str, Callable[[], tuple[Quantized, set[str]]]]]
"""Name of a weight, and what says how it is read and which tensors in the files stand for it.

The latter raises RegistrationRefused: whether the weight counts is not known here.
"""


def find_rows(files: SourceTensors, declared: Declared) -> Found:
    """Every quantized weight of such a checkpoint."""
    for key, dtype in files.dtypes.items():
        if key.endswith(PACKED):
            base = key.removesuffix("_packed")
            read = _packed if dtype == "I32" else _fp4_packed
            yield base, partial(read, files, base, declared)
        elif dtype == "U8" and f"{key}_scale_2" in files.shapes:
            whole = f"{key}_scale_2"
            yield key, partial(_fp4, files, key, key, NVFP4_GROUP, whole, multiplies=True)
        elif key.endswith(("_scale", "_scale_inv", "_zero_point")):
            continue
        elif dtype == "F8_E4M3" or (dtype == "I8" and f"{key}_scale" in files.shapes):
            yield key, partial(_scaled, files, key, declared)


def _scaled(files: SourceTensors, key: str, declared: Declared) -> tuple[Quantized, set[str]]:
    """Codes of eight bits that are numbers themselves."""
    shape = files.shapes[key]
    if len(shape) not in (2, 3) or 0 in shape:
        raise bad(key, f"has the shape {shape}, which is no matrix")
    names = [name for name in (f"{key}_scale_inv", f"{key}_scale") if name in files.shapes]
    if not names:
        raise bad(f"{key}_scale", "is missing")
    scale = need(files, names[0], SCALE_DTYPES)
    lead, matrix = shape[:-2], (shape[-2], shape[-1])
    grid = _grid_shape(scale, files.shapes[scale], lead)
    block = block_of(scale, matrix, grid, declared.blocks)
    zero = f"{key}_zero_point"
    used = {key, *names}
    if zero in files.shapes:
        need(files, zero, ("I8", "F8_E4M3", "BF16", "F16", "F32"), files.shapes[scale])
        used.add(zero)

    def kept() -> Kept | None:
        whole = block[1] >= matrix[1] and zero not in used
        if lead or files.dtypes[key] != "F8_E4M3" or not whole:
            return None
        of_row = torch.arange(matrix[0]) // block[0]
        return Kept(FP8_SCHEME, lambda: Steps(read_scale(files, scale).reshape(grid)[of_row]))

    def open_rows() -> Rows:
        scales = read_scale(files, scale).reshape(*lead, *grid)
        zeros = None
        if zero in used:
            zeros = files.read(zero).to(torch.float32).reshape(*lead, *grid)

        def rows(start: int, stop: int) -> torch.Tensor:
            codes = files.rows(key, start, stop).to(torch.float32)
            if not lead:
                return Grid(scales, block, zeros).apply(codes, start)
            for number, codes_of_one in enumerate(codes, start):
                one = None if zeros is None else zeros[number]
                Grid(scales[number], block, one).apply(codes_of_one, 0)
            return codes

        return rows

    return Quantized(shape, open_rows, kept), used


def _grid_shape(key: str, shape: tuple[int, ...], lead: tuple[int, ...]) -> tuple[int, int]:
    """[n', k'] of the scales of one matrix, however they are written."""
    if shape[: len(lead)] != lead:
        raise bad(key, f"has the shape {shape}, which does not begin with {lead}")
    rest = shape[len(lead) :]
    if len(rest) > 2 or 0 in rest:
        raise bad(key, f"has the shape {shape}, which is no grid of scales")
    rows, columns = (*rest, 1, 1)[:2]
    return rows, columns


def _packed(files: SourceTensors, base: str, declared: Declared) -> tuple[Quantized, set[str]]:
    """compressed-tensors' integers, several to a word."""
    key, scale = need(files, f"{base}_packed", ("I32",)), need(files, f"{base}_scale", SCALE_DTYPES)
    said = need(files, f"{base}_shape", ("I64", "I32"), (2,))
    used = {key, scale, said}
    n, k = (int(size) for size in files.read(said))
    if len(files.shapes[key]) != 2 or n != files.shapes[key][0] or n < 1:
        raise bad(key, f"has the shape {files.shapes[key]} for a weight of {n} x {k}")
    words = files.shapes[key][1]
    bits = next((bits for bits in declared.bits if -(-k * bits // 32) == words and k > 0), 0)
    if not bits:
        raise bad(key, f"has {words} words a row, not what {k} codes of {declared.bits} bits take")
    grid = _grid_shape(scale, files.shapes[scale], ())
    index, zero = f"{base}_g_idx", f"{base}_zero_point"
    block = block_of(scale, (n, k), grid, declared.blocks)
    by_index = has_index(files, index, k, grid[1], declared)
    if by_index:
        used.add(index)
    plain = files.dtypes.get(zero) == "I8"
    if zero in files.shapes:
        shape = files.shapes[scale] if plain else (-(-n * bits // 32), grid[1])
        used.add(need(files, zero, ("I32", "I8"), shape))
    offset = 1 << (bits - 1)

    def packed_zeros() -> torch.Tensor:
        stored = fields(files.read(zero).T.contiguous(), bits).T[:n]
        return stored.to(torch.float32) - offset

    def read_zeros() -> torch.Tensor | None:
        if zero not in used:
            return None
        return files.read(zero).to(torch.float32).reshape(grid) if plain else packed_zeros()

    def open_rows() -> Rows:
        zeros = read_zeros()
        columns = group_index(files, index, grid[1], declared) if by_index else None
        full = Grid(read_scale(files, scale).reshape(grid), block, zeros, columns)

        def rows(start: int, stop: int) -> torch.Tensor:
            codes = fields(files.rows(key, start, stop), bits)[:, :k]
            return full.apply(codes.to(torch.float32) - offset, start)

        return rows

    def kept() -> Kept | None:
        scheme = ZEROS if zero in used else INT4_BLOCKS
        if bits != STEP_BITS or by_index or block[0] != 1 or not is_kept(scheme, block[1], k):
            return None

        def steps() -> Steps:
            zeros = read_zeros()
            above = None if zeros is None else zeros + offset
            return steps_of(scheme, block[1], k, read_scale(files, scale).reshape(grid), above)

        return Kept(scheme, steps)

    return Quantized((n, k), open_rows, kept), used


def has_index(files: SourceTensors, key: str, k: int, groups: int, declared: Declared) -> bool:
    """Whether there is an index of groups. Raises RegistrationRefused where there must be one."""
    if key in files.shapes or (declared.act_order and groups > 1):
        need(files, key, ("I32", "I64"), (k,))
        return True
    return False


def group_index(
    files: SourceTensors, key: str, groups: int, declared: Declared
) -> torch.Tensor | None:
    """The group of each column, int64 [k]; None where it was never set (all -1)."""
    index = files.read(key).to(torch.int64)
    if bool((index == -1).all()):
        if declared.act_order and groups > 1:
            raise bad(key, "was never set (all -1), but config.json says act-order")
        return None
    if not bool(((index >= 0) & (index < groups)).all()):
        raise bad(key, f"names groups beyond the {groups} that have scales")
    return index


def _fp4_packed(files: SourceTensors, base: str, declared: Declared) -> tuple[Quantized, set[str]]:
    """compressed-tensors' codes of four bits with an exponent."""
    key = need(files, f"{base}_packed", ("U8",))
    whole = f"{base}_global_scale"
    if whole in files.shapes:
        return _fp4(files, base, key, NVFP4_GROUP, whole, multiplies=False)
    if files.dtypes.get(f"{base}_scale") == "F8_E4M3":
        raise bad(whole, "is missing")
    return _fp4(files, base, key, MXFP4_GROUP, "", multiplies=True)


def _fp4(
    files: SourceTensors, base: str, key: str, group: int, whole: str, *, multiplies: bool
) -> tuple[Quantized, set[str]]:
    """`whole`: the scale of the scales, if there is one."""
    if len(files.shapes[key]) != 2 or 0 in files.shapes[key]:
        raise bad(key, f"has the shape {files.shapes[key]}, which is no matrix")
    n, k = files.shapes[key][0], 2 * files.shapes[key][1]
    dtypes = ("F8_E4M3",) if whole else ("U8", "F8_E8M0")
    scale = need(files, f"{base}_scale", dtypes, (n, -(-k // group)))
    used = {key, scale, whole} - {""}
    if whole:
        need(files, whole, ("F32",))
        if torch.Size(files.shapes[whole]).numel() != 1:
            raise bad(whole, f"has the shape {files.shapes[whole]}, not one value")

    def scales() -> torch.Tensor:
        found = read_scale(files, scale)
        if whole:
            factor = read_scale(files, whole).reshape(())
            found = found * factor if multiplies else found / factor
        return found

    def open_rows() -> Rows:
        full = Grid(scales(), (1, group))
        return lambda start, stop: full.apply(nibbles(files.rows(key, start, stop)), start)

    scheme = E2M1_HALVES if group == NVFP4_GROUP else E2M1
    kept = Kept(scheme, lambda: steps_of(scheme, group, k, scales()))
    return Quantized((n, k), open_rows, lambda: kept), used
