"""What requests ask of their logits before a token is drawn: bias, penalties, bans, masks.

Logits are changed in place.

    logits  float32 [R, V], rows a stride apart
    bias    rows, ids int64 [N], values float32 [N]:   l += value, or l = value where `replace`
    penalties  rows, ids, counts, frequency, presence, repetition [N]:
               l > 0: l / repetition, else l * repetition;  l -= frequency counts;
               l -= presence where counts > 0; entries with counts < 0 are left out
    mask    int32 [m, ceil(V / 32)], bit t % 32 of word t // 32 of a row set: token t may come;
            l = -inf elsewhere

Order and meaning are engine/sampling/sampler.py's: bias, penalties, bans, masks, one launch each
where a step has any. Entries are sparse (the tokens that a request has used), so they cost their
number and not the vocabulary; a row names a token once a launch. A mask moves V / 8 bytes and
writes only what it forbids.
"""

import torch

from kernels.triton_api import Declared, cdiv, check_rows, jit, tl

ENTRIES = 256
MASK_BLOCK = 2048


def edit_ref_(
    logits: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    replace: bool = False,
) -> None:
    """Bias, or bans with `replace`."""
    logits[rows, ids] = values if replace else logits[rows, ids] + values


def penalize_ref_(
    logits: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    counts: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """Repetition first, then frequency and presence."""
    given = (rows, ids, counts, frequency, presence, repetition)
    if bool((counts < 0).any()):
        rows, ids, counts, frequency, presence, repetition = (one[counts >= 0] for one in given)
    value = logits[rows, ids]
    value = torch.where(value > 0, value / repetition, value * repetition)
    logits[rows, ids] = value - frequency * counts - presence * (counts > 0)


def mask_ref_(logits: torch.Tensor, mask: torch.Tensor) -> None:
    """Row i of the mask is of row i of the logits."""
    place = torch.arange(logits.shape[1], device=logits.device)
    allowed = (mask[:, place // 32] >> (place % 32).to(torch.int32)) & 1
    logits.masked_fill_(allowed == 0, float("-inf"))


@jit
def _entries_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    ids: tl.tensor,
    values: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    repetition: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    PENALIZE: tl.constexpr,
    REPLACE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = entry < count
    row = tl.load(rows + entry, mask=there, other=0)
    target = logits + row * stride + tl.load(ids + entry, mask=there, other=0)
    value = tl.load(values + entry, mask=there, other=0.0)
    if PENALIZE:
        there &= value >= 0
    if not REPLACE:
        old = tl.load(target, mask=there, other=0.0)
        if PENALIZE:
            factor = tl.load(repetition + entry, mask=there, other=1.0)
            old = tl.where(old > 0, old / factor, old * factor)
            old -= tl.load(frequency + entry, mask=there, other=0.0) * value
            extra = tl.load(presence + entry, mask=there, other=0.0)
            value = old - tl.where(value > 0, extra, 0.0)
        else:
            value += old
    tl.store(target, value, mask=there)


@jit
def _mask_kernel(
    logits: tl.tensor,
    mask: tl.tensor,
    vocab_size: tl.tensor,
    stride: tl.tensor,
    mask_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    word = tl.load(mask + row * mask_stride + token // 32, mask=inside, other=0)
    forbidden = ((word >> (token % 32)) & 1) == 0
    nothing = tl.full((BLOCK,), float("-inf"), tl.float32)
    tl.store(logits + row * stride + token, nothing, mask=inside & forbidden)


def edit_(
    logits: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    replace: bool = False,
) -> None:
    """`edit_ref_` by the kernel."""
    check_rows(logits)
    if len(rows):
        _entries_kernel[(cdiv(len(rows), ENTRIES),)](
            logits,
            rows,
            ids,
            values,
            None,
            None,
            None,
            len(rows),
            logits.stride(0),
            PENALIZE=False,
            REPLACE=replace,
            BLOCK=ENTRIES,
        )


def penalize_(
    logits: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    counts: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """`penalize_ref_` by the kernel."""
    check_rows(logits)
    if len(rows):
        _entries_kernel[(cdiv(len(rows), ENTRIES),)](
            logits,
            rows,
            ids,
            counts,
            frequency,
            presence,
            repetition,
            len(rows),
            logits.stride(0),
            PENALIZE=True,
            REPLACE=False,
            BLOCK=ENTRIES,
        )


def mask_(logits: torch.Tensor, mask: torch.Tensor) -> None:
    """`mask_ref_` by the kernel; for some of the rows, pass a slice of the logits."""
    check_rows(logits, mask)
    if len(mask):
        vocab_size = logits.shape[1]
        _mask_kernel[(len(mask), cdiv(vocab_size, MASK_BLOCK))](
            logits, mask, vocab_size, logits.stride(0), mask.stride(0), BLOCK=MASK_BLOCK
        )


_SPARSE = dict.fromkeys(("values", "frequency", "presence", "repetition"), "*fp32:16")
DECLARED = (
    Declared(
        "logit_edits/penalties",
        _entries_kernel,
        {"logits": "*fp32:16", "rows": "*i64:16", "ids": "*i64:16", "count": "i32"}
        | _SPARSE
        | {"stride": "i32:16"},
        {"PENALIZE": True, "REPLACE": False, "BLOCK": ENTRIES},
    ),
    Declared(
        "logit_edits/mask",
        _mask_kernel,
        {"logits": "*fp32:16", "mask": "*i32:16", "vocab_size": "i32:16", "stride": "i32:16"}
        | {"mask_stride": "i32:16"},
        {"BLOCK": MASK_BLOCK},
    ),
)
