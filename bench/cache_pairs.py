"""Pairs of questions for `bench.cache_train`, made from banking77 and clinc150 by rule.

The same question asked otherwise (politely, shorter, mistyped, in other case, its parts in another
order), and questions with another answer that look alike (another number, word or name, an
opposite, a negation, words in each other's place, something more or less). Beside them questions of
one intent and of another, of those near by; the rewordings of gptcache_mock; and questions taken at
random. All by one seed.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from bench.cache_data import Pair, Stream

Made: TypeAlias = tuple[str, str] | None
NUM_OF_A_KIND = 700
_FIRST_COMMON = 60
_WORDS = json.loads(Path(__file__).with_name("cache_pairs.json").read_text(encoding="utf-8"))
_BEFORE: list[str] = _WORDS["before"]
_AFTER: list[str] = _WORDS["after"]
_STORIES: list[str] = _WORDS["stories"]
_NUMBERS: list[str] = _WORDS["numbers"]
_NUMBERED: list[str] = _WORDS["numbered"]
_NAMES: list[str] = _WORDS["names"]
_NAMED: list[str] = _WORDS["named"]
_TWO_PLACES: list[str] = _WORDS["two_places"]
_MORE: list[str] = _WORDS["more"]
_FRONTED = ("for", "in", "on", "at", "with", "when", "if", "to")
_NEGATED = ("can", "do", "does", "is", "are", "should", "will", "have", "did", "was", "could")
_CONTRACTED = {
    **{word: f"{word}n't" for word in _NEGATED},
    "can": "can't",
    "will": "won't",
    "with": "without",
}
_OPPOSED: list[str] = _WORDS["opposed"]
_OPPOSITES = dict(zip(_OPPOSED[::2], _OPPOSED[1::2], strict=True))
_OPPOSITES |= {other: word for word, other in _OPPOSITES.items()}


@dataclass(slots=True)
class PairMaker:
    """`draw`: what it draws from. `common`: the words that are used most; `content`: the others."""

    draw: random.Random
    common: frozenset[str]
    content: list[str]

    @classmethod
    def of(cls, texts: Sequence[str], draw: random.Random) -> "PairMaker":
        """For questions like these."""
        counts: dict[str, int] = {}
        for text in texts:
            for word in map(_bare, text.split()):
                counts[word] = counts.get(word, 0) + 1
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        content = [
            word
            for word in ranked[_FIRST_COMMON:]
            if counts[word] > 2 and word.isalpha() and len(word) > 2
        ]
        return cls(draw, frozenset(ranked[:_FIRST_COMMON]), content)

    def kinds(self) -> list[tuple[Callable[[str], Made], bool, float]]:
        """Each way to make a pair from a question, whether one answer serves both, and how many."""
        same = ((self.polite, 2.0), (self.shorter, 1.0), (self.mistyped, 1.0), (self.cased, 0.5))
        other = (self.number, self.word, self.name, self.negation, self.opposite, self.swap)
        return [
            *((make, True, share) for make, share in (*same, (self.fronted, 0.5))),
            *((make, False, 1.0) for make in other),
            *((make, False, 0.5) for make in (self.more, self.less)),
        ]

    def polite(self, text: str) -> Made:
        """With words of courtesy, or a sentence of another matter before it."""
        draw, bare = self.draw, text.rstrip("?!. ")
        before, after = draw.choice(_BEFORE), draw.choice(_AFTER)
        kind = draw.random()
        if kind < 0.1:
            return text, f"{draw.choice(_STORIES)} {text}"
        return text, before + text if kind < 0.55 else bare + after if kind < 0.9 else before + bare

    def shorter(self, text: str) -> Made:
        """Without most of the words that all questions have."""
        words = text.split()
        kept = [
            word for word in words if _bare(word) not in self.common or self.draw.random() < 0.25
        ]
        return (text, " ".join(kept)) if 2 <= len(kept) < len(words) else None

    def mistyped(self, text: str) -> Made:
        """Letters of one or two words turned around, left out or doubled."""
        words = text.split()
        for _ in range(self.draw.choice((1, 1, 2))):
            at = self._one(words, lambda word: len(word) > 3 and word.isalpha())
            if at is None:
                return None
            word, i = words[at], self.draw.randrange(1, len(words[at]) - 1)
            words[at] = self.draw.choice(
                (
                    word[:i] + word[i + 1] + word[i] + word[i + 2 :],
                    word[:i] + word[i + 1 :],
                    word[:i] + word[i] + word[i:],
                )
            )
        return text, " ".join(words)

    def cased(self, text: str) -> Made:
        """In other letters, with other signs at the end."""
        changed = self.draw.choice((text.upper(), text.capitalize(), text.lower()))
        return text, changed.rstrip("?.") + self.draw.choice(("", "?", "??", "."))

    def fronted(self, text: str) -> Made:
        """What follows a preposition first."""
        words = text.rstrip("?. ").split()
        places = [i for i in range(3, len(words) - 1) if words[i].lower() in _FRONTED]
        if not places:
            return None
        at = self.draw.choice(places)
        return text, f"{' '.join(words[at:])}, {' '.join(words[:at])}"

    def number(self, text: str) -> Made:
        """Another number in its place, or two different ones behind it."""
        words = text.split()
        at = self._one(words, lambda word: word.isdigit() or word.lower() in _NUMBERS)
        one, other = self._number(), self._number()
        if one == other:
            return None
        if at is not None:
            return text, " ".join((*words[:at], one, *words[at + 1 :]))
        return self._behind(text, self.draw.choice(_NUMBERED), one, other)

    def name(self, text: str) -> Made:
        """With two different names."""
        return self._behind(text, self.draw.choice(_NAMED), *self.draw.sample(_NAMES, 2))

    def word(self, text: str) -> Made:
        """Another word in the place of one."""
        return self._replaced(text, self._is_content, lambda word: self.draw.choice(self.content))

    def negation(self, text: str) -> Made:
        """Negated."""
        kind = self.draw.random()
        return self._replaced(
            text,
            _CONTRACTED.__contains__,
            lambda word: (
                _CONTRACTED[word]
                if kind < 0.4 or word == "with"
                else f"{word} {'never' if kind < 0.6 else 'not'}"
            ),
        )

    def opposite(self, text: str) -> Made:
        """A word's opposite in its place."""
        return self._replaced(text, _OPPOSITES.__contains__, _OPPOSITES.__getitem__)

    def swap(self, text: str) -> Made:
        """Two words in each other's place."""
        words = text.split()
        places = [i for i, word in enumerate(words) if self._is_content(_bare(word))]
        if len(places) < 2 or self.draw.random() < 0.4:
            one, other = self.draw.sample(_NAMES + self.content[:200], 2)
            bare, both = text.rstrip("?. "), self.draw.choice(_TWO_PLACES)
            return bare + both % (one, other), bare + both % (other, one)
        i, j = self.draw.sample(places, 2)
        words[i], words[j] = words[j], words[i]
        return text, " ".join(words)

    def more(self, text: str) -> Made:
        """Something more is said of what is asked."""
        behind = self.draw.choice((*_MORE, *(like % self.draw.choice(_NAMES) for like in _NAMED)))
        return text, text.rstrip("?. ") + behind

    def less(self, text: str) -> Made:
        """One word of those that matter is left out."""
        words = text.split()
        places = [i for i, word in enumerate(words) if self._is_content(_bare(word))]
        if len(places) < 3:
            return None
        del words[self.draw.choice(places)]
        return text, " ".join(words)

    def _is_content(self, word: str) -> bool:
        return word.isalpha() and len(word) > 2 and word not in self.common

    def _number(self) -> str:
        return self.draw.choice((*self.draw.sample(_NUMBERS, 3), *map(str, self._figures())))

    def _figures(self) -> tuple[int, ...]:
        return self.draw.randint(1, 30), self.draw.randint(1, 30), self.draw.randint(1, 3000)

    def _behind(self, text: str, like: str, one: str, other: str) -> Made:
        bare = text.rstrip("?. ")
        return bare + like % one, bare + like % other

    def _one(self, words: Sequence[str], fits: Callable[[str], bool]) -> int | None:
        places = [i for i, word in enumerate(words) if fits(word)]
        return self.draw.choice(places) if places else None

    def _replaced(
        self, text: str, fits: Callable[[str], bool], change: Callable[[str], str]
    ) -> Made:
        words = text.split()
        at = self._one(words, lambda word: fits(_bare(word)))
        if at is None:
            return None
        words[at] = change(_bare(words[at]))
        return text, " ".join(words)


def made_pairs(texts: Sequence[str], seed: int, num_of_a_kind: int = NUM_OF_A_KIND) -> list[Pair]:
    """Of these questions, of every kind; a fifth of those with another answer ask politely, too."""
    draw = random.Random(seed)
    maker = PairMaker.of(texts, draw)
    found: list[Pair] = []
    for make, same, share in maker.kinds():
        wanted = len(found) + round(share * num_of_a_kind)
        for _ in range(50 * num_of_a_kind):
            made = make(draw.choice(texts))
            if made is None or made[0] == made[1]:
                continue
            asked = maker.polite(made[1]) if not same and draw.random() < 0.2 else made
            found.append(Pair(made[0], (asked or made)[1], same, make.__name__))
            if len(found) == wanted:
                break
    return found


def intent_pairs(source: Stream, seed: int, num_pairs: int) -> list[Pair]:
    """Questions with one of the nearest of their intent, with one of the nearest of another, and
    with any: so many of each."""
    draw = random.Random(seed)
    found = []
    for _ in range(num_pairs):
        i = draw.randrange(len(source.texts))
        near = np.argsort(-source.similar[i], kind="stable").tolist()
        alike = [j for j in near if source.answers[j] == source.answers[i] and j != i][:3]
        others = [j for j in near[:200] if source.answers[j] != source.answers[i]][:3]
        far = draw.randrange(len(source.texts))
        chosen = [(draw.choice(alike), "intent")] if alike else []
        chosen += [(draw.choice(others), "other")] if others else []
        for j, kind in (*chosen, (far, "far")):
            same = bool(source.answers[i] == source.answers[j])
            found.append(Pair(source.texts[i], source.texts[j], same, kind))
    return found


def reworded_pairs(rewordings: Sequence[Pair], seed: int) -> list[Pair]:
    """Each, and its first text with another's second: of the numbers of shared words the most."""
    draw = random.Random(seed)
    words = [frozenset(re.findall(r"\w+", pair.b.lower())) for pair in rewordings]
    found = []
    for i, pair in enumerate(rewordings):
        own = frozenset(re.findall(r"\w+", pair.a.lower()))
        ranked = sorted(range(len(words)), key=lambda j: -len(own & words[j]) / len(own | words[j]))
        other = draw.choice([j for j in ranked[:4] if j != i])
        found += [pair, Pair(pair.a, rewordings[other].b, False, "reworded other")]
    return found


def _bare(word: str) -> str:
    return re.sub(r"[^\w]", "", word.lower())
