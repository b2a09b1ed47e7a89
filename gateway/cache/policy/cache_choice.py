"""Stage 4's decision: may a kept answer be given to this question? Pure.

What comes in: the nearest entries of its scope (cosine, record, and what the two questions say of
one another), what has been learnt for the tenant and model, the share of wrong answers that the
operator allows.

    1. same words   the question is a neighbour's but for capitals and outer punctuation: a hit
    2. numbers      neighbours with other numbers or signs drop out, unless their group has shown
                    that it does not matter
    3. score        log-odds that the lead's answer is right (the figures NAMES, weighed as FITTED
                    says, which bench/cache_fit.py fits)
    4. budget       the score must reach what comparisons of its class of evidence, and before there
                    are any the score itself, say is within the budget (`least_score`)
    5. audit        a share of the hits is withheld and compared all the same

A group is neighbours whose answers were found to agree; the lead is the one that passed whose
question is the likeliest to have the same answer (question_score.py). Neighbours that did not pass
cannot be given, and yet say what is near: they count where others are weighed against the lead's
group.

The idea of learning per entry when to answer, with a bound on errors, is vCache's (arXiv
2502.03771); that answers which agreed vote together, and counting instead of fitting online, are
ours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.cache.policy.cache_confidence import (
    Calibration,
    Confidence,
    chance,
    learned,
    least_score,
    recorded,
)

NAMES = (
    "similarity",  # the lead's cosine
    "second",  # the next one of its group that passes
    "margin",  # how much farther the nearest with another answer is
    "votes",  # its group's share of the neighbours, the nearer counting more
    "alike",  # how many neighbours are of its group
    "run",  # how many in a row from the nearest
    "record",  # comparisons of its group: log-odds
    "lone",  # the lead is the only one of its group that passes
    "lone near",  # and its cosine, less 0.75
    "pair",  # the lead's question: log-odds that one answer serves both
    "best pair",  # the best of its group
    "covered",  # how well the words asked are found among those of its group, the mean
    "least covered",  # the word that is found worst
    "elsewhere",  # how well they are found among those of the neighbours with other answers
)


@dataclass(frozen=True, slots=True)
class ScoreWeights:
    """Of log-odds: one value for each of NAMES, and the bias."""

    values: tuple[float, ...]
    bias: float


FITTED = ScoreWeights(
    (
        *(-0.991, 0.857, 6.898, 0.815, 1.226, 1.058, 0.221),
        *(0.271, -0.106, -0.059, 0.182, 5.814, 0.184, -0.883),
    ),
    -4.449,
)
"""On banking77 and clinc150, run in shadow."""


FARTHEST = 0.5
"""The cosine of what is not there."""
_LEAST_PAIR, _MOST_PAIR = -8.0, 4.0
_TEMPERATURE = 0.05
_MOST = 8
ALIKE, LONE, SURE = range(3)
"""Classes of evidence: indices into `CLASSES` of cache_confidence.py."""


@dataclass(frozen=True, slots=True)
class PairView:
    """What a kept question says of the one that is asked (question_score.py). `log_odds`: that one
    answer serves both; `covers`: of each word asked the best cosine with one of the kept;
    `is_same`: they are the same but for capitals, blanks, and punctuation at the ends; `numbers`:
    the kept question's."""

    log_odds: float
    covers: tuple[float, ...]
    is_same: bool = False
    numbers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KeptCandidate:
    """A neighbour: `similarity` is the cosine of the two questions' vectors, `pair` what its
    question says of the one that is asked."""

    entry_id: str
    similarity: float
    confidence: Confidence
    pair: PairView

    @property
    def group(self) -> str:
        """What it shares with entries whose answers agreed with its own."""
        return self.confidence.group or self.entry_id


def features_of(
    near: Sequence[KeptCandidate], passed: Sequence[KeptCandidate], lead: KeptCandidate
) -> tuple[float, ...]:
    """The figures, in the order of `NAMES`; `near`: all neighbours, the nearest first; `passed`:
    those that may be given."""
    group = [one for one in near if one.group == lead.group]
    others = [one for one in near if one.group != lead.group]
    other = FARTHEST if len(near) < _MOST else near[-1].similarity
    weights = [_weight(one) for one in near]
    votes = sum(_weight(one) for one in group) / sum(weights)
    agreed = sum(one.confidence.agreed for one in group)
    disagreed = sum(one.confidence.disagreed for one in group)
    covered, elsewhere = _best_covers(group), _best_covers(others)
    seconds = [one.similarity for one in passed if one.group == lead.group and one is not lead]
    return (
        lead.similarity,
        max(seconds, default=FARTHEST),
        lead.similarity - (others[0].similarity if others else other),
        votes,
        len(group) / _MOST,
        _run(near, lead) / _MOST,
        math.log((agreed + 0.5) / (disagreed + 0.5)),
        float(not seconds),
        0.0 if seconds else lead.similarity - 0.75,
        _clipped(lead.pair.log_odds),
        _clipped(max(one.pair.log_odds for one in group)),
        _mean(covered),
        min(covered, default=0.0),
        _mean(elsewhere),
    )


def _best_covers(near: Sequence[KeptCandidate]) -> tuple[float, ...]:
    """By word asked."""
    return tuple(max(each) for each in zip(*(one.pair.covers for one in near), strict=True))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _clipped(pair: float) -> float:
    return min(max(pair, _LEAST_PAIR), _MOST_PAIR)


def _weight(one: KeptCandidate) -> float:
    return math.exp(one.similarity / _TEMPERATURE)


def _run(near: Sequence[KeptCandidate], lead: KeptCandidate) -> int:
    """How many are of the lead's group before one of another comes."""
    count = 0
    for one in near:
        if one.group != lead.group:
            break
        count += 1
    return count


CANDIDATES = 8
"""Neighbours to ask the store for."""
LEAST_SIMILARITY = FARTHEST
"""What is farther is no neighbour."""
COMPARED_AT_MOST = 3
AUDITED_SHARE = 0.05
SURE_PAIR = 1.5
"""An answer may be given before there are comparisons only where the pair has at least these
log-odds: more than each of the 254 traps of bench/cache_traps.jsonl, and than all but 2 % of made
questions of which one says more than the other."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`hit`: the neighbour to answer from. `shadow`: it would have been a hit, and is withheld to
    be compared. `compare`: neighbours whose answers to hold against the model's, the likeliest
    first; they have different answers, as far as is known. `probability`: that the first of them is
    right; `score`: the same as log-odds before what the tenant's comparisons say; `features`: what
    that was made of; `kind`: its class of evidence, an index into CLASSES;
    `leads`: the first compared is the one that would have been given."""

    hit: int | None = None
    shadow: bool = False
    why: str = ""
    probability: float = 0.0
    compare: tuple[int, ...] = ()
    score: float = 0.0
    features: tuple[float, ...] = ()
    kind: int = 0
    leads: bool = False


@dataclass(frozen=True, slots=True)
class LookupOutcome:
    """What comparisons taught: the record of the entry that is new, of those compared, and the
    counts."""

    new: Confidence
    learned: tuple[tuple[str, Confidence], ...]
    calibration: Calibration


def choose(
    numbers: tuple[str, ...],
    neighbours: Sequence[KeptCandidate],
    calibration: Calibration,
    budget: float,
    draw: float,
    weights: ScoreWeights = FITTED,
    *,
    may_start: bool = True,
) -> Verdict:
    """What to do with a question. `numbers`: those in it; `neighbours`: nearest first; `budget`:
    the share of given answers that may be wrong; `draw`: uniform in [0, 1), decides about audits;
    `may_start`: scores are believed before there are comparisons."""
    near = [one for one in neighbours if one.similarity >= LEAST_SIMILARITY]
    passed = [one for one in near if one.pair.numbers == numbers or _is_waived(one.group, near)]
    order = sorted(passed, key=lambda one: (one.pair.log_odds < SURE_PAIR, -one.similarity))
    others = [one for one in near if one not in passed]
    to_compare = _different([*order, *others], neighbours)
    if not order:
        return Verdict(why="other numbers" if near else "nothing near", compare=to_compare)
    lead = order[0]
    features = features_of(near, passed, lead)
    looks_sure = lead.pair.numbers == numbers and lead.pair.log_odds >= SURE_PAIR
    kind = ALIKE if not features[NAMES.index("lone")] else SURE if looks_sure else LONE
    score = weights.bias + sum(
        weight * value for weight, value in zip(weights.values, features, strict=True)
    )
    verdict = Verdict(
        probability=chance(calibration, kind, score, 1 / (1 + math.exp(-score))),
        compare=to_compare,
        leads=True,
        score=score,
        features=features,
        kind=kind,
    )
    if lead.pair.is_same:
        why = "same words"
    elif score >= least_score(calibration, kind, budget, may_start and looks_sure):
        why = "within budget"
    else:
        return replace(verdict, why="unsure")
    if draw < AUDITED_SHARE:
        return replace(verdict, shadow=True, why="audit")
    return replace(verdict, hit=neighbours.index(lead), why=why)


def compared(
    entry_id: str,
    verdict: Verdict,
    neighbours: Sequence[KeptCandidate],
    agreed: Sequence[bool],
    calibration: Calibration,
) -> LookupOutcome:
    """Learn from the model's answer to a question that was not hit. `agreed`: of each neighbour in
    `verdict.compare`, whether its answer says the same; `entry_id`: the new entry's."""
    if not agreed:
        return LookupOutcome(Confidence(), (), calibration)
    pairs = list(zip((neighbours[i] for i in verdict.compare), agreed, strict=False))
    alike = [candidate.group for candidate, same in pairs if same]
    new = Confidence(group=alike[0] if alike and alike[0] != entry_id else "")
    # What agrees with one answer is one group: the neighbours of the others move over.
    records = {
        one.entry_id: replace(one.confidence, group=alike[0])
        for one in neighbours
        if one.group in alike[1:]
    }
    # Only the first was about to be given: it alone counts for scores and records.
    first, is_right = pairs[0]
    if verdict.leads:
        record = records.get(first.entry_id, first.confidence)
        records[first.entry_id] = learned(record, is_right)
        calibration = recorded(
            calibration,
            verdict.kind,
            verdict.score,
            is_right,
            1 / AUDITED_SHARE if verdict.shadow else 1.0,
        )
    return LookupOutcome(new, tuple(records.items()), calibration)


def _is_waived(group: str, near: Sequence[KeptCandidate]) -> bool:
    """Two entries of the group have other numbers, and yet their answers agreed."""
    return len({one.pair.numbers for one in near if one.group == group}) > 1


def _different(
    order: Sequence[KeptCandidate], neighbours: Sequence[KeptCandidate]
) -> tuple[int, ...]:
    """The first of each group, few."""
    first = {one.group: one for one in reversed(order)}
    chosen = [one for one in order if first[one.group] is one]
    return tuple(neighbours.index(one) for one in chosen[:COMPARED_AT_MOST])
