"""`python -m bench.cache DATA MINILM`: how right the semantic cache's decision is.

    pairs    QQP and medical pairs (restricted data: measured on, never fitted on): precision at
             recalls, ranked by the cosine alone, and by the score of two questions, each with the
             interval of 1,000 bootstrap samples of the pairs, and so their difference
    fresh    bench/cache_fresh.json: traps and paraphrases in eleven styles that nothing was fitted
             to; all first questions are kept, all second ones asked: right and wrong answers with
             nothing learnt and after the streams, with Wilson's intervals
    traps    the same of bench/cache_traps.jsonl, each pair by itself; SURE_PAIR was chosen by them
    streams  banking77 and clinc150 in shuffled order, the same intent being the same answer: true
             hits and false ones, for the rule from nothing learnt, with weights fitted on the other
             stream, budgets of 1, 2 and 3 % of the hits; true hits of the first thousand requests;
             for plain thresholds, 0.95 and the best that this very stream allows
    us       microseconds of processor time: a pair of questions, the decision about one with eight
             neighbours

DATA is the folder with `pairs/` and `restricted/`; MINILM the one with model.safetensors.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import machine
from bench.cache_data import Embedder, Pair, Stream, fresh, pairs, stream, traps
from bench.cache_fit import FIRST_SEED, fit
from bench.cache_stream import NUM_FIRST, Served, by_rule, by_threshold, steps
from bench.cache_train import OPEN
from gateway.cache.policy.cache_choice import CANDIDATES, KeptCandidate, choose
from gateway.cache.policy.cache_confidence import Calibration, Confidence, merged
from gateway.cache.question_score import view

RECALLS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
THRESHOLDS = tuple(round(0.8 + 0.01 * i, 2) for i in range(20))
BUDGET = 0.01
NUM_SAMPLES = 1000
_Z = 1.96


def precisions(
    scores: NDArray[np.float64], same: NDArray[np.bool_], recalls: Sequence[float] = RECALLS
) -> NDArray[np.float64]:
    """At each recall."""
    right = np.cumsum(same[np.argsort(-scores, kind="stable")])
    at = np.searchsorted(right, np.ceil(np.array(recalls) * same.sum()))
    found: NDArray[np.float64] = right[at] / (at + 1)
    return found


def wilson(num: int, total: int) -> list[float]:
    """The 95 % interval of a share."""
    if not total:
        return [0.0, 1.0]
    share, z = num / total, _Z * _Z / total
    middle = share + z / 2
    half = _Z * math.sqrt(share * (1 - share) / total + z / (4 * total))
    return [round((middle - half) / (1 + z), 4), round((middle + half) / (1 + z), 4)]


def measure_pairs(found: Sequence[Pair], embedder: Embedder) -> dict[str, Any]:
    """Both rankings, and their difference."""
    read = embedder.read([text for pair in found for text in (pair.a, pair.b)])
    likes = np.array(
        [float(one[0] @ two[0]) for one, two in zip(read[::2], read[1::2], strict=True)]
    )
    scores = np.array(
        [
            view(one[1], two[1], like).log_odds
            for one, two, like in zip(read[::2], read[1::2], likes.tolist(), strict=True)
        ]
    )
    same = np.array([pair.same for pair in found])
    rng = np.random.default_rng(0)
    samples = [rng.integers(len(found), size=len(found)) for _ in range(NUM_SAMPLES)]
    drawn = [
        np.array([precisions(values[at], same[at]) for at in samples]) for values in (likes, scores)
    ]
    report: dict[str, Any] = {"pairs": len(found), "same": int(same.sum())}
    cosine, score = precisions(likes, same), precisions(scores, same)
    for name, whole, sampled in (
        ("cosine", cosine, drawn[0]),
        ("score", score, drawn[1]),
        ("score less cosine", score - cosine, drawn[1] - drawn[0]),
    ):
        low, high = np.percentile(sampled, (2.5, 97.5), axis=0)
        report[name] = {
            str(recall): [round(float(value), 3) for value in values]
            for recall, *values in zip(RECALLS, whole, low, high, strict=True)
        }
    return report


def measure_fresh(
    found: Sequence[Pair],
    embedder: Embedder,
    learnt: Calibration,
    budget: float,
    *,
    apart: bool = False,
) -> dict[str, Any]:
    """All first questions are kept, all second ones asked. `apart`: of each pair alone."""
    kept = embedder.read([pair.a for pair in found])
    asked = embedder.read([pair.b for pair in found])
    table = np.array([vector for vector, _ in kept])
    report: dict[str, Any] = {}
    for name, calibration in (("nothing learnt", Calibration()), ("taught", learnt)):
        right: dict[str, int] = {}
        wrong: dict[str, int] = {}
        for i, (pair, (vector, reading)) in enumerate(zip(found, asked, strict=True)):
            likes = (table @ vector).tolist()
            there = [i] if apart else range(len(found))
            near = sorted(there, key=lambda j: -likes[j])[:CANDIDATES]
            views = [view(reading, kept[j][1], likes[j]) for j in near]
            candidates = [
                KeptCandidate(str(j), likes[j], Confidence(), pair_view)
                for j, pair_view in zip(near, views, strict=True)
            ]
            verdict = choose(reading.numbers, candidates, calibration, budget, draw=1.0)
            if verdict.hit is not None:
                is_right = pair.same and near[verdict.hit] == i
                counts = right if is_right else wrong
                kind = f"{'paraphrases' if pair.same else 'traps'}: {pair.kind}"
                counts[kind] = counts.get(kind, 0) + 1
        same = sum(pair.same for pair in found)
        report[name] = {
            "asked": len(found),
            "paraphrases": same,
            "right": sum(right.values()),
            "right_of_paraphrases": wilson(sum(right.values()), same),
            "wrong": sum(wrong.values()),
            "wrong_of_asked": wilson(sum(wrong.values()), len(found)),
            "right_by_kind": right,
            "wrong_by_kind": wrong,
        }
    return report


def summary(runs: Sequence[Served]) -> dict[str, Any]:
    """Means over seeds with their intervals (of the mean, by the seeds), and the worst."""
    report: dict[str, Any] = {"seeds": len(runs)}
    for name, values in (
        ("true_hit_rate", [run.true_hit_rate for run in runs]),
        ("false_of_hits", [run.false_share for run in runs]),
        ("false_of_requests", [run.false_rate for run in runs]),
        ("first_true", [run.num_first_right / NUM_FIRST for run in runs]),
    ):
        half = _Z * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0
        mean = float(np.mean(values))
        report[name] = [round(x, 4) for x in (mean, mean - half, mean + half)]
    report["true_hit_rate_least"] = round(min(run.true_hit_rate for run in runs), 4)
    report["false_of_hits_most"] = round(max(run.false_share for run in runs), 4)
    report["audits"] = round(float(np.mean([run.num_audits for run in runs])), 1)
    return report


def measure_stream(
    source: Stream, other: Stream, seeds: Sequence[int], budget: float
) -> dict[str, Any]:
    """The rule, and thresholds."""
    weights = fit([other], [FIRST_SEED])
    found: dict[str, Any] = {
        "requests": len(source.texts),
        "weights_fitted_on": other.name,
        "rule": summary([by_rule(source, seed, budget, weights) for seed in seeds]),
        **{
            f"rule, budget {wider}": summary(
                [by_rule(source, seed, wider, weights) for seed in seeds]
            )
            for wider in (2 * budget, 3 * budget)
        },
        "threshold 0.95": summary([by_threshold(source, seed, 0.95) for seed in seeds]),
    }
    for threshold in THRESHOLDS:
        runs = summary([by_threshold(source, seed, threshold) for seed in seeds[:2]])
        if runs["false_of_hits"][0] <= budget:
            found["threshold tuned on this stream"] = {"threshold": threshold, **runs}
            break
    return found


def taught(streams: Sequence[Stream]) -> Calibration:
    """What the streams teach, run in shadow."""
    calibration = Calibration()
    for source in streams:
        *_, last = steps(source, FIRST_SEED, 0.0, shadow=True)
        calibration = merged(calibration, last.calibration)
    return calibration


def decision_us(source: Stream) -> dict[str, float]:
    """Processor time of a pair and of a decision, a median of 200."""
    pair_taken, taken = [], []
    calibration = taught([source])
    for i in np.random.default_rng(0).permutation(len(source.texts))[:200].tolist():
        near = np.argsort(-source.similar[i], kind="stable")[1 : CANDIDATES + 1].tolist()
        asked = source.readings[i]
        start = time.process_time()
        kept = [
            KeptCandidate(
                str(j),
                float(source.similar[i, j]),
                Confidence(),
                view(asked, source.readings[j], float(source.similar[i, j])),
            )
            for j in near
        ]
        pair_taken.append((time.process_time() - start) / len(near))
        choose(asked.numbers, kept, calibration, BUDGET, draw=1.0)
        taken.append(time.process_time() - start)
    medians = (float(np.median(pair_taken)) * 1e6, float(np.median(taken)) * 1e6)
    return dict(zip(("pair", "decision"), (round(value, 1) for value in medians), strict=True))


def main() -> None:
    """All parts, as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("minilm", type=Path)
    parser.add_argument("--kept", type=Path, default=Path("data/cache-readings.npz"))
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--budget", type=float, default=BUDGET)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    embedder = Embedder(args.minilm, args.kept)
    report: dict[str, Any] = {"machine": machine.facts(), "budget": args.budget}
    for name in ("qqp_pairs", "mqp_pairs"):
        path = args.data / "restricted" / f"{name}.jsonl.gz"
        if path.exists():
            report[name] = measure_pairs(pairs(path), embedder)
    streams = [stream(args.data / "pairs" / f"{name}.jsonl.gz", embedder) for name in OPEN]
    learnt = taught(streams)
    report["fresh"] = measure_fresh(fresh(), embedder, learnt, args.budget)
    report["traps"] = measure_fresh(traps(), embedder, learnt, args.budget, apart=True)
    report["us"] = decision_us(streams[0])
    put(report, args.output)
    for source, other in zip(streams, reversed(streams), strict=True):
        report[source.name] = measure_stream(source, other, range(args.seeds), args.budget)
        put(report, args.output)


def put(report: dict[str, Any], output: Path | None) -> None:
    """What is known so far."""
    text = json.dumps(report, indent=2)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)


if __name__ == "__main__":
    main()
