"""Stage 4's decision: may the nearest kept answer be given to this question? Pure.

What comes in: the question, the nearest entries of its scope (cosine, question, record), what has
been learnt for the tenant and model, the share of wrong answers that the operator allows.

    1. guards       neighbours whose question differs in a number, a name, a "not"... drop out
    2. same words   the question is a neighbour's but for case, signs and courtesy: a hit
    3. score        log-odds that the nearest answer is right (`cache_score`, weighed as
                    `cache_weights` says, fitted by bench/cache_fit.py)
    4. budget       the score must reach what comparisons of its class of evidence, and before there
                    are any the score itself, say is within the budget (`least_score`); a neighbour
                    that a guard would forbid but for its group waits for comparisons, and
                    so does a question with a word that nobody of the group has
    5. audit        a share of the hits is withheld and compared all the same

The idea of learning per entry when to answer, with a bound on errors, is vCache's (arXiv
2502.03771); that answers which agreed vote together, and counting instead of fitting online, are
ours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from gateway.policy.cache_confidence import (
    Calibration,
    Confidence,
    chance,
    learned,
    least_score,
    recorded,
)
from gateway.policy.cache_guards import compared as differences_of
from gateway.policy.cache_guards import same_words
from gateway.policy.cache_reading import Reading, read
from gateway.policy.cache_score import FARTHEST, Neighbour, features_of, kind_of
from gateway.policy.cache_weights import FITTED, NAMES, Weights

CANDIDATES = 8
"""Neighbours to ask the store for."""
LEAST_SIMILARITY = FARTHEST
"""What is farther is no neighbour."""
COMPARED_AT_MOST = 3
AUDITED_SHARE = 0.05
_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A neighbour: `similarity` is the cosine of the two questions' vectors; `reading` its question
    as read before, where the caller has kept it."""

    entry_id: str
    question: str
    similarity: float
    confidence: Confidence
    reading: Reading | None = None

    @property
    def group(self) -> str:
        """What it shares with entries whose answers agreed with its own."""
        return self.confidence.group or self.entry_id


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
class Outcome:
    """What comparisons taught: the record of the entry that is new, of those compared, and the
    counts."""

    new: Confidence
    learned: tuple[tuple[str, Confidence], ...]
    calibration: Calibration


def choose(
    question: str,
    neighbours: Sequence[Candidate],
    calibration: Calibration,
    budget: float,
    draw: float,
    weights: Weights = FITTED,
    reading: Reading | None = None,
) -> Verdict:
    """What to do with a question. `neighbours`: nearest first; `budget`: the share of given answers
    that may be wrong; `draw`: uniform in [0, 1), decides about audits; `reading`: the question,
    as read before."""
    asked = reading or read(question)
    near_enough = [one for one in neighbours if one.similarity >= LEAST_SIMILARITY]
    readings = [one.reading or read(one.question) for one in near_enough]
    found = [differences_of(asked, one) for one in readings]
    waived = _waived(near_enough, readings, found)
    passed = [
        i
        for i, (candidate, kinds) in enumerate(zip(near_enough, found, strict=True))
        if waived.get(candidate.group, _NONE).issuperset(kinds)
    ]
    others = [i for i in range(len(near_enough)) if i not in passed]
    to_compare = _different([*passed, *others], neighbours)
    if not passed:
        why = f"differs: {found[0][0]}" if found else "nothing near"
        return Verdict(why=why, compare=to_compare)
    near = [
        Neighbour(one.similarity, one.group, one.confidence, reading, i in passed)
        for i, (one, reading) in enumerate(zip(near_enough, readings, strict=True))
    ]
    lead = near[passed[0]]
    features = features_of(asked, near, lead)
    kind = kind_of(asked, near, lead)
    score = weights.bias + sum(
        weight * value for weight, value in zip(weights.values, features, strict=True)
    )
    num_missing = features[NAMES.index("missing")]
    may_start = not found[passed[0]] and not num_missing
    verdict = Verdict(
        probability=chance(calibration, kind, score, 1 / (1 + math.exp(-score))),
        compare=to_compare,
        leads=True,
        score=score,
        features=features,
        kind=kind,
    )
    if same_words(asked, lead.reading):
        why = "same words"
    elif score >= least_score(calibration, kind, budget, may_start):
        why = "within budget"
    else:
        return replace(verdict, why="unsure")
    if draw < AUDITED_SHARE:
        return replace(verdict, shadow=True, why="audit")
    return replace(verdict, hit=passed[0], why=why)


def compared(
    entry_id: str,
    verdict: Verdict,
    neighbours: Sequence[Candidate],
    agreed: Sequence[bool],
    calibration: Calibration,
) -> Outcome:
    """Learn from the model's answer to a question that was not hit. `agreed`: of each neighbour in
    `verdict.compare`, whether its answer says the same; `entry_id`: the new entry's."""
    if not agreed:
        return Outcome(Confidence(), (), calibration)
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
    return Outcome(new, tuple(records.items()), calibration)


def _waived(
    near: Sequence[Candidate], readings: Sequence[Reading], found: Sequence[tuple[str, ...]]
) -> dict[str, frozenset[str]]:
    """By group, the differences that do not matter to its answer: two of its entries have them
    between them, and yet their answers agreed. Only for groups that need it."""
    waived = {}
    needed: dict[str, set[str]] = {}
    for one, kinds in zip(near, found, strict=True):
        if kinds:
            needed.setdefault(one.group, set()).update(kinds)
    for group, wanted in needed.items():
        members = [
            reading for one, reading in zip(near, readings, strict=True) if one.group == group
        ]
        between: set[str] = set()
        for member, other in combinations(members, 2):
            between.update(differences_of(other, member))
            if between >= wanted:
                break
        waived[group] = frozenset(between)
    return waived


def _different(order: Sequence[int], neighbours: Sequence[Candidate]) -> tuple[int, ...]:
    """The first of each group, few."""
    groups: set[str] = set()
    chosen = []
    for i in order:
        if neighbours[i].group not in groups:
            groups.add(neighbours[i].group)
            chosen.append(i)
    return tuple(chosen[:COMPARED_AT_MOST])
