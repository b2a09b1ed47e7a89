"""One token a row of logits: greedy, or drawn at a given random number from what is left of them.

    logits       float32 [R, V], rows a stride apart; not changed
    temperature  float32 [R], 0: the largest logit, the first of equal ones
    number       float64 [R] in (0, 1)
    min_p        float32 [R], 0 for none      top_k int32 [R], V or more for none
    top_p        float64 [R], 1 or more for none
    token        int64 [R];  broken bool [R]: a NaN or +inf was there, or nothing but -inf

    w = softmax((l - max l) / temperature); those under min_p max(w) go; the top_k likeliest stay,
    of equals those with the lowest ids; of these the fewest likeliest that reach top_p of their sum
    token = the first whose running sum of w passes number * sum of w

Order, ties and the inversion are engine/sampling/sampler.py's, so a row draws the same token on a
processor and here, but for numbers within rounding (1e-6) of a boundary. The issue that asked for
this spoke of Gumbel noise; a number a row, from the same counters, needs none for each of V tokens.

Launches: `_peak_kernel` (splits of a row side by side: peak, sum), `_draw_kernel` (a program a row;
finds the split where the number falls and reads that alone), and three for the rows that cut a tail
(kernels/tail_cut.py). Their number depends on no value, so a CUDA graph can hold them. Bytes moved:
4 R V, and the tails'.
"""

from dataclasses import dataclass

import torch

from kernels.tail_cut import BELOW_ONE, cut_tail, declared, divisor
from kernels.triton_api import cdiv, check_rows, jit, next_power_of_2, tl

SPLIT = 4096
NO_LIMIT = (1 << 31) - 1
"""A top_k that limits nothing."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How each row is drawn (the module's docstring). cut: int64 [c], rows that cut a tail."""

    temperature: torch.Tensor
    number: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    cut: torch.Tensor


def draw_of(
    temperature: list[float],
    number: list[float],
    min_p: list[float],
    top_k: list[int],
    top_p: list[float],
    device: torch.device | str = "cpu",
) -> Draw:
    """From a row's parameters as requests give them (top_k 0: none)."""
    each = zip(temperature, min_p, top_k, top_p, strict=True)
    cut = [i for i, (t, m, k, p) in enumerate(each) if t > 0 and (m > 0 or k > 0 or p < 1)]
    return Draw(
        torch.tensor([t and max(t, 1e-33) for t in temperature], dtype=torch.float32).to(device),
        torch.tensor(number, dtype=torch.float64).to(device),
        torch.tensor(min_p, dtype=torch.float32).to(device),
        torch.tensor([min(k, NO_LIMIT) or NO_LIMIT for k in top_k], dtype=torch.int32).to(device),
        torch.tensor(top_p, dtype=torch.float64).to(device),
        torch.tensor(cut, dtype=torch.int64).to(device),
    )


def draw_ref(logits: torch.Tensor, how: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, by sorting each row: (token, broken)."""
    tokens, broken = [], []
    for row, values in enumerate(logits):
        peak = values.max()
        bad = not bool(torch.isfinite(peak))
        token = int((values == peak).nonzero()[0]) if not bad else 0
        temperature = how.temperature[row].clamp(min=torch.finfo(torch.float32).tiny)
        if not bad and how.temperature[row] > 0:
            weights = ((values - peak) / temperature).softmax(-1)
            weights = torch.where(weights < weights.max() * how.min_p[row], 0.0, weights).double()
            order = weights.sort(descending=True, stable=True).indices[: int(how.top_k[row])]
            running = weights[order].cumsum(0)
            if how.top_p[row] < 1:
                reached = running >= how.top_p[row] * running[-1]
                order = order[: int(reached.nonzero()[0]) + 1]
            kept = torch.zeros_like(weights).index_copy_(0, order, weights[order]).cumsum(0)
            token = int((kept > how.number[row] * kept[-1]).nonzero()[0])
        tokens.append(token)
        broken.append(bad)
    return torch.tensor(tokens, device=logits.device), torch.tensor(broken, device=logits.device)


@jit
def _peak_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    peaks: tl.tensor,
    places: tl.tensor,
    sums: tl.tensor,
    vocab_size: tl.tensor,
    stride: tl.tensor,
    num_splits: tl.tensor,
    SPLIT: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    token = split * SPLIT + tl.arange(0, SPLIT)
    value = tl.load(logits + row * stride + token, mask=token < vocab_size, other=float("-inf"))
    peak = tl.max(value, 0)
    place = tl.min(tl.where(value == peak, token, 2147483647), 0)
    bad = tl.max(((value != value) | (value == float("inf"))).to(tl.int32), 0)
    hot = divisor(tl.load(temperature + row))
    base = tl.where(tl.abs(peak) < float("inf"), peak, 0.0)
    at = row * num_splits + split
    tl.store(sums + at, tl.sum(tl.exp((value - base) / hot), 0))
    tl.store(peaks + at, peak)
    # A place of -1 says that the split holds a NaN or +inf.
    tl.store(places + at, tl.where(bad > 0, -1, place))


@jit
def _draw_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    number: tl.tensor,
    peaks: tl.tensor,
    places: tl.tensor,
    sums: tl.tensor,
    totals: tl.tensor,
    tokens: tl.tensor,
    broken: tl.tensor,
    vocab_size: tl.tensor,
    stride: tl.tensor,
    num_splits: tl.tensor,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    there = split < num_splits
    at = row * num_splits + split
    peak_of = tl.load(peaks + at, mask=there, other=float("-inf"))
    place_of = tl.load(places + at, mask=there, other=2147483647)
    peak = tl.max(peak_of, 0)
    token = tl.min(tl.where(peak_of == peak, place_of, 2147483647), 0)
    bad = (tl.min(place_of, 0) < 0) | (peak == float("-inf"))
    asked = tl.load(temperature + row)
    hot = divisor(asked)
    if (asked > 0) & (bad == 0):
        share = tl.load(sums + at, mask=there, other=0.0) * tl.exp((peak_of - peak) / hot)
        running = tl.cumsum(share.to(tl.float64), 0)
        total = tl.max(running, 0)
        target = tl.minimum(tl.load(number + row), BELOW_ONE) * total
        chosen = tl.minimum(tl.sum((running <= target).to(tl.int32), 0), num_splits - 1)
        above = tl.sum(tl.where(split == chosen, running, 0.0), 0)
        inside = tl.sum(tl.where(split == chosen, share, 0.0).to(tl.float64), 0)
        part = tl.minimum(tl.maximum((target - (above - inside)) / inside, 0.0), BELOW_ONE)
        first = chosen * SPLIT
        place = first + tl.arange(0, SPLIT)
        value = tl.load(logits + row * stride + place, mask=place < vocab_size, other=float("-inf"))
        inner = tl.cumsum(tl.exp((value - peak) / hot).to(tl.float64), 0)
        token = first + tl.sum((inner <= part * tl.max(inner, 0)).to(tl.int32), 0)
        tl.store(totals + row, total.to(tl.float32))
    tl.store(tokens + row, tl.where(bad, 0, token).to(tl.int64))
    tl.store(broken + row, bad.to(tl.int8))


def draw(logits: torch.Tensor, how: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw_ref` by the kernels, in two launches, or five where a row cuts a tail."""
    check_rows(logits)
    num_rows, vocab_size = logits.shape
    num_splits = cdiv(vocab_size, SPLIT)
    device, stride = logits.device, logits.stride(0)
    peaks = torch.empty(num_rows, num_splits, dtype=torch.float32, device=device)
    places = torch.empty(num_rows, num_splits, dtype=torch.int32, device=device)
    sums, totals = torch.empty_like(peaks), torch.empty_like(peaks[:, 0])
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    broken = torch.empty(num_rows, dtype=torch.bool, device=device)
    if not num_rows:
        return tokens, broken
    sizes = (vocab_size, stride, num_splits)
    splits = next_power_of_2(num_splits)
    _peak_kernel[(num_rows, num_splits)](
        logits, how.temperature, peaks, places, sums, *sizes, SPLIT=SPLIT, num_warps=8
    )
    flags = broken.view(torch.int8)
    parts = (peaks, places, sums, totals, tokens, flags)
    _draw_kernel[(num_rows,)](
        logits, how.temperature, how.number, *parts, *sizes, SPLIT=SPLIT, SPLITS=splits, num_warps=8
    )
    if len(how.cut):
        limits = (how.min_p, how.top_k, how.top_p)
        given = (how.cut, how.temperature, how.number, *limits)
        cut_tail(logits, *given, peaks, totals, flags, tokens)
    return tokens, broken


_SIZES = "vocab_size stride num_splits"
DECLARED = (
    declared(
        "peak", _peak_kernel, f"logits temperature peaks places sums {_SIZES}", 8, SPLIT=SPLIT
    ),
    declared(
        "draw",
        _draw_kernel,
        f"logits temperature number peaks places sums totals tokens broken {_SIZES}",
        8,
        SPLIT=SPLIT,
        SPLITS=64,
    ),
)
