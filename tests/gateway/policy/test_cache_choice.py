"""May the nearest answer be given."""

from dataclasses import replace

import pytest

from gateway.policy.cache_choice import (
    AUDITED_SHARE,
    CANDIDATES,
    COMPARED_AT_MOST,
    LEAST_SIMILARITY,
    Candidate,
    Verdict,
    choose,
    compared,
)
from gateway.policy.cache_confidence import CLASSES, Calibration, Confidence, recorded

ASKED = "How do I reset my password?"
NEAR = Candidate("e1", "How can I change my forgotten password?", 0.9, Confidence())


def earned() -> Calibration:
    """All scores of all classes shown to be right."""
    calibration = Calibration()
    for kind in range(len(CLASSES)):
        for score in range(-4, 8):
            for _ in range(300):
                calibration = recorded(calibration, kind, score + 0.1, True)
    return calibration


def ask(
    *neighbours: Candidate, calibration: Calibration | None = None, draw: float = 1.0
) -> Verdict:
    """The verdict on ASKED."""
    learnt = earned() if calibration is None else calibration
    return choose(ASKED, neighbours, learnt, 0.01, draw)


def test_nothing_near() -> None:
    assert ask() == Verdict(why="nothing near")
    far = replace(NEAR, similarity=LEAST_SIMILARITY - 0.01)
    assert ask(far).why == "nothing near"


def test_a_hit_must_be_earned_where_the_score_does_not_say_enough() -> None:
    assert ask(NEAR).hit == 0
    verdict = ask(NEAR, calibration=Calibration())
    assert (verdict.hit, verdict.why, verdict.compare) == (None, "unsure", (0,))


def test_the_same_words_need_no_proof() -> None:
    same = replace(NEAR, question="how do i reset my password please", similarity=0.99)
    assert ask(same, calibration=Calibration()).why == "same words"


def test_the_same_content_asked_otherwise_is_a_hit_from_the_start() -> None:
    """And no longer one where the tenant's comparisons say that it is wrong."""
    other = Candidate("e1", "How can I reset my password?", 0.99, Confidence())
    learnt = Calibration()
    assert ask(other, calibration=learnt).why == "within budget"
    verdict = ask(other, calibration=learnt, draw=0.0)
    assert verdict.shadow
    for _ in range(3):
        learnt = compared("new", verdict, [other], [False], learnt).calibration
    assert ask(other, calibration=learnt).why == "unsure"


def test_a_word_more_is_not_the_same_content() -> None:
    other = Candidate("e1", "How can I reset my email password?", 0.99, Confidence())
    verdict = ask(other, calibration=Calibration())
    assert (verdict.hit, CLASSES[verdict.kind]) == (None, "other words")


def test_guards_hold_whatever_was_learnt() -> None:
    other = replace(NEAR, question="How do I not reset my password?", similarity=0.999)
    verdict = ask(other)
    assert (verdict.hit, verdict.why, verdict.leads) == (None, "differs: negation", False)
    outcome = compared("new", verdict, [other], [True], earned())
    assert outcome.new == Confidence("e1")
    assert (outcome.learned, outcome.calibration) == ((), earned())


def test_a_group_shows_that_a_difference_does_not_matter() -> None:
    """Two questions with other numbers had one answer: a third number is no obstacle. What they
    have in common still is."""
    texts = ("Why was I charged 5 pounds?", "Why was I charged 7 pounds?")
    group = [
        Candidate(f"e{i}", text, 0.9, Confidence("e0" if i else "")) for i, text in enumerate(texts)
    ]
    asked = ("Why was I charged 9 pounds?", "Why was I not charged 9 pounds?")
    assert choose(asked[0], group, earned(), 0.01, 1.0).hit == 0
    assert choose(asked[0], group[:1], earned(), 0.01, 1.0).why == "differs: number"
    assert choose(asked[1], group, earned(), 0.01, 1.0).why == "differs: number"
    apart = [replace(group[0], confidence=Confidence("x")), group[1]]
    assert choose(asked[0], apart, earned(), 0.01, 1.0).hit is None


def test_what_differs_is_passed_over() -> None:
    other = replace(NEAR, entry_id="e0", question="Reset my 2 passwords?", similarity=0.95)
    assert ask(other, NEAR).hit == 1


def test_a_share_is_withheld_and_compared() -> None:
    verdict = ask(NEAR, draw=AUDITED_SHARE / 2)
    assert (verdict.hit, verdict.shadow, verdict.why) == (None, True, "audit")
    assert verdict.compare == (0,)


def test_no_budget_no_hit() -> None:
    assert choose(ASKED, [NEAR], earned(), 0.0, 1.0).hit is None


def test_answers_alike_vote_together() -> None:
    def verdict(*groups: str) -> Verdict:
        return ask(
            *(
                Candidate(f"e{i}", NEAR.question, 0.9 - i / 100, Confidence(group))
                for i, group in enumerate(groups)
            )
        )

    alike = verdict(*["g"] * CANDIDATES)
    mixed = verdict("g", "h", "h", "h", "h", "h", "h", "h")
    lone = verdict("g")
    assert alike.score > lone.score > mixed.score
    assert (alike.kind, mixed.kind) == (0, 2)
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


@pytest.mark.parametrize(
    "texts",
    [
        ("Is 83 a prime number?", "Is 79 a prime number?", "Is 82 a prime number?"),
        (
            "Can I take codeine at night?",
            "Could I take codeine at night?",
            "Can I take warfarin at night?",
        ),
    ],
)
def test_one_answer_to_several_is_not_one_to_the_next_before_it_was_compared(
    texts: tuple[str, str, str],
) -> None:
    """A difference that the group waived, and a word that none of it has."""
    group = [
        Candidate(f"e{i}", text, 0.99, Confidence("e0", 3.0)) for i, text in enumerate(texts[:2])
    ]
    assert choose(texts[2], group, Calibration(), 0.01, 1.0).why == "unsure"
    assert choose(texts[2], group, earned(), 0.01, 1.0).hit == 0
    assert choose(texts[0].lower() + "!", group, Calibration(), 0.01, 1.0).hit == 0
