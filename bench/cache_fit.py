"""`python -m bench.cache_fit DATA MINILM`: fit the weights of `gateway/policy/cache_weights.py`.

The open streams (banking77, clinc150) run in shadow, where every request is compared: whole, and
their first YOUNG requests in many orders, as a cache meets them that holds little yet. The features
of each verdict and whether its answer was right are fitted by logistic regression (Newton, a small
ridge). Prints the lines to put into the file. `--only NAME` fits on one stream, which is how
`bench.cache` shows that weights fitted on one serve the other. Nothing else is fitted on: not QQP,
not the medical pairs, not the traps.
"""

import argparse
from collections.abc import Iterable
from itertools import combinations, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.cache_data import Embedder, Stream, stream
from bench.cache_stream import steps
from gateway.policy.cache_choice import Candidate, choose
from gateway.policy.cache_confidence import Calibration, Confidence
from gateway.policy.cache_score import SAME_CONTENT
from gateway.policy.cache_weights import NAMES, Weights

OPEN = ("banking77", "clinc150")
RIDGE = 1.0
FIRST_SEED = 100
"""Orders to fit on; `bench.cache` measures others."""
YOUNG = 250
NUM_YOUNG = 20
NEAR = 0.8
"""Pairs of the same content are fitted from this cosine up: farther ones bend the line, and none of
them is ever answered before there are comparisons."""


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


def fit(streams: Iterable[Stream], seeds: Iterable[int]) -> Weights:
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


def fitted(x: NDArray[np.float64], y: NDArray[np.float64]) -> Weights:
    """Weights and bias of the log-odds."""
    mean, spread = x.mean(0), x.std(0) + 1e-9
    z = np.c_[(x - mean) / spread, np.ones(len(x))]
    weights = np.zeros(z.shape[1])
    ridge = np.diag([RIDGE] * (z.shape[1] - 1) + [1e-3])
    for _ in range(50):
        p = 1 / (1 + np.exp(-z @ weights))
        slope = z.T @ (p - y) + ridge @ weights
        curve = (z * (p * (1 - p))[:, None]).T @ z + ridge
        step = np.linalg.solve(curve, slope)
        weights -= step
        if np.abs(step).max() < 1e-8:
            break
    raw = weights[:-1] / spread
    values = tuple(round(float(weight), 3) for weight in raw)
    return Weights(values, round(float(weights[-1] - raw @ mean), 3))


def fit_same_content(streams: Iterable[Stream]) -> tuple[float, float]:
    """Slope and bias from score to log-odds, over all pairs of questions of the same content that
    the guards let pass, each for itself."""
    xs, ys = [], []
    for source in streams:
        alike: dict[tuple[frozenset[str], ...], list[int]] = {}
        for i, reading in enumerate(source.readings):
            alike.setdefault((reading.stems, reading.light), []).append(i)
        for i, j in (pair for found in alike.values() for pair in combinations(found, 2)):
            if source.similar[i, j] < NEAR:
                continue
            kept = Candidate(
                "kept",
                source.texts[i],
                float(source.similar[i, j]),
                Confidence(),
                source.readings[i],
            )
            asked = source.readings[j]
            verdict = choose(asked.text, [kept], Calibration(), 0.0, 1.0, reading=asked)
            if verdict.leads and verdict.kind == SAME_CONTENT:
                xs.append((verdict.score,))
                ys.append(float(source.answers[i] == source.answers[j]))
    weights = fitted(np.array(xs), np.array(ys))
    return weights.values[0], weights.bias


def main() -> None:
    """Fit and print. The second line's figures hold for the first one's, once they are in place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("minilm", type=Path)
    parser.add_argument("--kept", type=Path, default=Path("data/cache-vectors.npz"))
    parser.add_argument("--only", choices=OPEN)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    embedder = Embedder(args.minilm, args.kept)
    names = OPEN if args.only is None else (args.only,)
    streams = [stream(args.data / "pairs" / f"{name}.jsonl.gz", embedder) for name in names]
    found = fit(streams, range(FIRST_SEED, FIRST_SEED + args.seeds))
    print(f"NAMES = {NAMES}")
    print(f"FITTED = {found}")
    print(f"PRIORS[1] = {fit_same_content(streams)}")


if __name__ == "__main__":
    main()
