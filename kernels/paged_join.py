"""The parts of a row's context, attended apart, as one result: the second half of split decode.

Part s of head h brings its maximum m_s and sum l_s (powers of two) and acc_s, not yet divided:

    o = sum_s 2^(m_s - m) acc_s / sum_s 2^(m_s - m) l_s        m = max_s m_s

A sink logit is one more part that brings no value. An empty part has l = 0 and acc = 0.

    parts   float32 [rows, heads, splits, v_dim]
    stats   float32 [rows, heads, splits, 2]      maximum, sum
    out     [T, heads, v_dim]                     row r writes token q_start[r]

Bytes moved: the parts once; 4 * (v_dim + 2) a head and split, to a split's context * (k_dim +
v_dim) * 2 / group: less than 2 % from 512 positions a split on at a group of 4.
"""

from collections.abc import Mapping
from typing import Any

import torch

from kernels.dependent import dependent, enter
from kernels.paged_rows import LOG2_E, MASKED
from kernels.triton_api import Declared, jit, tl

# Parts joined at a time: [16, 128] float32 is 16 registers a thread.
BLOCK_S = 16
NUM_WARPS = 4


@jit
def _join_kernel(
    part_ptr: tl.tensor,
    stat_ptr: tl.tensor,
    token_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    num_splits: tl.tensor,
    NUM_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    V_PAD: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
) -> None:
    """Program (r, h): the splits of one head of one row, BLOCK_S at a time, as one result."""
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    v_dim = tl.arange(0, V_PAD)
    in_v = v_dim < V_DIM
    highest = tl.full([1], MASKED, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([V_PAD], tl.float32)
    if HAS_SINKS:
        # One more part of weight 1 that brings no value.
        highest = highest * 0 + tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        total = total + 1.0
    for start in range(0, num_splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        place = (row * NUM_HEADS + head) * num_splits + split
        there = split < num_splits
        maxima = tl.load(stat_ptr + place * 2, mask=there, other=MASKED)
        sums = tl.load(stat_ptr + place * 2 + 1, mask=there, other=0.0)
        part = tl.load(
            part_ptr + place[:, None] * V_DIM + v_dim[None, :],
            mask=there[:, None] & in_v[None, :],
            other=0.0,
        )
        higher = tl.maximum(highest, tl.max(maxima, 0))
        weights = tl.exp2(maxima - higher)
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights * sums, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * part, 0)
        highest = higher
    factor = 1.0 / tl.where(total > 0, total, 1.0)
    token = tl.load(token_ptr + row).to(tl.int64)
    target = out_ptr + (token * NUM_HEADS + head) * V_DIM + v_dim
    tl.store(target, (acc * factor).to(out_ptr.dtype.element_ty), mask=in_v)


def join_splits(
    parts: torch.Tensor,
    stats: torch.Tensor,
    q_start: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor,
    constants: Mapping[str, Any],
) -> None:
    """Join into `out`. `constants`: those of the decode kernel that made the parts."""
    num_rows, num_heads, num_splits = parts.shape[:3]
    names = ("NUM_HEADS", "V_DIM", "HAS_SINKS", "V_PAD")
    _join_kernel[(num_rows, num_heads)](
        parts,
        stats,
        q_start,
        out,
        sinks,
        num_splits,
        BLOCK_S=BLOCK_S,
        num_warps=NUM_WARPS,
        **dependent(out.device),
        **{name: constants[name] for name in names},
    )


DECLARED = (
    Declared(
        "decode/join",
        _join_kernel,
        {f"{name}_ptr": "*fp32:16" for name in ("part", "stat")}
        | {"token_ptr": "*i32:16", "out_ptr": "*bf16:16", "sinks_ptr": "*bf16:16"}
        | {"num_splits": "i32"},
        {"NUM_HEADS": 32, "V_DIM": 128, "HAS_SINKS": True, "BLOCK_S": BLOCK_S, "V_PAD": 128},
        NUM_WARPS,
    ),
)
