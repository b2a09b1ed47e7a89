"""What the score of stage 4's decision is made of (pure).

Of the neighbours of a question, those that the guards let pass and those that they do not, comes a
row of figures (`cache_weights.NAMES`), and which class of evidence it is (`CLASSES`). A group is
neighbours whose answers were found to agree; the lead is the nearest that passed. Neighbours that
did not pass cannot be given, and yet say what is near: they count where others are weighed against
the lead's group. Words count where several entries of a group say between them what may be said;
for a lone one they do not: whether two texts share their words says little where nothing else is
known (docs/log.md), beyond what the guards see and the class.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.policy.cache_confidence import Confidence
from gateway.policy.cache_guards import same_content
from gateway.policy.cache_reading import Reading

FARTHEST = 0.5
"""The cosine of what is not there."""
_TEMPERATURE = 0.05
_MOST = 8
ALIKE, SAME_CONTENT, OTHER_WORDS = range(3)
"""Classes of evidence: indices into `cache_confidence.CLASSES`."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What a kept question says about the one that is asked. `passes`: no guard forbids it."""

    similarity: float
    group: str
    record: Confidence
    reading: Reading
    passes: bool


def features_of(asked: Reading, near: Sequence[Neighbour], lead: Neighbour) -> tuple[float, ...]:
    """The figures, in the order of `cache_weights.NAMES`; `near`: all neighbours, the nearest
    first; `lead`: the first of them that passes."""
    group = [one for one in near if one.group == lead.group]
    others = [one for one in near if one.group != lead.group]
    other = FARTHEST if len(near) < _MOST else near[-1].similarity
    weights = [_weight(one, lead) for one in near]
    votes = sum(_weight(one, lead) for one in group) / sum(weights)
    said = frozenset().union(*(one.reading.stems for one in group))
    elsewhere = frozenset().union(*(one.reading.stems for one in others))
    agreed = sum(one.record.agreed for one in group)
    disagreed = sum(one.record.disagreed for one in group)
    passing = [one for one in group if one.passes]
    is_lone = len(passing) == 1
    num_words = len(asked.stems)
    return (
        lead.similarity,
        FARTHEST if is_lone else passing[1].similarity,
        lead.similarity - (others[0].similarity if others else other),
        votes,
        len(group) / _MOST,
        _run(near, lead) / _MOST,
        math.log((agreed + 0.5) / (disagreed + 0.5)),
        0.0 if is_lone else float(len(asked.stems - said)),
        0.0 if is_lone else float(num_words),
        0.0 if is_lone else len(asked.stems & elsewhere) / max(1, num_words),
        float(is_lone),
        (lead.similarity - 0.75) if is_lone else 0.0,
    )


def kind_of(asked: Reading, near: Sequence[Neighbour], lead: Neighbour) -> int:
    """The class of evidence."""
    if any(one.passes and one is not lead and one.group == lead.group for one in near):
        return ALIKE
    return SAME_CONTENT if same_content(asked, lead.reading) else OTHER_WORDS


def _weight(one: Neighbour, lead: Neighbour) -> float:
    return math.exp((one.similarity - lead.similarity) / _TEMPERATURE)


def _run(near: Sequence[Neighbour], lead: Neighbour) -> int:
    """How many of those that pass are of the lead's group before one of another comes."""
    count = 0
    for one in near:
        if one.passes:
            if one.group != lead.group:
                break
            count += 1
    return count
