"""`python -m bench.cache_train DATA MINILM`: fit the score of two questions.

Writes `gateway/cache/question_weights.json`: the weights of the figures that
question_score.py compares two questions by. Logistic regression (Newton, a small ridge) on the
pairs of cache_pairs.py; a figure whose weight has a sign that makes no sense (a better match that
speaks against one answer) is left out, the worst first, until none has. Nothing of QQP, the medical
pairs, cache_traps.jsonl or cache_fresh.json is read.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.cache_data import WEIGHTS_SHA256, Embedder, Pair, pairs, stream
from bench.cache_pairs import intent_pairs, made_pairs, reworded_pairs
from gateway.cache import question_score
from gateway.cache.question_score import FIGURES, PROBE, figures_of

OPEN = ("banking77", "clinc150")
SEED = 7
NUM_INTENT = 1000
SIGNS = (1, 1, -1, -1, -1, -1, -1)
"""Of each of FIGURES: which way it must count."""
RIDGE = 1.0


def training_pairs(data: Path, embedder: Embedder, seed: int) -> list[Pair]:
    """Of the open sets alone."""
    found: list[Pair] = []
    texts: list[str] = []
    for number, name in enumerate(OPEN):
        source = stream(data / "pairs" / f"{name}.jsonl.gz", embedder)
        texts += source.texts
        found += intent_pairs(source, seed + number, NUM_INTENT)
    found += made_pairs(texts, seed)
    found += reworded_pairs(pairs(data / "pairs" / "gptcache_mock.jsonl.gz"), seed)
    return found


def figures(found: Sequence[Pair], embedder: Embedder) -> NDArray[np.float64]:
    """A row for each pair."""
    read = embedder.read([text for pair in found for text in (pair.a, pair.b)])
    return np.array(
        [
            figures_of(a, b, float(vector @ other))
            for (vector, a), (other, b) in zip(read[::2], read[1::2], strict=True)
        ]
    )


def newton(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
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
    return raw, float(weights[-1] - raw @ mean)


def signed(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """The same, with weights of the right sign alone; 0 for those left out."""
    chosen = list(range(x.shape[1]))
    while True:
        raw, bias = newton(x[:, chosen], y)
        amiss = [
            (abs(weight) * x[:, at].std(), at)
            for at, weight in zip(chosen, raw, strict=True)
            if weight * SIGNS[at] < 0
        ]
        if not amiss:
            weights = np.zeros(x.shape[1])
            weights[chosen] = raw
            return weights, bias
        chosen.remove(max(amiss)[1])


def main() -> None:
    """Fit, write, and say on how much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("minilm", type=Path)
    parser.add_argument("--kept", type=Path, default=Path("data/cache-readings.npz"))
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    embedder = Embedder(args.minilm, args.kept)
    found = training_pairs(args.data, embedder, args.seed)
    weights, bias = signed(figures(found, embedder), np.array([float(p.same) for p in found]))
    [(vector, _)] = embedder.read([PROBE])
    table = {
        "model": "all-MiniLM-L6-v2",
        "model_sha256": WEIGHTS_SHA256,
        "made_by": f"python -m bench.cache_train DATA MINILM --seed {args.seed}",
        "pairs": len(found),
        "probe": [round(float(value), 4) for value in vector[: question_score.PROBED]],
        "values": {name: round(float(w), 3) for name, w in zip(FIGURES, weights, strict=True)},
        "bias": round(bias, 3),
    }
    text = json.dumps(table, indent=1)
    question_score.WEIGHTS.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
