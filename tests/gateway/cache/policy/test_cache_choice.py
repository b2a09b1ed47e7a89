"""May the nearest answer be given; the figures of its score."""

from dataclasses import replace

import pytest

from gateway.cache.policy.cache_choice import (
    ALIKE,
    AUDITED_SHARE,
    CANDIDATES,
    COMPARED_AT_MOST,
    FARTHEST,
    FITTED,
    LEAST_SIMILARITY,
    LONE,
    NAMES,
    SURE,
    SURE_PAIR,
    KeptCandidate,
    Verdict,
    choose,
    compared,
    features_of,
)
from gateway.cache.policy.cache_confidence import CLASSES, Calibration, Confidence, recorded
from tests.gateway.cache.reading_kit import candidate

NEAR = candidate()
SURELY = candidate(log_odds=SURE_PAIR)


def earned() -> Calibration:
    """All scores of all classes shown to be right."""
    calibration = Calibration()
    for kind in range(len(CLASSES)):
        for score in range(-4, 8):
            for _ in range(300):
                calibration = recorded(calibration, kind, score + 0.1, True)
    return calibration


def ask(
    *neighbours: KeptCandidate,
    calibration: Calibration | None = None,
    draw: float = 1.0,
    may_start: bool = True,
) -> Verdict:
    """The verdict on a question without numbers."""
    learnt = earned() if calibration is None else calibration
    return choose((), neighbours, learnt, 0.01, draw, may_start=may_start)


def test_nothing_near() -> None:
    assert ask() == Verdict(why="nothing near")
    far = candidate(similarity=LEAST_SIMILARITY - 0.01)
    assert ask(far).why == "nothing near"


def test_a_hit_must_be_earned_where_the_pair_does_not_say_enough() -> None:
    assert ask(NEAR).hit == 0
    verdict = ask(NEAR, calibration=Calibration())
    assert (verdict.hit, verdict.why, verdict.compare) == (None, "unsure", (0,))
    assert verdict.kind == LONE


def test_the_same_words_need_no_proof() -> None:
    same = candidate(similarity=0.99, is_same=True)
    for may_start in (False, True):
        assert ask(same, calibration=Calibration(), may_start=may_start).why == "same words"


def test_a_sure_pair_is_a_hit_from_the_start() -> None:
    """And no longer one where the tenant's comparisons say that it is wrong."""
    learnt = Calibration()
    verdict = ask(SURELY, calibration=learnt)
    assert (verdict.hit, verdict.why, verdict.kind) == (0, "within budget", SURE)
    assert ask(candidate(log_odds=SURE_PAIR - 0.01), calibration=learnt).why == "unsure"
    verdict = ask(SURELY, calibration=learnt, draw=0.0)
    assert verdict.shadow
    learnt = compared("new", verdict, [SURELY], [False], learnt).calibration
    assert ask(SURELY, calibration=learnt).why == "unsure"


def test_with_another_embedder_nothing_is_answered_before_it_was_compared() -> None:
    assert ask(SURELY, calibration=Calibration(), may_start=False).why == "unsure"
    assert ask(SURELY, may_start=False).hit == 0


def test_a_sure_pair_leads_before_a_nearer_one() -> None:
    nearer = candidate("e0", 0.95, SURE_PAIR - 1)
    verdict = ask(nearer, SURELY, calibration=Calibration())
    assert verdict.compare[0] == 1
    assert ask(nearer, NEAR, calibration=Calibration()).compare[0] == 0


def test_other_numbers_never_pass_whatever_was_learnt() -> None:
    other = candidate(similarity=0.999, log_odds=9.0, numbers=("5",))
    verdict = ask(other)
    assert (verdict.hit, verdict.why, verdict.leads) == (None, "other numbers", False)
    outcome = compared("new", verdict, [other], [True], earned())
    assert outcome.new == Confidence("e1")
    assert (outcome.learned, outcome.calibration) == ((), earned())


def test_a_group_shows_that_numbers_do_not_matter() -> None:
    """Two questions with other numbers had one answer: a third number is no obstacle, but is not
    answered before it was compared."""
    group = [
        candidate(f"e{i}", 0.9, 2.0, Confidence("e0" if i else ""), numbers=(number,))
        for i, number in enumerate("57")
    ]
    assert choose(("9",), group, earned(), 0.01, 1.0).hit == 0
    assert choose(("9",), group, Calibration(), 0.01, 1.0).why == "unsure"
    assert choose(("9",), group[:1], earned(), 0.01, 1.0).why == "other numbers"
    apart = [replace(group[0], confidence=Confidence("x")), group[1]]
    assert choose(("9",), apart, earned(), 0.01, 1.0).hit is None


def test_what_differs_is_passed_over() -> None:
    other = candidate("e0", 0.91, numbers=("2",))
    assert ask(other, candidate(covers=(1.0, 1.0))).hit == 1


def test_a_share_is_withheld_and_compared() -> None:
    verdict = ask(NEAR, draw=AUDITED_SHARE / 2)
    assert (verdict.hit, verdict.shadow, verdict.why) == (None, True, "audit")
    assert verdict.compare == (0,)


def test_no_budget_no_hit() -> None:
    assert choose((), [NEAR], earned(), 0.0, 1.0).hit is None


def test_answers_alike_vote_together() -> None:
    def verdict(*groups: str) -> Verdict:
        return ask(
            *(
                candidate(f"e{i}", 0.9 - i / 100, record=Confidence(group))
                for i, group in enumerate(groups)
            )
        )

    alike = verdict(*["g"] * CANDIDATES)
    mixed = verdict("g", "h", "h", "h", "h", "h", "h", "h")
    lone = verdict("g")
    assert min(alike.score, lone.score) > mixed.score
    assert (alike.kind, mixed.kind) == (ALIKE, LONE)
    assert mixed.compare == (0, 1)
    assert alike.compare == (0,)


def test_a_record_counts() -> None:
    good, bad = (
        replace(NEAR, confidence=record) for record in (Confidence("", 5, 0), Confidence("", 0, 5))
    )
    assert ask(good).score > ask(NEAR).score > ask(bad).score


def test_few_are_compared() -> None:
    many = [replace(NEAR, entry_id=f"e{i}") for i in range(CANDIDATES)]
    assert len(ask(*many).compare) == COMPARED_AT_MOST


def test_answers_that_agree_with_one_are_one_group() -> None:
    """Two groups were apart only because nobody had compared them."""
    groups = ("g", "h", "h", "i")
    near = [
        replace(
            NEAR, entry_id=f"e{i}", similarity=0.9 - i / 100, confidence=Confidence(group, 1, i)
        )
        for i, group in enumerate(groups)
    ]
    verdict = ask(*near, calibration=Calibration())
    assert verdict.compare == (0, 1, 3)
    outcome = compared("new", verdict, near, (True, True, False), Calibration())
    assert outcome.new == Confidence("g")
    assert dict(outcome.learned) == {
        "e0": Confidence("g", 2, 0),
        "e1": Confidence("g", 1, 1),
        "e2": Confidence("g", 1, 2),
    }


@pytest.mark.parametrize(
    ("agreed", "group"), [((True, False), "e1"), ((False, True), "g2"), ((False, False), "")]
)
def test_a_new_entry_joins_those_that_agree(agreed: tuple[bool, ...], group: str) -> None:
    second = replace(NEAR, entry_id="e2", similarity=0.8, confidence=Confidence("g2", 1, 0))
    neighbours = (NEAR, second)
    verdict = ask(*neighbours, calibration=Calibration())
    outcome = compared("new", verdict, neighbours, agreed, Calibration())
    assert outcome.new == Confidence(group)
    ((entry_id, record),) = outcome.learned
    assert entry_id == "e1"
    assert (record.agreed, record.disagreed) == (float(agreed[0]), float(not agreed[0]))
    assert sum(outcome.calibration.right) == agreed[0]
    assert sum(outcome.calibration.wrong) == (not agreed[0])


def test_nothing_compared_nothing_learnt() -> None:
    outcome = compared("new", Verdict(), (), (), Calibration())
    assert (outcome.new, outcome.learned, outcome.calibration) == (Confidence(), (), Calibration())


def test_one_answer_to_several_is_not_one_to_the_next_before_it_was_compared() -> None:
    """Its question must look sure, too."""
    group = [candidate(f"e{i}", 0.99, 0.5, Confidence("e0", 3.0)) for i in range(2)]
    assert ask(*group, calibration=Calibration()).why == "unsure"
    assert ask(*group).hit == 0
    assert ask(*group).kind == ALIKE


def figures(*neighbours: KeptCandidate, passing: int | None = None) -> dict[str, float]:
    """By name; the first that passes leads."""
    passed = neighbours if passing is None else (neighbours[passing],)
    return dict(zip(NAMES, features_of(neighbours, passed, passed[0]), strict=True))


def grouped(group: str, similarity: float, **more: object) -> KeptCandidate:
    """A neighbour of this group."""
    record = Confidence(group, 1, 0)
    return candidate(f"e{similarity}", similarity, record=record, **more)  # type: ignore[arg-type]


def test_each_figure_has_a_weight() -> None:
    assert len(figures(grouped("g", 0.9))) == len(NAMES) == len(FITTED.values)
    assert len(CLASSES) == len({ALIKE, LONE, SURE})


def test_a_lone_one() -> None:
    found = figures(grouped("g", 0.9))
    assert found["lone"] == 1.0
    assert found["second"] == FARTHEST
    assert found["margin"] == pytest.approx(0.9 - FARTHEST)
    assert (found["votes"], found["elsewhere"]) == (1.0, 0.0)
    assert found["lone near"] == pytest.approx(0.15)


def test_a_group_and_others() -> None:
    found = figures(
        grouped("g", 0.9, covers=(1.0, 0.2), log_odds=0.5),
        grouped("g", 0.85, covers=(0.3, 0.8), log_odds=1.5),
        grouped("h", 0.8, covers=(0.9, 0.1)),
        grouped("g", 0.7, covers=(0.0, 0.0)),
    )
    assert (found["lone"], found["second"]) == (0.0, 0.85)
    assert found["margin"] == pytest.approx(0.1)
    assert (found["alike"], found["run"]) == (3 / 8, 2 / 8)
    assert (found["pair"], found["best pair"]) == (0.5, 1.5)
    assert found["covered"] == pytest.approx(0.9), "between them the group has all words"
    assert found["least covered"] == pytest.approx(0.8)
    assert found["elsewhere"] == pytest.approx(0.5)
    assert 0.8 < found["votes"] < 0.95


def test_those_that_do_not_pass_count_against_and_do_not_second() -> None:
    alone = figures(grouped("g", 0.9))
    found = figures(grouped("h", 0.95), grouped("g", 0.9), grouped("g", 0.8), passing=1)
    assert found["margin"] == pytest.approx(-0.05)
    assert found["votes"] < 0.5 < alone["votes"]
    assert (found["lone"], found["second"], found["alike"]) == (1.0, FARTHEST, 2 / 8)


def test_a_question_without_words_has_figures_too() -> None:
    found = figures(grouped("g", 0.9, covers=()))
    assert (found["covered"], found["least covered"], found["elsewhere"]) == (0.0, 0.0, 0.0)


def test_records_of_the_group_count() -> None:
    good = candidate("e1", 0.9, record=Confidence("g", 9, 0))
    bad = candidate("e2", 0.8, record=Confidence("g", 0, 9))
    assert figures(good)["record"] > figures(good, bad)["record"] > figures(bad)["record"]
