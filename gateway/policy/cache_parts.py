"""Which parts words play after prepositions, for stage 4's guards (pure)."""

from collections.abc import Sequence

from gateway.policy.cache_words import JOINS, PREPOSITIONS

_PREPOSITIONS = frozenset(PREPOSITIONS.split())
_JOINS = frozenset(JOINS.split())
_REACH = 3


def parts_in(words: Sequence[str], commons: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Prepositions, each with the content word that follows it, from London to Paris; one that
    occurs twice says nothing. `commons`: the common form of each word, empty for a filler."""
    parts: dict[str, str] = {}
    twice = set()
    for i, word in enumerate(words):
        if word not in _PREPOSITIONS:
            continue
        for j in range(i + 1, min(i + 1 + _REACH, len(words))):
            if words[j] in _JOINS:
                break
            if commons[j]:
                if word in parts:
                    twice.add(word)
                parts[word] = commons[j]
                break
    return tuple((word, common) for word, common in parts.items() if word not in twice)
