"""Words that mean the opposite of one another, for stage 4's guards (pure)."""

from collections.abc import Mapping, Sequence

from gateway.policy.cache_stems import stem
from gateway.policy.cache_words import OPPOSITES

_PAIRS = tuple(pair.split() for pair in " ".join(OPPOSITES.split()).split(";"))
_OPPOSITES: dict[str, set[str]] = {}
for _one, _other in _PAIRS:
    for _left, _right in ((_one, _other), (_other, _one), (stem(_one), stem(_other))):
        _OPPOSITES.setdefault(_left, set()).add(_right)
        _OPPOSITES.setdefault(_right, set()).add(_left)
_NONE: frozenset[str] = frozenset()


def opposable_in(stems: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Of words to their stems, those that may be another's opposite: either has one in the list,
    which names both sides."""
    return tuple(pair for pair in stems.items() if pair[0] in _OPPOSITES or pair[1] in _OPPOSITES)


def are_opposed(left: Sequence[tuple[str, str]], right: Sequence[tuple[str, str]]) -> bool:
    """Whether a word of one is the opposite of a word of the other, or their stems are; both as
    `opposable_in` gives them."""
    words, stems = {word for word, _ in right}, {common for _, common in right}
    return any(
        not _OPPOSITES.get(word, _NONE).isdisjoint(words)
        or not _OPPOSITES.get(common, _NONE).isdisjoint(stems)
        for word, common in left
    )
