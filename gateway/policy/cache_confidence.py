"""Stage 4's memory of how right it was: per entry, and per tenant and model (pure, bounded).

Wherever the model answers a question to which the cache had an answer too, the two are compared:
on every miss with neighbours, and on a share of the hits, which are withheld for it. An entry
remembers its own comparisons and the group of entries whose answers agreed; a `Calibration` counts,
by score, how often the nearest answer was right. From the counts alone follows which scores may be
answered: those above which the upper confidence bound of the share of wrong answers lies within
the operator's budget. Nothing is assumed of the scores but their order. Old counts fade.
"""

from dataclasses import dataclass, replace

NUM_BINS = 40
LOWEST_SCORE = -4.0
BIN_WIDTH = 0.3
CLASSES = ("alike", "same words", "other words")
"""Kinds of evidence, each with counts of its own, each of which must earn the budget: several near
entries with one answer; one entry, none of whose words the question replaces; one entry, and a word
in another's place."""
CONFIDENCE_Z = 0.8416
"""One-sided 80 %: the bound is that of the count of wrong ones as a Poisson variable."""
MEMORY = 4096.0
"""Comparisons that a calibration holds; at more, all counts are halved."""
MOST_OF_HITS = 3.0
"""How many times the budget may be wrong of the answers given; the budget is of all requests."""
FEWEST_IN_BIN = 4.0
"""Comparisons that a score must have seen itself: the merits of others do not reach it."""
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


def least_score(calibration: Calibration, kind: int, budget: float) -> float:
    """The lowest score that may be answered in a class. Of all requests of the class, no more than
    the budget may be answered wrongly; of those answered, no more than MOST_OF_HITS times that:
    both by the upper bound of the share of wrong ones among all comparisons at that score and
    above. NEVER where there is none.

    Comparisons of hits are a sample, those of misses are all: within a bin the share is right
    either way, and bins are weighed by their requests.
    """
    if not calibration.right:
        return NEVER
    first = kind * NUM_BINS
    num_requests = sum(calibration.seen[first : first + NUM_BINS])
    least = NEVER
    seen = mass = spread = 0.0
    for at in range(first + NUM_BINS - 1, first - 1, -1):
        compared = calibration.right[at] + calibration.wrong[at]
        if compared == 0:
            continue
        # Each bin's own share of wrong ones, weighed by its requests; `num` is how many comparisons
        # drawn evenly would say as much (Kish).
        seen += calibration.seen[at]
        mass += calibration.seen[at] * calibration.wrong[at] / compared
        spread += calibration.seen[at] ** 2 / compared
        if compared < FEWEST_IN_BIN:
            continue
        num = seen**2 / spread
        bound = upper_bound(num * mass / seen, num)
        if bound <= MOST_OF_HITS * budget and bound * seen / num_requests <= budget:
            least = LOWEST_SCORE + (at - first) * BIN_WIDTH
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


def upper_bound(num_wrong: float, num_all: float) -> float:
    """Of the share of wrong ones, given a count of them: the Poisson bound, by Wilson and
    Hilferty's approximation of the gamma quantile (within 2 % of the exact one)."""
    shape = num_wrong + 1.0
    quantile: float = shape * (1 - 1 / (9 * shape) + CONFIDENCE_Z / (3 * shape**0.5)) ** 3
    return min(1.0, quantile / num_all)
