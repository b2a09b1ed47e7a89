"""Stage 4's memory of how right it was: per entry, and per tenant and model (pure, bounded).

Wherever the model answers a question to which the cache had an answer too, the two are compared:
on every miss with neighbours, and on a share of the hits, which are withheld for it. An entry
remembers its own comparisons and the group of entries whose answers agreed; a `Calibration` counts,
by score, how often the nearest answer was right. From the counts follows which scores may be
answered: those above which the share of wrong answers is within the operator's budget. A score is
log-odds that were fitted elsewhere: what it says counts as a few comparisons of each bin, so that
there is an answer before there is a comparison, and a tenant's own soon outweigh it. Old counts
fade.
"""

import math
from dataclasses import dataclass, replace

NUM_BINS = 40
LOWEST_SCORE = -4.0
BIN_WIDTH = 0.3
CLASSES = ("alike", "lone", "sure")
"""Kinds of evidence, each with counts of its own, each of which must keep the budget: several near
entries with one answer; one entry; one entry whose question by itself looks sure."""
PRIOR = 4.0
"""How many comparisons of each bin the score itself is worth."""
DOUBT = 0.5
"""Standard deviations that are added to the share of wrong answers: the lowest score that looks
safe is the luckiest one, too."""
_SURE_WRONG = 0.005
_BY_SCORE = tuple(
    1 / (1 + math.exp(LOWEST_SCORE + (at + 0.5) * BIN_WIDTH)) for at in range(NUM_BINS)
)
_WRONG = (_BY_SCORE, _BY_SCORE, (_SURE_WRONG,) * NUM_BINS)
"""By class and bin, the share of wrong answers that is believed before there are comparisons."""
_UNSEEN = 1e-3
FEWEST_IN_BIN = 4.0
"""Comparisons that a score must have seen itself before the merits of better ones reach it."""
MEMORY = 4096.0
"""Comparisons that a calibration holds; at more, all counts are halved."""
ENTRY_MEMORY = 64.0
NEVER = 1e9
"""A score that none has: nothing may be answered yet."""


@dataclass(frozen=True, slots=True)
class Confidence:
    """An entry's record. `group`: the id of the first entry of those whose answers agreed, empty
    for an entry that is its own. Counts of comparisons made with this entry's answer."""

    group: str = ""
    agreed: float = 0.0
    disagreed: float = 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """Comparisons of a tenant and model: `right` and `wrong` have a count for each class and bin of
    scores, or none at all before the first."""

    right: tuple[float, ...] = ()
    wrong: tuple[float, ...] = ()
    seen: tuple[float, ...] = ()


def learned(confidence: Confidence, agreed: bool) -> Confidence:
    """The record after one more comparison."""
    right, wrong = confidence.agreed + agreed, confidence.disagreed + (not agreed)
    fade = 0.5 if right + wrong > ENTRY_MEMORY else 1.0
    return replace(confidence, agreed=right * fade, disagreed=wrong * fade)


def recorded(
    calibration: Calibration, kind: int, score: float, agreed: bool, num_seen: float = 1.0
) -> Calibration:
    """The counts after one more comparison of an answer of this class (an index into CLASSES) with
    this score; `num_seen`: how many requests it stands for."""
    none = (0.0,) * (NUM_BINS * len(CLASSES))
    right, wrong = list(calibration.right or none), list(calibration.wrong or none)
    seen = list(calibration.seen or none)
    at = kind * NUM_BINS + bin_of(score)
    (right if agreed else wrong)[at] += 1.0
    seen[at] += num_seen
    return _faded(Calibration(tuple(right), tuple(wrong), tuple(seen)))


def merged(a: Calibration, b: Calibration) -> Calibration:
    """The counts of both, as when two gateways learnt apart."""
    if not a.right or not b.right:
        return a if a.right else b
    return _faded(
        Calibration(
            tuple(x + y for x, y in zip(a.right, b.right, strict=True)),
            tuple(x + y for x, y in zip(a.wrong, b.wrong, strict=True)),
            tuple(x + y for x, y in zip(a.seen, b.seen, strict=True)),
        )
    )


def _faded(calibration: Calibration) -> Calibration:
    if sum(calibration.right) + sum(calibration.wrong) <= MEMORY:
        return calibration
    return Calibration(
        tuple(count / 2 for count in calibration.right),
        tuple(count / 2 for count in calibration.wrong),
        tuple(count / 2 for count in calibration.seen),
    )


def bin_of(score: float) -> int:
    """Which of the NUM_BINS a score (log-odds) falls into."""
    return min(NUM_BINS - 1, max(0, int((score - LOWEST_SCORE) / BIN_WIDTH)))


def least_score(
    calibration: Calibration, kind: int, budget: float, may_start: bool = True
) -> float:
    """The lowest score that may be answered in a class: of the answers given at that score and
    above, no more than the budget are wrong, as far as comparisons and the scores say. NEVER where
    there is none. A score that has hardly been compared must be within the budget by itself, if the
    answer `may_start` at all.

    Comparisons of hits are a sample, those of misses are all: within a bin the share is right
    either way, and bins are weighed by their requests. Each bin's share is the mean of a beta
    distribution, the prior being what the score says.
    """
    first = kind * NUM_BINS
    none = (0.0,) * NUM_BINS
    right, wrong, seen = (
        counts[first : first + NUM_BINS] or none
        for counts in (calibration.right, calibration.wrong, calibration.seen)
    )
    least = NEVER
    mass = num = variance = 0.0
    for at in range(NUM_BINS - 1, -1, -1):
        known = right[at] + wrong[at] + PRIOR
        share = (wrong[at] + PRIOR * _WRONG[kind][at]) / known
        weight = seen[at] + _UNSEEN
        num += weight
        mass += weight * share
        variance += weight * weight * share * (1 - share) / (known + 1)
        starts = may_start and share <= budget
        is_known = known - PRIOR >= FEWEST_IN_BIN or starts
        if is_known and mass + DOUBT * math.sqrt(variance) <= budget * num:
            least = LOWEST_SCORE + at * BIN_WIDTH
    return least


def chance(calibration: Calibration, kind: int, score: float, prior: float) -> float:
    """The probability that an answer with this score is right: what was counted about it, and the
    prior probability for as much as ten comparisons."""
    if not calibration.right:
        return prior
    i, first = bin_of(score), kind * NUM_BINS
    around = slice(first + max(0, i - 1), first + min(NUM_BINS, i + 2))
    right, wrong = sum(calibration.right[around]), sum(calibration.wrong[around])
    return (right + 10 * prior) / (right + wrong + 10)
