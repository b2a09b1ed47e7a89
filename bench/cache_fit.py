"""`python -m bench.cache_fit DATA MINILM`: fit the weights of
`gateway/cache/policy/cache_choice.py`.

The open streams (banking77, clinc150) run in shadow, where every request is compared: whole, and
their first YOUNG requests in many orders, as a cache meets them that holds little yet. The features
of each verdict and whether its answer was right are fitted by logistic regression (Newton, a small
ridge). Prints the lines to put into the file. `--only NAME` fits on one stream, which is how
`bench.cache` shows that weights fitted on one serve the other. Nothing else is fitted on: not QQP,
not the medical pairs, not the traps.
"""

import argparse
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.cache_data import Embedder, Stream, stream
from bench.cache_stream import steps
from bench.cache_train import OPEN, newton
from gateway.cache.policy.cache_choice import NAMES, ScoreWeights

FIRST_SEED = 100
"""Orders to fit on; `bench.cache` measures others."""
YOUNG = 250
NUM_YOUNG = 20


def examples(
    source: Stream, seed: int, num_requests: int | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Features of each verdict that had a candidate, and whether that was right."""
    xs, ys = [], []
    for step in islice(steps(source, seed, 0.0, shadow=True), num_requests):
        if step.verdict.leads:
            xs.append(step.verdict.features)
            ys.append(float(step.rights[step.verdict.compare[0]]))
    return np.array(xs), np.array(ys)


def fit(streams: Iterable[Stream], seeds: Iterable[int]) -> ScoreWeights:
    """On all of these streams, in the order of each of these seeds."""
    whole = list(seeds)
    young = range(FIRST_SEED + len(whole), FIRST_SEED + len(whole) + NUM_YOUNG)
    found = [
        examples(source, seed, length)
        for source in streams
        for many, length in ((whole, None), (young, YOUNG))
        for seed in many
    ]
    return fitted(np.concatenate([x for x, _ in found]), np.concatenate([y for _, y in found]))


def fitted(x: NDArray[np.float64], y: NDArray[np.float64]) -> ScoreWeights:
    """Weights and bias of the log-odds."""
    raw, bias = newton(x, y)
    return ScoreWeights(tuple(round(float(weight), 3) for weight in raw), round(bias, 3))


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("minilm", type=Path)
    parser.add_argument("--kept", type=Path, default=Path("data/cache-readings.npz"))
    parser.add_argument("--only", choices=OPEN)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    embedder = Embedder(args.minilm, args.kept)
    names = OPEN if args.only is None else (args.only,)
    streams = [stream(args.data / "pairs" / f"{name}.jsonl.gz", embedder) for name in names]
    found = fit(streams, range(FIRST_SEED, FIRST_SEED + args.seeds))
    print(f"NAMES = {NAMES}")
    print(f"FITTED = {found}")


if __name__ == "__main__":
    main()
