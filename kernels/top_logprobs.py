"""Logprobs of chosen tokens and of the likeliest, without writing a log-softmax of the vocabulary.

    logits  float32 [R, V], rows a stride apart: the model's own, before any edit
    tokens  int64 [R]
    chosen  float32 [R]                       l[token] - log sum exp l
    ids, values  int64, float32 [R, count]    the likeliest, of equals the lowest id first

Two launches: splits of a row side by side give their peak, sum and list; a program a row joins
them. A list is taken by `count` searches of the largest among what a program holds in registers, so
count is for the handful that an API allows. Bytes moved: 4 R V, where a log-softmax and a top-k of
it move five times that.
"""

import torch

from kernels.triton_api import Declared, cdiv, check_rows, jit, next_power_of_2, tl

SPLIT = 4096
MAX_COUNT = 32
_NOBODY: tl.constexpr = tl.constexpr(2147483647)


def top_logprobs_ref(
    logits: torch.Tensor, tokens: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The definition: chosen, ids, values."""
    logs = logits.double().log_softmax(-1).float()
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return logs.gather(1, tokens[:, None])[:, 0], order, logs.gather(1, order)


@jit
def _list_kernel(
    logits: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    list_ids: tl.tensor,
    list_values: tl.tensor,
    vocab_size: tl.tensor,
    stride: tl.tensor,
    num_splits: tl.tensor,
    count: tl.tensor,
    SPLIT: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    token = split * SPLIT + tl.arange(0, SPLIT)
    inside = token < vocab_size
    value = tl.load(logits + row * stride + token, mask=inside, other=float("-inf"))
    peak = tl.max(value, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    at = row * num_splits + split
    tl.store(peaks + at, peak)
    tl.store(sums + at, tl.sum(tl.exp(value - base), 0))
    # Who has been listed, or was never there, has no name.
    name = tl.where(inside, token, _NOBODY)
    for place in range(0, count):
        best = tl.max(tl.where(name < _NOBODY, value, float("-inf")), 0)
        who = tl.min(tl.where(value == best, name, _NOBODY), 0)
        tl.store(list_ids + at * count + place, who)
        tl.store(list_values + at * count + place, best)
        name = tl.where(token == who, _NOBODY, name)


@jit
def _join_kernel(
    logits: tl.tensor,
    tokens: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    list_ids: tl.tensor,
    list_values: tl.tensor,
    chosen: tl.tensor,
    ids: tl.tensor,
    values: tl.tensor,
    stride: tl.tensor,
    num_splits: tl.tensor,
    count: tl.tensor,
    SPLITS: tl.constexpr,
    LIST: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    there = split < num_splits
    peak_of = tl.load(peaks + row * num_splits + split, mask=there, other=float("-inf"))
    sum_of = tl.load(sums + row * num_splits + split, mask=there, other=0.0)
    peak = tl.max(peak_of, 0)
    whole = peak + tl.log(tl.sum(sum_of * tl.exp(peak_of - peak), 0))
    tl.store(chosen + row, tl.load(logits + row * stride + tl.load(tokens + row)) - whole)
    entry = tl.arange(0, LIST)
    listed = entry < num_splits * count
    first = row * num_splits * count
    name = tl.load(list_ids + first + entry, mask=listed, other=_NOBODY)
    value = tl.load(list_values + first + entry, mask=listed, other=float("-inf"))
    for place in range(0, count):
        best = tl.max(tl.where(name < _NOBODY, value, float("-inf")), 0)
        who = tl.min(tl.where(value == best, name, _NOBODY), 0)
        tl.store(ids + row * count + place, who.to(tl.int64))
        tl.store(values + row * count + place, best - whole)
        name = tl.where(name == who, _NOBODY, name)


def top_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`top_logprobs_ref` by the kernels. Raises ValueError for more than MAX_COUNT or V."""
    num_rows, vocab_size = logits.shape
    if not 0 <= count <= min(MAX_COUNT, vocab_size):
        raise ValueError(f"{count} of {vocab_size} logprobs, at most {MAX_COUNT}")
    check_rows(logits)
    splits, device = cdiv(vocab_size, SPLIT), logits.device
    peaks = torch.empty(num_rows, splits, dtype=torch.float32, device=device)
    list_ids = torch.empty(num_rows, splits, count, dtype=torch.int32, device=device)
    list_values = torch.empty(num_rows, splits, count, dtype=torch.float32, device=device)
    chosen = torch.empty(num_rows, dtype=torch.float32, device=device)
    ids = torch.empty(num_rows, count, dtype=torch.int64, device=device)
    values = torch.empty(num_rows, count, dtype=torch.float32, device=device)
    if num_rows:
        parts = (peaks, torch.empty_like(peaks), list_ids, list_values)
        stride = logits.stride(0)
        _list_kernel[(num_rows, splits)](
            logits, *parts, vocab_size, stride, splits, count, SPLIT=SPLIT, num_warps=8
        )
        _join_kernel[(num_rows,)](
            logits,
            tokens,
            *parts,
            chosen,
            ids,
            values,
            stride,
            splits,
            count,
            SPLITS=next_power_of_2(splits),
            LIST=next_power_of_2(max(1, splits * count)),
            num_warps=4,
        )
    return chosen, ids, values


_PARTS = {"logits": "*fp32:16", "peaks": "*fp32:16", "sums": "*fp32:16", "list_ids": "*i32:16"}
_PARTS |= {"list_values": "*fp32:16", "stride": "i32:16", "num_splits": "i32", "count": "i32"}
DECLARED = (
    Declared(
        "top_logprobs/list",
        _list_kernel,
        _PARTS | {"vocab_size": "i32:16"},
        {"SPLIT": SPLIT},
        num_warps=8,
    ),
    Declared(
        "top_logprobs/join",
        _join_kernel,
        _PARTS
        | {"tokens": "*i64:16", "chosen": "*fp32:16", "ids": "*i64:16", "values": "*fp32:16"},
        {"SPLITS": 64, "LIST": 2048},
    ),
)
