"""The judge of the semantic cache, on streams small enough to see through."""

import numpy as np
import pytest

from bench.cache import measure_fresh, measure_pairs, precisions, taught, wilson
from bench.cache_data import Pair, Stream, Vectors, fresh, streamed, traps
from bench.cache_fit import fit
from bench.cache_pairs import intent_pairs, made_pairs, reworded_pairs
from bench.cache_stream import by_rule, by_threshold
from bench.cache_train import SIGNS, signed
from gateway.cache.policy.cache_choice import NAMES
from gateway.cache.policy.cache_confidence import Calibration
from gateway.cache.question_score import FIGURES, QuestionReading
from tests.gateway.cache.reading_kit import reading_of

BUDGET = 0.02
TEXTS = (
    "can you tell me how do i pay the bill with my card",
    "is it safe to send 3 parcels to london before friday",
    "i want to open a new account for my daughter in texas",
)


def made(num_answers: int = 8, each: int = 80, *, seed: int = 3, spread: float = 0.35) -> Stream:
    """Questions about a point for each answer; those of one answer have a word in common."""
    rng = np.random.default_rng(seed)
    middle = np.eye(num_answers, 32, dtype=np.float32)
    answers = np.repeat(np.arange(num_answers), each)
    vectors = middle[answers] + spread * rng.standard_normal((len(answers), 32)) / 32**0.5
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    texts = tuple(
        f"word{chr(97 + answer)} own{'x' * (i % each)}" for i, answer in enumerate(answers.tolist())
    )
    readings = [reading_of(text) for text in texts]
    return streamed("made", texts, answers.astype(np.int64), vectors, readings)


def test_the_rule_learns_what_it_may_answer() -> None:
    served = by_rule(made(), 0, BUDGET)
    assert served.true_hit_rate > 0.3
    assert served.false_share <= BUDGET
    assert served.num_audits > 0
    assert served.num_first_right <= served.num_right


def test_without_sense_in_the_vectors_it_is_soon_found_out() -> None:
    stream = made()
    shuffled = np.random.default_rng(1).permutation(stream.answers)
    noise = streamed("noise", stream.texts, shuffled, stream.vectors, stream.readings)
    served = by_rule(noise, 0, BUDGET)
    assert served.num_right + served.num_wrong <= 0.005 * served.num_requests


def test_threshold() -> None:
    served = by_threshold(made(spread=0.0), 0, 0.99)
    assert (served.num_right, served.num_wrong) == (8 * 79, 0)
    assert by_threshold(made(), 0, -1.0).num_right + by_threshold(made(), 0, -1.0).num_wrong == 639


def test_precisions() -> None:
    scores = np.array([0.9, 0.8, 0.7, 0.6, 0.1])
    same = np.array([True, False, True, True, True])
    assert precisions(scores, same, (0.25, 0.5, 1.0)).tolist() == pytest.approx([1, 2 / 3, 4 / 5])


def test_intervals_hold_the_share_and_narrow() -> None:
    assert wilson(0, 0) == [0.0, 1.0]
    low, high = wilson(0, 240)
    assert low == 0.0
    assert 0.01 < high < 0.02
    assert wilson(30, 100)[0] < 0.3 < wilson(30, 100)[1]


def test_fit_finds_that_nearness_counts() -> None:
    weights = fit([made(num_answers=4, each=25, spread=1.2)], [1])
    assert len(weights.values) == len(NAMES)
    assert sum(weights.values) > 0


class ByWords:
    """An embedder whose vectors are the means of the words' states."""

    def read(self, texts: list[str]) -> list[tuple[Vectors, QuestionReading]]:
        """Of length 1."""
        readings = [reading_of(text) for text in texts]
        means = [reading.states.astype(np.float32).mean(0) for reading in readings]
        vectors = [mean / np.linalg.norm(mean) for mean in means]
        return list(zip(vectors, readings, strict=True))


EMBEDDER = ByWords()


def test_hits_are_right_only_on_the_paraphrases_own_entry() -> None:
    found = [
        Pair("Is it open on day 5?", "Is it open on day 6?", False, "number"),
        Pair("Where is the station?", "where is the station", True, "plain"),
        Pair("Who are you?", "How far is the moon from here?", True, "plain"),
        Pair("How old is the king?", "where is THE station?", True, "plain"),
    ]
    alone = measure_fresh(found, EMBEDDER, Calibration(), BUDGET, apart=True)  # type: ignore[arg-type]
    assert alone["nothing learnt"]["wrong"] == 0
    report = measure_fresh(found, EMBEDDER, Calibration(), BUDGET)  # type: ignore[arg-type]
    told = report["nothing learnt"]
    assert (told["asked"], told["paraphrases"]) == (4, 3)
    assert told["right_by_kind"] == {"paraphrases: plain": 1}
    assert told["wrong_by_kind"] == {"paraphrases: plain": 1}


def test_pairs_are_told_with_their_intervals() -> None:
    found = [Pair(f"what is x{i}", f"what is x{i}", True) for i in range(20)]
    found += [Pair(f"what is y{i}", f"who was z{i}", False) for i in range(20)]
    report = measure_pairs(found, EMBEDDER)  # type: ignore[arg-type]
    assert report["score"]["0.4"] == [1.0, 1.0, 1.0]
    assert report["score less cosine"]["0.4"] == [0.0, 0.0, 0.0]


def test_what_streams_teach() -> None:
    assert sum(taught([made()]).right) > 300


def test_the_traps_are_of_all_kinds() -> None:
    found = traps()
    kinds = {pair.kind for pair in found if not pair.same}
    assert kinds >= {"number", "date", "negation", "name", "order", "quoted", "unit", "language"}
    assert len({(pair.a, pair.b) for pair in found}) == len(found)


def test_the_fresh_pairs_are_eleven_styles_of_each_and_none_of_the_traps() -> None:
    found = fresh()
    for same in (False, True):
        of_these = [pair for pair in found if pair.same == same]
        assert (len({pair.kind for pair in of_these}), len(of_these)) == (11, 121)
    assert len({text for pair in found for text in (pair.a, pair.b)}) == 2 * len(found)
    assert {(pair.a, pair.b) for pair in found}.isdisjoint((pair.a, pair.b) for pair in traps())


def test_made_pairs_are_of_all_kinds_and_the_same_by_the_same_seed() -> None:
    found = made_pairs(TEXTS * 40, 5, 10)
    assert found == made_pairs(TEXTS * 40, 5, 10)
    assert found != made_pairs(TEXTS * 40, 6, 10)
    kinds = {pair.kind: pair.same for pair in found}
    assert {kind for kind, same in kinds.items() if same} >= {"polite", "mistyped", "cased"}
    assert {kind for kind, same in kinds.items() if not same} >= {"number", "name", "negation"}
    assert all(pair.a != pair.b for pair in found)


def test_pairs_of_intents_and_rewordings() -> None:
    source = made(num_answers=3, each=5)
    found = intent_pairs(source, 1, 10)
    assert [pair.kind for pair in found[:3]] == ["intent", "other", "far"]
    assert all(pair.same for pair in found if pair.kind == "intent")
    assert not any(pair.same for pair in found if pair.kind == "other")
    given = [Pair(f"a {i} b", f"b {i} a", True) for i in range(6)]
    assert [pair.same for pair in reworded_pairs(given, 1)] == [True, False] * 6


def test_a_figure_that_counts_the_wrong_way_is_left_out() -> None:
    rng = np.random.default_rng(2)
    x = rng.random((400, len(FIGURES)))
    y = (x[:, 0] + x[:, 3] > 1).astype(float)  # other order speaks for the same answer
    weights, _ = signed(x, y)
    assert weights[0] > 0
    assert weights[3] == 0.0
    assert (weights * SIGNS >= 0).all()
