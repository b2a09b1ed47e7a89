"""Stage 4's guards: what forbids that two questions get one answer, however alike they look (pure).

A sentence's vector hardly moves when a number, a name or a "not" changes, and not at all when two
names change places; the answer does. `differences` names each such difference, `same_content`
says that the rest is the same. Symmetric both: the order of the two texts does
not matter. What this cannot see (docs/cache-rule.md has the list): a difference that common
knowledge makes, a negation of its own in a language without a list, who does what to whom in
languages that say it by endings.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from gateway.policy.cache_reading import Reading, read, stem, words_of
from gateway.policy.cache_words import (
    COURTESY,
    JOINS,
    NEGATING_PREFIXES,
    OPPOSITES,
    PREPOSITIONS,
)

_PAIRS = tuple(pair.split() for pair in " ".join(OPPOSITES.split()).split(";"))
_OPPOSITES: dict[str, set[str]] = {}
for _one, _other in _PAIRS:
    for _left, _right in ((_one, _other), (_other, _one), (stem(_one), stem(_other))):
        _OPPOSITES.setdefault(_left, set()).add(_right)
        _OPPOSITES.setdefault(_right, set()).add(_left)
_PREPOSITIONS = words_of(PREPOSITIONS)
_JOINS = words_of(JOINS)
_REACH = 3
_NONE: frozenset[str] = frozenset()
_MOST_IN_ORDER = 40
_MORE_WORDS = 2
_COURTESY = words_of(COURTESY)
_CONTRACTED = {"s": "is", "re": "are", "m": "am", "ll": "will", "ve": "have"}


def differences(a: str, b: str) -> tuple[str, ...]:
    """Why these two questions must not share an answer, in a fixed order; empty where nothing
    was found."""
    return compared(read(a), read(b))


def compared(a: Reading, b: Reading) -> tuple[str, ...]:
    """`differences` of texts that were read before."""
    if a.text == b.text:
        return ()
    checks = (
        ("length", a.is_cut or b.is_cut),
        ("language", _other_language(a, b)),
        ("number", a.numbers != b.numbers or a.negatives != b.negatives),
        ("date", a.dates != b.dates),
        ("unit", _other_units(a, b)),
        ("quoted", a.quoted != b.quoted and _other_passages(a.quoted, b.quoted, a, b)),
        ("code", a.code != b.code and _other_passages(set(a.code), set(b.code), a, b)),
        ("name", _other_names(a, b)),
        ("negation", a.num_negations % 2 != b.num_negations % 2 or _prefixed(a, b)),
        ("opposite", _opposed(a, b)),
        ("order", _turned_on_me(a, b) or _reordered(a, b)),
        ("question", _other_question(a.questions, b.questions)),
    )
    return tuple(name for name, differs in checks if differs)


def same_content(a: Reading, b: Reading) -> bool:
    """Neither has a word or sign of its own, light words included, and they come in one order; only
    the way of asking differs."""
    is_same = a.content == b.content and a.light == b.light and bool(a.content)
    return is_same and _same_marks(a, b)


def same_words(a: Reading, b: Reading) -> bool:
    """The same but for capitals at a word's begin, punctuation and words of courtesy, which only
    one of them has: who asks how to say "hello" does not ask how to say "thanks"."""
    if a.is_cut or b.is_cut or not _same_marks(a, b):
        return False
    bare = _bare(a.words)
    return bool(bare) and bare == _bare(b.words)


def _same_marks(a: Reading, b: Reading) -> bool:
    """What no stem shows and a question may turn on: signs, capitals (US, us), two different words
    of courtesy."""
    if a.signs != b.signs or a.capitals != b.capitals:
        return False
    polite, other = (tuple(w for w in one.words if w in _COURTESY) for one in (a, b))
    return not polite or not other or polite == other


def _bare(words: Sequence[str]) -> list[str]:
    found: list[str] = []
    for word in words:
        if word in _COURTESY:
            continue
        head, apostrophe, tail = word.partition("'")
        full = _CONTRACTED.get(tail) if apostrophe else None
        found += (head, full) if full else (word,)
    return found


def _other_language(a: Reading, b: Reading) -> bool:
    return a.scripts != b.scripts or bool(a.tongue and b.tongue and a.tongue != b.tongue)


def _other_units(a: Reading, b: Reading) -> bool:
    """Each has a unit that the other lacks; or there are numbers, and one has no unit."""
    if a.units == b.units:
        return False
    both = not (a.units <= b.units or b.units <= a.units)
    return both or (bool(a.numbers or b.numbers) and bool(a.units) != bool(b.units))


def _other_passages(
    left: AbstractSet[str], right: AbstractSet[str], a: Reading, b: Reading
) -> bool:
    """A passage that is not in the other text, not even as plain words."""
    return not (_said(left - right, b) and _said(right - left, a))


def _said(passages: AbstractSet[str], other: Reading) -> bool:
    words = set(other.words)
    return all(
        passage.replace("_", "").replace(" ", "").isalnum() and words.issuperset(passage.split())
        for passage in passages
    )


def _other_names(a: Reading, b: Reading) -> bool:
    if a.names == b.names:
        return False
    return not _all_in(a.names - b.names, b) or not _all_in(b.names - a.names, a)


def _all_in(names: frozenset[str], other: Reading) -> bool:
    """A name may be written without its capital, in the plural, or begin the other sentence."""
    words = set(other.words)
    return all(name in words or stem(name) in other.stems for name in names)


def _only(a: Reading, b: Reading) -> tuple[set[str], set[str]]:
    words_a, words_b = set(a.words), set(b.words)
    return words_a - words_b, words_b - words_a


def _prefixed(a: Reading, b: Reading) -> bool:
    """legal and illegal, happy and unhappy."""
    only_a, only_b = _only(a, b)
    return any(
        longer.startswith(NEGATING_PREFIXES)
        and any(
            longer.startswith(prefix) and longer[len(prefix) :] in right
            for prefix in NEGATING_PREFIXES
        )
        for left, right in ((only_a, only_b), (only_b, only_a))
        for longer in left
        if len(longer) > 5
    )


def _opposed(a: Reading, b: Reading) -> bool:
    only_a, only_b = _only(a, b)
    stems_b = {stem(word) for word in only_b}
    for word in only_a:
        if not _OPPOSITES.get(word, _NONE).isdisjoint(only_b):
            return True
        if not _OPPOSITES.get(stem(word), _NONE).isdisjoint(stems_b):
            return True
    return False


def _turned_on_me(a: Reading, b: Reading) -> bool:
    """I do it to you, you do it to me."""
    return len(a.roles) == len(b.roles) == 1 and a.roles != b.roles


def _reordered(a: Reading, b: Reading) -> bool:
    """Words both have play different parts: after a preposition, or about a word between them."""
    shared = a.stems & b.stems
    if len(shared) < 2:
        return False
    left = [word for word in a.content if word in shared]
    right = [word for word in b.content if word in shared]
    if left == right or max(len(a.stems - b.stems), len(b.stems - a.stems)) > _MORE_WORDS:
        return False
    if ("by" in a.words) != ("by" in b.words):
        # The passive turns the words around, not the meaning.
        return False
    if _parts_differ(a, b, left, right) or _turned_around(left, right):
        return True
    return _changed_places(a, b, shared)


def _changed_places(a: Reading, b: Reading, shared: frozenset[str]) -> bool:
    """Numbers or names that both have come in another order: 7 - 3 and 3 - 7, who told whom. Not
    where a word joins them as equals, or one stands after the same preposition in both."""
    if not _JOINS.isdisjoint((*a.words, *b.words)):
        return False
    parts, others = _parts(a), _parts(b)
    free = shared - {word for place, word in parts.items() if others.get(place) == word}
    orders = [
        [
            common
            for word, common in zip(one.words, one.commons, strict=True)
            if common in free and (word[0].isdigit() or word in one.names)
        ]
        for one in (a, b)
    ]
    return orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def _parts_differ(a: Reading, b: Reading, left: Sequence[str], right: Sequence[str]) -> bool:
    """A word has taken the place of another after a preposition, and they come the other way
    round."""
    parts, others = _parts(a), _parts(b)
    for preposition, word in parts.items():
        other = others.get(preposition)
        if other is None or other == word or word not in right or other not in left:
            continue
        if (left.index(word) < left.index(other)) != (right.index(word) < right.index(other)):
            return True
    return False


def _parts(reading: Reading) -> dict[str, str]:
    """Preposition to the content word that follows it; one that occurs twice says nothing."""
    parts: dict[str, str] = {}
    twice = set()
    words, commons = reading.words, reading.commons
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
    for word in twice:
        del parts[word]
    return parts


def _turned_around(left: Sequence[str], right: Sequence[str]) -> bool:
    """Three shared words in a row come in the reverse order: x does to y, y does to x."""
    if len(left) > _MOST_IN_ORDER or len(set(left)) != len(left) or len(set(right)) != len(right):
        return False
    place = {word: i for i, word in enumerate(right)}
    order = [place[word] for word in left]
    return any(
        order[i] > order[i + 1] > order[j]
        for i in range(len(order) - 2)
        for j in range(i + 2, len(order))
    )


def _other_question(a: frozenset[str], b: frozenset[str]) -> bool:
    """They ask for different things. "What" may ask for anything but a manner; whether something
    is so stays near to how, why and where."""
    if not a or not b or not a.isdisjoint(b):
        return False
    both = a | b
    if "what" in both:
        return both == {"what", "how"}
    return not ("whether" in both and {"how", "why", "where"} & both)
