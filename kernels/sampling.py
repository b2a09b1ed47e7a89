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
finds the split where the number falls and reads that alone), and for the rows that cut a tail
`_cut_kernel`. Bytes moved: 4 R V, and for cutting rows 8 V and 4 V for each step of two searches.

Nothing is sorted. The least weight that stays is searched over the bits of w, which order as w
does: a step reads the row (out of L2) against four thresholds and leaves a fifth of the interval;
it ends when the interval holds as many as wanted. 13 steps at most, 5-8 where weights differ.
"""

from dataclasses import dataclass

import torch

from kernels.triton_api import Declared, cdiv, check_rows, jit, next_power_of_2, tl

SPLIT = 4096
TILE = 2048
PIVOTS = 4
NO_LIMIT = (1 << 31) - 1
"""A top_k that limits nothing."""
# Temperatures under this do as this does, and nothing overflows.
_COLDEST: tl.constexpr = tl.constexpr(1e-33)
_BELOW_ONE: tl.constexpr = tl.constexpr(1.0 - 2.0**-53)


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
def _divisor(temperature: tl.tensor) -> tl.tensor:
    return tl.where(temperature > 0, tl.maximum(temperature, _COLDEST), 1.0)


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
    hot = _divisor(tl.load(temperature + row))
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
    hot = _divisor(asked)
    if (asked > 0) & (bad == 0):
        share = tl.load(sums + at, mask=there, other=0.0) * tl.exp((peak_of - peak) / hot)
        running = tl.cumsum(share.to(tl.float64), 0)
        total = tl.max(running, 0)
        target = tl.minimum(tl.load(number + row), _BELOW_ONE) * total
        chosen = tl.minimum(tl.sum((running <= target).to(tl.int32), 0), num_splits - 1)
        above = tl.sum(tl.where(split == chosen, running, 0.0), 0)
        inside = tl.sum(tl.where(split == chosen, share, 0.0).to(tl.float64), 0)
        part = tl.minimum(tl.maximum((target - (above - inside)) / inside, 0.0), _BELOW_ONE)
        first = chosen * SPLIT
        place = first + tl.arange(0, SPLIT)
        value = tl.load(logits + row * stride + place, mask=place < vocab_size, other=float("-inf"))
        inner = tl.cumsum(tl.exp((value - peak) / hot).to(tl.float64), 0)
        token = first + tl.sum((inner <= part * tl.max(inner, 0)).to(tl.int32), 0)
        tl.store(totals + row, total.to(tl.float32))
    tl.store(tokens + row, tl.where(bad, 0, token).to(tl.int64))
    tl.store(broken + row, bad.to(tl.int8))


@jit
def _above(
    weights: tl.tensor,
    vocab_size: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
) -> tl.tensor:
    """Thresholds between low and high (bits of floats); count and sum of what is at or above."""
    width = (high - low).to(tl.int64)
    pivot = low + ((tl.arange(0, PIVOTS) + 1) * width // (PIVOTS + 1)).to(tl.int32)
    least = pivot.to(tl.float32, bitcast=True)
    count = tl.zeros((PIVOTS,), tl.int32)
    total = tl.zeros((PIVOTS,), tl.float64)
    for start in range(0, vocab_size, TILE):
        token = start + tl.arange(0, TILE)
        weight = tl.load(weights + token, mask=token < vocab_size, other=-1.0)
        over = weight[:, None] >= least[None, :]
        count += tl.sum(over.to(tl.int32), 0)
        total += tl.sum(tl.where(over, weight[:, None], 0.0), 0).to(tl.float64)
    return pivot, count, total


@jit
def _cut_kernel(
    logits: tl.tensor,
    cut: tl.tensor,
    temperature: tl.tensor,
    number: tl.tensor,
    min_p: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    broken: tl.tensor,
    scratch: tl.tensor,
    tokens: tl.tensor,
    vocab_size: tl.tensor,
    stride: tl.tensor,
    num_splits: tl.tensor,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
) -> None:
    row = tl.load(cut + tl.program_id(0))
    weights = scratch + tl.program_id(0).to(tl.int64) * vocab_size
    if tl.load(broken + row) == 0:
        split = tl.arange(0, SPLITS)
        there = split < num_splits
        peak = tl.max(tl.load(peaks + row * num_splits + split, mask=there, other=float("-inf")), 0)
        hot = _divisor(tl.load(temperature + row))
        sum_exp = tl.load(totals + row)
        floor = tl.load(min_p + row) / sum_exp
        largest = tl.zeros((), tl.float32)
        everything = tl.zeros((), tl.float64)
        for start in range(0, vocab_size, TILE):
            token = start + tl.arange(0, TILE)
            inside = token < vocab_size
            value = tl.load(logits + row * stride + token, mask=inside, other=float("-inf"))
            weight = tl.exp((value - peak) / hot) / sum_exp
            weight = tl.where(weight < floor, 0.0, weight)
            tl.store(weights + token, weight, mask=inside)
            everything += tl.sum(weight, 0).to(tl.float64)
            largest = tl.maximum(largest, tl.max(weight, 0))
        tl.debug_barrier()  # other threads read what was written

        # top_k: count(>= low) >= limit > count(>= high)
        limit = tl.minimum(tl.load(top_k + row), vocab_size)
        low = tl.zeros((), tl.int32)
        high = largest.to(tl.int32, bitcast=True) + 1
        count_low, sum_low = vocab_size + tl.zeros((), tl.int32), everything
        count_high, sum_high = tl.zeros((), tl.int32), tl.zeros((), tl.float64)
        while (high - low > 1) & (count_low != limit):
            pivot, count, total = _above(weights, vocab_size, low, high, TILE, PIVOTS)
            enough = count >= limit
            low = tl.maximum(low, tl.max(tl.where(enough, pivot, 0), 0))
            high = tl.minimum(high, tl.min(tl.where(enough, 2147483647, pivot), 0))
            # Sums fall as thresholds rise: the least that is enough, and the most that is not.
            count_low = tl.minimum(count_low, tl.min(tl.where(enough, count, 2147483647), 0))
            count_high = tl.maximum(count_high, tl.max(tl.where(enough, 0, count), 0))
            sum_low = tl.minimum(sum_low, tl.min(tl.where(enough, total, float("inf")), 0))
            sum_high = tl.maximum(sum_high, tl.max(tl.where(enough, 0.0, total), 0))
        if count_low > limit:
            # All of [low, high) are one value; some of the equals go.
            least = low.to(tl.float32, bitcast=True).to(tl.float64)
            sum_low = sum_high + (limit - count_high).to(tl.float64) * least
            count_low = limit

        # top_p: sum(>= low) >= wanted > sum(>= high), within what top_k left
        share = tl.load(top_p + row)
        room = count_low - count_high
        if share < 1:
            wanted = tl.maximum(share * sum_low, 1e-300)
            high = largest.to(tl.int32, bitcast=True) + 1
            count_high, sum_high = tl.zeros((), tl.int32), tl.zeros((), tl.float64)
            while (high - low > 1) & (count_low - count_high > 1):
                pivot, count, total = _above(weights, vocab_size, low, high, TILE, PIVOTS)
                # A threshold at `low` itself would count the equals that top_k sent away.
                new = pivot > low
                enough = (total >= wanted) & new
                short = (total < wanted) & new
                count_low = tl.minimum(count_low, tl.min(tl.where(enough, count, 2147483647), 0))
                count_high = tl.maximum(count_high, tl.max(tl.where(short, count, 0), 0))
                sum_low = tl.minimum(sum_low, tl.min(tl.where(enough, total, float("inf")), 0))
                sum_high = tl.maximum(sum_high, tl.max(tl.where(short, total, 0.0), 0))
                high = tl.minimum(high, tl.min(tl.where(short, pivot, 2147483647), 0))
                low = tl.maximum(low, tl.max(tl.where(enough, pivot, 0), 0))
            room = count_low - count_high
            if room > 1:
                least = low.to(tl.float32, bitcast=True).to(tl.float64)
                needed = tl.ceil((wanted - sum_high) / least).to(tl.int32)
                room = tl.minimum(room, tl.maximum(needed, 1))
                sum_low = sum_high + room.to(tl.float64) * least

        # Invert over w >= high and the first `room` of [low, high).
        least = low.to(tl.float32, bitcast=True)
        most = high.to(tl.float32, bitcast=True)
        target = tl.minimum(tl.load(number + row), _BELOW_ONE) * sum_low
        running = tl.zeros((), tl.float64)
        seen = tl.zeros((), tl.int32)
        found = tl.full((), -1, tl.int32)
        last = tl.zeros((), tl.int32)
        for start in range(0, vocab_size, TILE):
            token = start + tl.arange(0, TILE)
            weight = tl.load(weights + token, mask=token < vocab_size, other=0.0)
            equal = ((weight >= least) & (weight < most)).to(tl.int32)
            place = seen + tl.cumsum(equal, 0)
            seen += tl.sum(equal, 0)
            kept = (weight >= most) | ((equal > 0) & (place <= room))
            weight = tl.where(kept, weight, 0.0)
            inner = running + tl.cumsum(weight.to(tl.float64), 0)
            running = tl.max(inner, 0)
            # Rounding may leave the last sum short of the target: then the last that stayed.
            last = tl.maximum(last, tl.max(tl.where(weight > 0, token, 0), 0))
            if (found < 0) & (running > target):
                found = start + tl.sum((inner <= target).to(tl.int32), 0)
        tl.store(tokens + row, tl.where(found < 0, last, found).to(tl.int64))


def draw(logits: torch.Tensor, how: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw_ref` by the kernels, in two launches, or three where a row cuts a tail."""
    check_rows(logits)
    num_rows, vocab_size = logits.shape
    num_splits = cdiv(vocab_size, SPLIT)
    device, stride = logits.device, logits.stride(0)
    peaks = torch.empty(num_rows, num_splits, dtype=torch.float32, device=device)
    places = torch.empty(num_rows, num_splits, dtype=torch.int32, device=device)
    sums, totals = torch.empty_like(peaks), torch.empty_like(peaks[:, 0])
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    broken = torch.empty(num_rows, dtype=torch.int8, device=device)
    if not num_rows:
        return tokens, broken.bool()
    sizes = (vocab_size, stride, num_splits)
    splits = next_power_of_2(num_splits)
    _peak_kernel[(num_rows, num_splits)](
        logits, how.temperature, peaks, places, sums, *sizes, SPLIT=SPLIT, num_warps=8
    )
    parts = (peaks, places, sums, totals, tokens, broken)
    _draw_kernel[(num_rows,)](
        logits, how.temperature, how.number, *parts, *sizes, SPLIT=SPLIT, SPLITS=splits, num_warps=8
    )
    if len(how.cut):
        scratch = torch.empty(len(how.cut), vocab_size, dtype=torch.float32, device=device)
        limits = (how.min_p, how.top_k, how.top_p)
        _cut_kernel[(len(how.cut),)](
            logits,
            how.cut,
            how.temperature,
            how.number,
            *limits,
            peaks,
            totals,
            broken,
            scratch,
            tokens,
            *sizes,
            SPLITS=splits,
            TILE=TILE,
            PIVOTS=PIVOTS,
            num_warps=16,
        )
    return tokens, broken.bool()


_FLOATS = ("logits", "temperature", "min_p", "peaks", "sums", "totals", "scratch")
_TYPES = dict.fromkeys(_FLOATS, "*fp32:16") | dict.fromkeys(("number", "top_p"), "*fp64:16")
_TYPES |= {"places": "*i32:16", "top_k": "*i32:16", "tokens": "*i64:16", "cut": "*i64:16"}
_TYPES |= {"broken": "*i8:16", "vocab_size": "i32:16", "stride": "i32:16", "num_splits": "i32"}


def _declared(
    name: str, kernel: object, arguments: str, num_warps: int, **constants: int
) -> Declared:
    types = {argument: _TYPES[argument] for argument in arguments.split()}
    return Declared(f"sampling/{name}", kernel, types, constants, num_warps=num_warps)


_SIZES = "vocab_size stride num_splits"
DECLARED = (
    _declared(
        "peak", _peak_kernel, f"logits temperature peaks places sums {_SIZES}", 8, SPLIT=SPLIT
    ),
    _declared(
        "draw",
        _draw_kernel,
        f"logits temperature number peaks places sums totals tokens broken {_SIZES}",
        8,
        SPLIT=SPLIT,
        SPLITS=64,
    ),
    _declared(
        "cut",
        _cut_kernel,
        "logits cut temperature number min_p top_k top_p peaks totals broken scratch tokens "
        + _SIZES,
        16,
        SPLITS=64,
        TILE=TILE,
        PIVOTS=PIVOTS,
    ),
)
