"""Tails of rows cut off, and a token drawn of what stays: top_k, top_p and min_p without sorting.

What is computed is kernels/sampling.py's; this has the rows that cut, in three launches:

    _weigh_kernel   splits side by side: w, how many there are in each half of an octave, their sum
    _gather_kernel  splits side by side: the w that may stay, by id, side by side
    _cut_kernel     a program a row: what stays of them, and the token

What surely stays is known by counting alone: for top_k the halves of octaves from the top that have
as many as wanted; for top_p those whose rest, each taken for the most that its half octave allows,
is no more than what may go. That leaves tens or hundreds of a usual row's 128k. The least weight
that stays is searched among them over the bits of w, which order as w does: a step compares them
with eight thresholds and leaves a ninth of the interval; it ends when the interval holds as many as
wanted. 10 steps at most, 2-4 where weights differ. Sums that decide are float64.

Bytes moved: for each row that cuts, 4 V of logits and 8 V of w, written and read; 12 V are held.
A row that is nearly flat gathers most of V, and its search is then one program's work.
"""

import torch

from kernels.triton_api import Declared, cdiv, jit, next_power_of_2, tl

CUT_SPLIT = 8192
# With 8, Triton 3.6.0 runs out of registers.
WEIGH_WARPS = 16
BINS = 128
CUT_WARPS = 8
TILE = 2048
PIVOTS = 8
# Temperatures under this do as this does, and nothing overflows.
_COLDEST: tl.constexpr = tl.constexpr(1e-33)
BELOW_ONE: tl.constexpr = tl.constexpr(1.0 - 2.0**-53)
# Bits of the float 1, and how many of them a bin leaves out.
_ONE: tl.constexpr = tl.constexpr(0x3F800000)
_BIN_BITS: tl.constexpr = tl.constexpr(22)
_BINS: tl.constexpr = tl.constexpr(BINS)
# What may go is taken to be less by this, so that no rounding lets too much go.
_SURELY: tl.constexpr = tl.constexpr(1.0 - 1e-6)
# Loads under way at once in a thread.
_UNROLL: tl.constexpr = tl.constexpr(4)


@jit
def divisor(temperature: tl.tensor) -> tl.tensor:
    """What logits are divided by: 1 for greedy rows."""
    return tl.where(temperature > 0, tl.maximum(temperature, _COLDEST), 1.0)


@jit
def _bin_of(weight: tl.tensor) -> tl.tensor:
    """Halves of octaves down from 1: 0 the largest, BINS - 2 for all the least, BINS - 1 for 0."""
    bits = weight.to(tl.int32, bitcast=True)
    place = tl.minimum(tl.maximum(-(bits - _ONE) >> _BIN_BITS, 0), _BINS - 2)
    return tl.where(bits > 0, place, _BINS - 1)


@jit
def _weigh_kernel(
    logits: tl.tensor,
    cut: tl.tensor,
    temperature: tl.tensor,
    min_p: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    broken: tl.tensor,
    weights: tl.tensor,
    bins: tl.tensor,
    masses: tl.tensor,
    vocab_size: tl.tensor,
    stride: tl.tensor,
    num_splits: tl.tensor,
    SPLITS: tl.constexpr,
    CUT_SPLIT: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """A split of a row that cuts: its weights, how many are in each bin, their sum."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(cut + place)
    if tl.load(broken + row) == 0:
        split = tl.arange(0, SPLITS)
        there = split < num_splits
        peak = tl.max(tl.load(peaks + row * num_splits + split, mask=there, other=float("-inf")), 0)
        hot = divisor(tl.load(temperature + row))
        sum_exp = tl.load(totals + row)
        floor = tl.load(min_p + row) / sum_exp
        token = tl.program_id(1) * CUT_SPLIT + tl.arange(0, CUT_SPLIT)
        inside = token < vocab_size
        value = tl.load(logits + row * stride + token, mask=inside, other=float("-inf"))
        weight = tl.exp((value - peak) / hot) / sum_exp
        weight = tl.where(weight < floor, 0.0, weight)
        tl.store(weights + place * vocab_size + token, weight, mask=inside)
        at = place * tl.num_programs(1) + tl.program_id(1)
        tl.store(masses + at, tl.sum(weight.to(tl.float64), 0))
        tl.store(bins + at * BINS + tl.arange(0, BINS), tl.histogram(_bin_of(weight), BINS))


@jit
def _gather_kernel(
    cut: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    broken: tl.tensor,
    weights: tl.tensor,
    bins: tl.tensor,
    masses: tl.tensor,
    found: tl.tensor,
    found_ids: tl.tensor,
    num_found: tl.tensor,
    vocab_size: tl.tensor,
    CUT_SPLITS: tl.constexpr,
    CUT_SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """A split of a row that cuts: what may stay, by id, behind that of the splits before it."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(cut + place)
    if tl.load(broken + row) == 0:
        mine, num_splits = tl.program_id(1), tl.num_programs(1)
        split, number = tl.arange(0, CUT_SPLITS), tl.arange(0, BINS)
        at = place * num_splits
        mass = tl.load(masses + at + split, mask=split < num_splits, other=0.0)
        everything = tl.sum(mass, 0)
        total = tl.zeros((BINS,), tl.int32)
        earlier = tl.zeros((BINS,), tl.int32)
        for other in range(0, num_splits):
            count = tl.load(bins + (at + other) * BINS + number)
            total += count
            earlier += tl.where(other < mine, count, 0)
        # top_k: the first bin with which there are enough. top_p: the last one that may not go,
        # because the sum from there on may be more than what may go. A bin's bound is its top.
        limit, share = tl.load(top_k + row), tl.load(top_p + row)
        by_count = tl.sum((tl.cumsum(total, 0) < limit).to(tl.int32), 0)
        top = (-((number << _BIN_BITS) - _ONE)).to(tl.float32, bitcast=True).to(tl.float64)
        top = tl.where(number < BINS - 1, top, 0.0)
        rest = tl.cumsum(total.to(tl.float64) * top, 0, reverse=True)
        by_sum = tl.sum((rest > (1 - share) * everything * _SURELY).to(tl.int32), 0) - 1
        last = tl.where(limit < vocab_size, by_count, tl.where(share < 1, by_sum, BINS))
        last = tl.minimum(last, BINS - 2)
        before = tl.sum(tl.where(number <= last, earlier, 0), 0)
        if mine == 0:
            tl.store(num_found + place, tl.sum(tl.where(number <= last, total, 0), 0))

        own = place * vocab_size
        for start in range(mine * CUT_SPLIT, (mine + 1) * CUT_SPLIT, TILE):
            token = start + tl.arange(0, TILE)
            weight = tl.load(weights + own + token, mask=token < vocab_size, other=0.0)
            stays = _bin_of(weight) <= last
            target = own + before + tl.cumsum(stays.to(tl.int32), 0) - 1
            tl.store(found + target, weight, mask=stays)
            tl.store(found_ids + target, token, mask=stays)
            before += tl.sum(stays.to(tl.int32), 0)


@jit
def _above(
    found: tl.tensor,
    size: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    LANES: tl.constexpr,
    PIVOTS: tl.constexpr,
) -> tl.tensor:
    """Thresholds between low and high (bits of floats); count and sum of what is at or above.

    Each thread counts for itself, and threads are summed once at the end.
    """
    width = (high - low).to(tl.int64)
    pivot = low + ((tl.arange(0, PIVOTS) + 1) * width // (PIVOTS + 1)).to(tl.int32)
    least = pivot.to(tl.float32, bitcast=True)[None, :]
    count = tl.zeros((LANES, PIVOTS), tl.int32)
    total = tl.zeros((LANES, PIVOTS), tl.float64)
    lane = tl.arange(0, LANES)[:, None]
    for start in range(0, size, LANES * _UNROLL):
        for turn in tl.static_range(_UNROLL):
            at = start + turn * LANES + lane
            weight = tl.load(found + at, mask=at < size, other=-1.0)
            over = weight >= least
            count += over.to(tl.int32)
            total += tl.where(over, weight.to(tl.float64), 0.0)
    return pivot, tl.sum(count, 0), tl.sum(total, 0)


@jit
def _cut_kernel(
    cut: tl.tensor,
    number: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    broken: tl.tensor,
    masses: tl.tensor,
    found: tl.tensor,
    found_ids: tl.tensor,
    num_found: tl.tensor,
    tokens: tl.tensor,
    vocab_size: tl.tensor,
    num_splits: tl.tensor,
    CUT_SPLITS: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
) -> None:
    """A row that cuts: the least weight that stays, and the token, of what was found."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(cut + place)
    found += place * vocab_size
    if tl.load(broken + row) == 0:
        size = tl.load(num_found + place)
        lane = tl.arange(0, LANES)
        largest_of = tl.zeros((LANES,), tl.float32)
        smallest_of = tl.full((LANES,), 2.0, tl.float32)
        sum_of = tl.zeros((LANES,), tl.float64)
        for start in range(0, size, LANES):
            there = start + lane < size
            weight = tl.load(found + start + lane, mask=there, other=0.0)
            largest_of = tl.maximum(largest_of, weight)
            smallest_of = tl.minimum(smallest_of, tl.where(there, weight, 2.0))
            sum_of += weight.to(tl.float64)
        most_bits = tl.max(largest_of, 0).to(tl.int32, bitcast=True) + 1

        # top_k: count(>= low) >= limit > count(>= high)
        limit = tl.load(top_k + row)
        low, high = tl.min(smallest_of, 0).to(tl.int32, bitcast=True), most_bits
        count_low, sum_low = size, tl.sum(sum_of, 0)
        count_high, sum_high = tl.zeros((), tl.int32), tl.zeros((), tl.float64)
        split = tl.arange(0, CUT_SPLITS)
        mass = tl.load(masses + place * num_splits + split, mask=split < num_splits, other=0.0)
        whole = tl.sum(mass, 0)
        if limit < vocab_size:
            limit = tl.minimum(limit, size)
            while (high - low > 1) & (count_low != limit):
                pivot, count, total = _above(found, size, low, high, LANES, PIVOTS)
                enough = count >= limit
                low = tl.maximum(low, tl.max(tl.where(enough, pivot, 0), 0))
                high = tl.minimum(high, tl.min(tl.where(enough, 2147483647, pivot), 0))
                # Sums fall as thresholds rise: the least that is enough, the most that is not.
                count_low = tl.minimum(count_low, tl.min(tl.where(enough, count, 2147483647), 0))
                count_high = tl.maximum(count_high, tl.max(tl.where(enough, 0, count), 0))
                sum_low = tl.minimum(sum_low, tl.min(tl.where(enough, total, float("inf")), 0))
                sum_high = tl.maximum(sum_high, tl.max(tl.where(enough, 0.0, total), 0))
            if count_low > limit:
                # All of [low, high) are one value; some of the equals go.
                least = low.to(tl.float32, bitcast=True).to(tl.float64)
                sum_low = sum_high + (limit - count_high).to(tl.float64) * least
                count_low = limit
            whole = sum_low

        # top_p: sum(>= low) >= wanted > sum(>= high), within what top_k left
        share = tl.load(top_p + row)
        room = count_low - count_high
        if share < 1:
            wanted = tl.maximum(share * whole, 1e-300)
            high = most_bits
            count_high, sum_high = tl.zeros((), tl.int32), tl.zeros((), tl.float64)
            while (high - low > 1) & (count_low - count_high > 1):
                pivot, count, total = _above(found, size, low, high, LANES, PIVOTS)
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
        target = tl.minimum(tl.load(number + row), BELOW_ONE) * sum_low
        running, seen = tl.zeros((), tl.float64), tl.zeros((), tl.int32)
        chosen, final = tl.full((), -1, tl.int32), tl.zeros((), tl.int32)
        start = tl.zeros((), tl.int32)
        while (chosen < 0) & (start < size):
            at = start + tl.arange(0, TILE)
            weight = tl.load(found + at, mask=at < size, other=0.0)
            equal = ((weight >= least) & (weight < most)).to(tl.int32)
            rank = seen + tl.cumsum(equal, 0)
            seen += tl.sum(equal, 0)
            kept = (weight >= most) | ((equal > 0) & (rank <= room))
            weight = tl.where(kept, weight, 0.0)
            inner = running + tl.cumsum(weight.to(tl.float64), 0)
            running = tl.max(inner, 0)
            # Rounding may leave the last sum short of the target: then the last that stayed.
            final = tl.maximum(final, tl.max(tl.where(weight > 0, at, 0), 0))
            if running > target:
                chosen = start + tl.sum((inner <= target).to(tl.int32), 0)
            start += TILE
        chosen = tl.where(chosen < 0, final, chosen)
        tl.store(tokens + row, tl.load(found_ids + place * vocab_size + chosen).to(tl.int64))


def cut_tail(
    logits: torch.Tensor,
    cut: torch.Tensor,
    temperature: torch.Tensor,
    number: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    peaks: torch.Tensor,
    totals: torch.Tensor,
    broken: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """Put the tokens of the rows of `cut` into `tokens`, which has one for each row of logits.

    logits to top_p as in kernels/sampling.py; peaks float32 [R, splits], the largest logits of
    parts of a row; totals float32 [R], the sum of exp((l - max l) / temperature); broken int8 [R],
    1: left alone.
    """
    rows, vocab_size, device = len(cut), logits.shape[1], logits.device
    num_splits = cdiv(vocab_size, CUT_SPLIT)
    weights = torch.empty(rows, vocab_size, dtype=torch.float32, device=device)
    found = torch.empty_like(weights)
    ids = torch.empty(rows, vocab_size, dtype=torch.int32, device=device)
    bins = torch.empty(rows, num_splits, BINS, dtype=torch.int32, device=device)
    masses = torch.empty(rows, num_splits, dtype=torch.float64, device=device)
    num_found = torch.empty(rows, dtype=torch.int32, device=device)
    inputs = (logits, cut, temperature, min_p, peaks, totals, broken)
    sizes = (vocab_size, logits.stride(0), peaks.shape[1])
    parts = {"CUT_SPLIT": CUT_SPLIT, "BINS": BINS}
    _weigh_kernel[(rows, num_splits)](
        *inputs,
        weights,
        bins,
        masses,
        *sizes,
        SPLITS=next_power_of_2(peaks.shape[1]),
        num_warps=WEIGH_WARPS,
        **parts,
    )
    splits = next_power_of_2(num_splits)
    limits, results = (top_k, top_p, broken), (found, ids, num_found)
    _gather_kernel[(rows, num_splits)](
        cut,
        *limits,
        weights,
        bins,
        masses,
        *results,
        vocab_size,
        CUT_SPLITS=splits,
        TILE=TILE,
        num_warps=8,
        **parts,
    )
    _cut_kernel[(rows,)](
        cut,
        number,
        *limits,
        masses,
        *results,
        tokens,
        vocab_size,
        num_splits,
        CUT_SPLITS=splits,
        LANES=32 * CUT_WARPS,
        TILE=TILE,
        PIVOTS=PIVOTS,
        num_warps=CUT_WARPS,
    )


_TYPES = dict.fromkeys(
    ("logits", "temperature", "min_p", "peaks", "sums", "totals", "weights", "found"), "*fp32:16"
)
_TYPES |= dict.fromkeys(("number", "top_p", "masses"), "*fp64:16")
_TYPES |= dict.fromkeys(("places", "top_k", "bins", "found_ids", "num_found"), "*i32:16")
_TYPES |= {"tokens": "*i64:16", "cut": "*i64:16", "broken": "*i8:16"}
_TYPES |= {"vocab_size": "i32:16", "stride": "i32:16", "num_splits": "i32"}


def declared(
    name: str, kernel: object, arguments: str, num_warps: int, **constants: int
) -> Declared:
    """Of a sampling kernel, by its arguments' names."""
    types = {argument: _TYPES[argument] for argument in arguments.split()}
    return Declared(f"sampling/{name}", kernel, types, constants, num_warps=num_warps)


DECLARED = (
    declared(
        "weigh",
        _weigh_kernel,
        "logits cut temperature min_p peaks totals broken weights bins masses vocab_size stride "
        "num_splits",
        WEIGH_WARPS,
        SPLITS=64,
        CUT_SPLIT=CUT_SPLIT,
        BINS=BINS,
    ),
    declared(
        "gather",
        _gather_kernel,
        "cut top_k top_p broken weights bins masses found found_ids num_found vocab_size",
        8,
        CUT_SPLITS=32,
        CUT_SPLIT=CUT_SPLIT,
        TILE=TILE,
        BINS=BINS,
    ),
    declared(
        "cut",
        _cut_kernel,
        "cut number top_k top_p broken masses found found_ids num_found tokens vocab_size "
        "num_splits",
        CUT_WARPS,
        CUT_SPLITS=32,
        LANES=32 * CUT_WARPS,
        TILE=TILE,
        PIVOTS=PIVOTS,
    ),
)
