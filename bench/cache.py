"""`python -m bench.cache DATA MINILM`: how right the semantic cache's decision is.

    pairs    QQP and medical pairs (restricted data: measured on, never fitted on): precision at
             recalls, ranked by the cosine alone, and by the rule (guards, then the score of a
             single entry without a record)
    streams  banking77 and clinc150 in shuffled order, the same intent being the same answer: true
             hits and false ones, for the rule from nothing learnt, with weights fitted on the other
             stream, budgets of 1, 2 and 3 % of the hits; for plain thresholds, 0.95 and the best
             that this very stream allows; for GPTCache's pipeline, if `--gptcache-python` names a
             Python that has it (bench/cache_gptcache.py)
    traps    bench/cache_traps.jsonl: hits on pairs that must not share an answer, and on
             paraphrases; by the guards alone, and by the rule with nothing learnt and with what it
             learnt from the streams
    us       microseconds of processor time: the guards for a pair of questions, the decision about
             one with eight neighbours

DATA is the folder with `pairs/` and `restricted/`; MINILM the one with model.safetensors.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import machine
from bench.cache_data import Embedder, Pair, Stream, pairs, stream, traps
from bench.cache_fit import FIRST_SEED, OPEN, fit
from bench.cache_stream import Served, by_rule, by_threshold, steps
from gateway.policy.cache_choice import CANDIDATES, Candidate, Verdict, choose
from gateway.policy.cache_confidence import Calibration, Confidence, merged
from gateway.policy.cache_guards import differences

RECALLS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
PRECISIONS = (0.95, 0.97)
THRESHOLDS = tuple(round(0.8 + 0.01 * i, 2) for i in range(20))
BUDGET = 0.01
FEWEST = 50
"""Pairs that a precision must rest on."""


def curve(scores: NDArray[np.float64], same: NDArray[np.bool_]) -> dict[str, Any]:
    """Precision at each recall that the ranking reaches, recall at each precision. -inf is never
    a hit."""
    order = np.argsort(-scores, kind="stable")
    order = order[np.isfinite(scores[order])]
    right = np.cumsum(same[order])
    precision = right / np.arange(1, len(order) + 1)
    recall = right / same.sum()
    found: dict[str, Any] = {"recall_of_all": round(float(recall[-1]), 4)}
    for wanted in RECALLS:
        i = int(np.searchsorted(recall, wanted))
        if i < len(order):
            found[f"precision_at_recall_{wanted}"] = round(float(precision[i]), 4)
    for wanted in PRECISIONS:
        good = np.flatnonzero((precision >= wanted) & (np.arange(len(order)) >= FEWEST))
        found[f"recall_at_precision_{wanted}"] = (
            round(float(recall[good[-1]]), 4) if len(good) else 0.0
        )
    return found


def verdict_of(pair: Pair, similarity: float, calibration: Calibration, budget: float) -> Verdict:
    """The rule's word on the second question, where the first is all that was kept."""
    kept = Candidate("kept", pair.a, similarity, Confidence())
    return choose(pair.b, [kept], calibration, budget, draw=1.0)


def measure_pairs(found: Sequence[Pair], embedder: Embedder) -> dict[str, Any]:
    """Both rankings, and what a cache that has learnt nothing would answer."""
    likes = similarities(found, embedder)
    same = np.array([pair.same for pair in found])
    verdicts = [
        verdict_of(pair, float(like), Calibration(), BUDGET)
        for pair, like in zip(found, likes, strict=True)
    ]
    by_score = np.array([one.score if one.leads else -np.inf for one in verdicts])
    hits = np.array([one.hit is not None for one in verdicts])
    return {
        "pairs": len(found),
        "same": int(same.sum()),
        "cosine": curve(likes, same),
        "rule": curve(by_score, same),
        "hits_with_nothing_learnt": {"right": int(same[hits].sum()), "all": int(hits.sum())},
    }


def similarities(found: Sequence[Pair], embedder: Embedder) -> NDArray[np.float64]:
    """Cosines."""
    vectors = embedder.embed([text for pair in found for text in (pair.a, pair.b)])
    likes: NDArray[np.float64] = np.sum(vectors[0::2].astype(np.float64) * vectors[1::2], axis=1)
    return likes


def summary(runs: Sequence[Served]) -> dict[str, Any]:
    """Means over seeds, and the worst."""
    return {
        "true_hit_rate": round(float(np.mean([run.true_hit_rate for run in runs])), 4),
        "true_hit_rate_least": round(min(run.true_hit_rate for run in runs), 4),
        "false_of_hits": round(float(np.mean([run.false_share for run in runs])), 4),
        "false_of_hits_most": round(max(run.false_share for run in runs), 4),
        "false_of_requests": round(float(np.mean([run.false_rate for run in runs])), 4),
        "audits": round(float(np.mean([run.num_audits for run in runs])), 1),
    }


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
        if runs["false_of_hits"] <= budget:
            found["threshold tuned on this stream"] = {"threshold": threshold, **runs}
            break
    return found


def measure_traps(
    found: Sequence[Pair], embedder: Embedder, calibration: Calibration, budget: float
) -> dict[str, Any]:
    """False hits on traps and true ones on paraphrases, of the rows guards were made by and of
    those held out."""
    likes = similarities(found, embedder)
    hits = {
        "guards alone, any cosine": [not differences(pair.a, pair.b) for pair in found],
        **{
            name: [
                verdict_of(pair, float(like), learnt, budget).hit is not None
                for pair, like in zip(found, likes, strict=True)
            ]
            for name, learnt in (("rule", Calibration()), ("rule, taught", calibration))
        },
        **{f"threshold {at}": (likes >= at).tolist() for at in (0.9, 0.95)},
    }
    report: dict[str, Any] = {}
    for name, is_hit in hits.items():
        parts = {}
        for part in ("open", "held"):
            rows = [
                (pair, hit)
                for pair, hit in zip(found, is_hit, strict=True)
                if pair.held == (part == "held")
            ]
            wrong = [hit for pair, hit in rows if not pair.same]
            right = [hit for pair, hit in rows if pair.same]
            parts[part] = {
                "traps": len(wrong),
                "false_hits": sum(wrong),
                "paraphrases": len(right),
                "true_hits": sum(right),
            }
        report[name] = parts
    return report


def taught(streams: Sequence[Stream]) -> Calibration:
    """What the streams teach, run in shadow."""
    calibration = Calibration()
    for source in streams:
        *_, last = steps(source, FIRST_SEED, 0.0, shadow=True)
        calibration = merged(calibration, last.calibration)
    return calibration


def guard_us(found: Sequence[Pair]) -> float:
    """Processor time a pair, the best of five rounds."""
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        for pair in found:
            differences(pair.a, pair.b)
        best = min(best, time.process_time() - start)
    return round(best / len(found) * 1e6, 1)


def choose_us(source: Stream) -> float:
    """Processor time of a decision, questions not read before, a median of 200."""
    taken = []
    calibration = taught([source])
    for i in np.random.default_rng(0).permutation(len(source.texts))[:200].tolist():
        near = np.argsort(-source.similar[i], kind="stable")[1 : CANDIDATES + 1]
        kept = [
            Candidate(str(j), source.texts[j], float(source.similar[i, j]), Confidence())
            for j in near.tolist()
        ]
        start = time.process_time()
        choose(source.texts[i], kept, calibration, 0.01, draw=1.0)
        taken.append(time.process_time() - start)
    return round(float(np.median(taken)) * 1e6, 1)


def measure_gptcache(python: Path, source: Stream, seeds: Sequence[int], folder: Path) -> Any:
    """In its own process and environment, on the same vectors."""
    folder.mkdir(parents=True, exist_ok=True)
    given = folder / f"gptcache-{source.name}.npz"
    np.savez(given, texts=np.array(source.texts), answers=source.answers, vectors=source.vectors)
    script = Path(__file__).with_name("cache_gptcache.py")
    done = subprocess.run(
        [str(python), str(script), str(given), *map(str, seeds)],
        check=True,
        capture_output=True,
        text=True,
    )
    runs = json.loads(done.stdout.splitlines()[-1])
    return {name: summary([Served(**counts) for counts in found]) for name, found in runs.items()}


def main() -> None:
    """All parts, as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("minilm", type=Path)
    parser.add_argument("--kept", type=Path, default=Path("data/cache-vectors.npz"))
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--budget", type=float, default=BUDGET)
    parser.add_argument("--gptcache-python", type=Path)
    parser.add_argument("--gptcache-seeds", type=int, default=1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    embedder = Embedder(args.minilm, args.kept)
    report: dict[str, Any] = {"machine": machine.facts(), "budget": args.budget}
    for name in ("qqp_pairs", "mqp_pairs"):
        path = args.data / "restricted" / f"{name}.jsonl.gz"
        if path.exists():
            report[name] = measure_pairs(pairs(path), embedder)
    streams = [stream(args.data / "pairs" / f"{name}.jsonl.gz", embedder) for name in OPEN]
    report["traps"] = measure_traps(traps(), embedder, taught(streams), args.budget)
    report["us"] = {"guards": guard_us(traps()), "decision": choose_us(streams[0])}
    for source, other in zip(streams, reversed(streams), strict=True):
        report[source.name] = measure_stream(source, other, range(args.seeds), args.budget)
        put(report, args.output)
    for source in streams if args.gptcache_python is not None else ():
        report[source.name]["gptcache"] = measure_gptcache(
            args.gptcache_python, source, range(args.gptcache_seeds), args.kept.parent
        )
        put(report, args.output)


def put(report: dict[str, Any], output: Path | None) -> None:
    """What is known so far."""
    text = json.dumps(report, indent=2)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)


if __name__ == "__main__":
    main()
