"""The judge of the semantic cache, on streams small enough to see through."""

import ast
import string
from pathlib import Path

import numpy as np
import pytest

from bench.cache import curve, measure_traps, taught, verdict_of
from bench.cache_data import Pair, Stream, Vectors, streamed, traps
from bench.cache_fit import fit
from bench.cache_stream import by_rule, by_threshold
from gateway.policy.cache_confidence import Calibration
from gateway.policy.cache_weights import NAMES

BUDGET = 0.02


def made(num_answers: int = 8, each: int = 150, *, seed: int = 3, spread: float = 0.35) -> Stream:
    """Questions about a point for each answer; no two have a word in common."""
    rng = np.random.default_rng(seed)
    middle = np.eye(num_answers, 32, dtype=np.float32)
    answers = np.repeat(np.arange(num_answers), each)
    vectors = middle[answers] + spread * rng.standard_normal((len(answers), 32)) / 32**0.5
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    letters = string.ascii_lowercase
    texts = tuple(
        "".join(letters[i // 26**k % 26] for k in range(3)) + "x" for i in range(len(answers))
    )
    return streamed("made", texts, answers.astype(np.int64), vectors)


def test_the_rule_learns_what_it_may_answer() -> None:
    served = by_rule(made(), 0, BUDGET)
    assert served.true_hit_rate > 0.3
    assert served.false_share <= BUDGET
    assert served.num_audits > 0


def test_without_sense_in_the_vectors_it_is_soon_found_out() -> None:
    stream = made()
    shuffled = np.random.default_rng(1).permutation(stream.answers)
    noise = streamed("noise", stream.texts, shuffled, stream.vectors)
    served = by_rule(noise, 0, BUDGET)
    assert served.num_right + served.num_wrong <= 0.005 * served.num_requests


def test_threshold() -> None:
    served = by_threshold(made(spread=0.0), 0, 0.99)
    assert (served.num_right, served.num_wrong) == (8 * 149, 0)
    assert by_threshold(made(), 0, -1.0).num_right + by_threshold(made(), 0, -1.0).num_wrong == 1199


def test_curve() -> None:
    scores = np.array([0.9, 0.8, 0.7, 0.6, -np.inf])
    found = curve(scores, np.array([True, False, True, True, True]))
    assert found["recall_of_all"] == 0.75
    assert found["precision_at_recall_0.25"] == 1.0
    assert found["precision_at_recall_0.4"] == pytest.approx(0.6667)
    assert found["recall_at_precision_0.95"] == 0.0  # too few to say


def test_fit_finds_that_nearness_counts() -> None:
    weights = fit([made(each=60, spread=1.2)], [1])
    assert len(weights.values) == len(NAMES)
    assert sum(weights.values) > 0


class Fixed:
    """An embedder that finds all texts alike."""

    def embed(self, texts: list[str]) -> Vectors:
        """The same vector for each."""
        return np.tile(np.array([[1.0, 0.0]], np.float32), (len(texts), 1))


def test_traps_are_counted_by_part() -> None:
    found = [
        Pair("Is it open on Monday?", "Is it open on Sunday?", False, "date", False),
        Pair("Is it open on Monday?", "is it open on monday", True, "plain", True),
    ]
    report = measure_traps(found, Fixed(), Calibration(), BUDGET)  # type: ignore[arg-type]
    assert report["rule"]["open"] == {
        "traps": 1, "false_hits": 0, "paraphrases": 0, "true_hits": 0
    }  # fmt: skip
    assert report["rule"]["held"]["true_hits"] == 1
    assert report["rule, taught"]["held"]["true_hits"] == 1
    assert report["threshold 0.95"]["open"]["false_hits"] == 1


def test_what_streams_teach_serves_pairs() -> None:
    learnt = taught([made()])
    assert sum(learnt.right) > 500
    pair = Pair("aaax", "aabx", True)
    assert verdict_of(pair, 0.2, learnt, BUDGET).hit is None


def test_the_traps_are_of_all_kinds() -> None:
    found = traps()
    kinds = {pair.kind for pair in found if not pair.same}
    assert kinds >= {"number", "date", "negation", "name", "order", "quoted", "unit", "language"}
    assert len({(pair.a, pair.b) for pair in found}) == len(found)


def test_gptcache_part_imports_nothing_of_ours() -> None:
    """It runs in another environment: all it needs is its own packages."""
    script = Path(__file__).parents[2] / "bench" / "cache_gptcache.py"
    tree = ast.parse(script.read_text(encoding="utf-8"))
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert "gptcache" in names
    assert not [name for name in names if name.startswith(("bench", "gateway"))]
