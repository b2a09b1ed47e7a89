"""Stage 4's guards: what forbids that two questions get one answer, however alike they look (pure).

A sentence's vector hardly moves when a number, a name or a "not" changes, and not at all when two
names change places; the answer does. `differences` names each such difference, `same_content`
says that the rest is the same. Symmetric both: the order of the two texts does
not matter. What this cannot see (docs/cache-rule.md has the list): a difference that common
knowledge makes, a negation of its own in a language without a list, who does what to whom in
languages that say it by endings.
"""

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from gateway.policy.cache_opposites import are_opposed
from gateway.policy.cache_reading import Reading, read, words_of
from gateway.policy.cache_stems import stem
from gateway.policy.cache_words import COURTESY, JOINS, NEGATING_PREFIXES

_JOINS = words_of(JOINS)
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
    return all(
        passage.replace("_", "").replace(" ", "").isalnum()
        and other.word_set.issuperset(passage.split())
        for passage in passages
    )


def _other_names(a: Reading, b: Reading) -> bool:
    if a.names == b.names:
        return False
    return not _all_in(a.names - b.names, b) or not _all_in(b.names - a.names, a)


def _all_in(names: frozenset[str], other: Reading) -> bool:
    """A name may be written without its capital, in the plural, or begin the other sentence."""
    return all(name in other.word_set or stem(name) in other.stems for name in names)


def _prefixed(a: Reading, b: Reading) -> bool:
    """legal and illegal, happy and unhappy."""
    return any(
        len(tail) + len(prefix) > 5
        and prefix + tail in left.word_set
        and prefix + tail not in right.word_set
        for left, right in ((a, b), (b, a))
        for tail in (left.bared & right.word_set) - left.word_set
        for prefix in NEGATING_PREFIXES
    )


def _opposed(a: Reading, b: Reading) -> bool:
    return are_opposed(
        [pair for pair in a.opposable if pair[0] not in b.word_set],
        [pair for pair in b.opposable if pair[0] not in a.word_set],
    )


def _turned_on_me(a: Reading, b: Reading) -> bool:
    """I do it to you, you do it to me."""
    return len(a.roles) == len(b.roles) == 1 and a.roles != b.roles


def _reordered(a: Reading, b: Reading) -> bool:
    """Words both have play different parts: after a preposition, or about a word between them."""
    shared = a.stems & b.stems
    if len(shared) < 2 or max(len(a.stems), len(b.stems)) - len(shared) > _MORE_WORDS:
        return False
    left = [word for word in a.content if word in shared]
    right = [word for word in b.content if word in shared]
    if left == right:
        return False
    if ("by" in a.word_set) != ("by" in b.word_set):
        # The passive turns the words around, not the meaning.
        return False
    if _parts_differ(a, b, left, right) or _turned_around(left, right):
        return True
    return _changed_places(a, b, shared)


def _changed_places(a: Reading, b: Reading, shared: frozenset[str]) -> bool:
    """Numbers or names that both have come in another order: 7 - 3 and 3 - 7, who told whom. Not
    where a word joins them as equals, or one stands after the same preposition in both."""
    if not _JOINS.isdisjoint(a.word_set) or not _JOINS.isdisjoint(b.word_set):
        return False
    others = dict(b.parts)
    free = shared - {word for place, word in a.parts if others.get(place) == word}
    left, right = ([word for word in one.movable if word in free] for one in (a, b))
    return left != right and len(left) == len(right) and Counter(left) == Counter(right)


def _parts_differ(a: Reading, b: Reading, left: Sequence[str], right: Sequence[str]) -> bool:
    """A word has taken the place of another after a preposition, and they come the other way
    round."""
    others = dict(b.parts)
    moved = [
        (word, other)
        for preposition, word in a.parts
        if (other := others.get(preposition, word)) != word
    ]
    if not moved:
        return False
    at, other_at = _first_places(left), _first_places(right)
    return any(
        (at[word] < at[other]) != (other_at[word] < other_at[other])
        for word, other in moved
        if word in at and word in other_at and other in at and other in other_at
    )


def _first_places(words: Sequence[str]) -> dict[str, int]:
    return {word: i for i, word in reversed(list(enumerate(words)))}


def _turned_around(left: Sequence[str], right: Sequence[str]) -> bool:
    """Three shared words in a row come in the reverse order: x does to y, y does to x."""
    if len(left) > _MOST_IN_ORDER or len(set(left)) != len(left) or len(set(right)) != len(right):
        return False
    place = {word: i for i, word in enumerate(right)}
    least = len(right)
    later = list[int]()
    for word in reversed(left):
        if len(later) > 1 and place[word] > later[-1] > least:
            return True
        if later:
            least = min(least, later[-1])
        later.append(place[word])
    return False


def _other_question(a: frozenset[str], b: frozenset[str]) -> bool:
    """They ask for different things. "What" may ask for anything but a manner; whether something
    is so stays near to how, why and where."""
    if not a or not b or not a.isdisjoint(b):
        return False
    both = a | b
    if "what" in both:
        return both == {"what", "how"}
    return not ("whether" in both and {"how", "why", "where"} & both)
