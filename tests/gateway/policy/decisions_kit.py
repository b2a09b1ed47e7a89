"""Questions by the hundred and what stage 4's policies said of them, written down.

`python -m tests.gateway.policy.decisions_kit` writes `FILE` anew: only where a decision is meant to
change. A case is nine texts of one family (hostile, mixed, plain), the first of which is asked;
what is told of it is a digest of its readings, of every comparison and of the verdict.
"""

import json
import random
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

from gateway.policy.cache_agree import agrees
from gateway.policy.cache_choice import Candidate, choose
from gateway.policy.cache_confidence import Calibration, Confidence
from gateway.policy.cache_guards import compared, same_content, same_words
from gateway.policy.cache_reading import read
from gateway.policy.cache_words import (
    DATES,
    FILLERS,
    JOINS,
    LIGHT,
    NEGATING_PREFIXES,
    NEGATIONS,
    OPPOSITES,
    PREPOSITIONS,
    TIME_WORDS,
    UNITS,
)

FILE = Path(__file__).parents[2] / "data" / "cache_decisions.json"
NUM_CASES = 24
"""Of each family; of long texts fewer."""
FEW = 3
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_PLAIN = tuple(
    word
    for line in (
        "How can I pay for the trip to Rome with 3 friends in March and not in April by card ?",
        "What did Alice tell Bob about the legal illegal happy unhappy rise fall before after",
        '20 kg 30 km Please explain "this one" `that()` who sent you me my money from Oslo',
        "between US and us never 1,000 1e5",
    )
    for word in line.split()
)
_LISTS = (DATES, UNITS, FILLERS, LIGHT, NEGATIONS, OPPOSITES, PREPOSITIONS, JOINS, TIME_WORDS)
_LISTED = tuple(word for words in _LISTS for word in words.replace(";", " ").split())
_MARKS = (*"„“”«»「」\u2018\u2019\"'`(){}[]<>=+-*/_\\.,;:?!%$€ \n\t", "a", "b ", "7", " x")
_PAIRS = ("„a", "«a»", "\u2018a\u2019", "'a ", "a(", "a[x", "`a", "-a")
_QUOTES = ("„", "“", "a", "b" * 199, "c" * 200, "”", "'", " ", '"', "\u2018", "\u2019")
_PIECES = ["a(", "b[", "(", " - ", "x.y ", "_", "{", "```", "--f ", "./p/q ", "C# ", "i++ ", "5! "]


def _words(draw: random.Random, letters: str, size: int, num: int) -> str:
    return " ".join("".join(draw.choices(letters, k=size)) for _ in range(num))


def _shuffled(draw: random.Random, words: list[str]) -> str:
    """By draws of `random()` alone, which every Python makes alike."""
    return " ".join(word for _, word in sorted((draw.random(), word) for word in words))


def _turned(draw: random.Random) -> str:
    """One sentence with two of its words in each other's place."""
    sentence = "Does Alice send 7 letters from Rome to Oslo for Bob and 3 from May to June"
    words = sentence.split()
    one, other = (int(draw.random() * len(words)) for _ in range(2))
    words[one], words[other] = words[other], words[one]
    return " ".join(words)


def _headed(draw: random.Random) -> str:
    prefixes = ["", *NEGATING_PREFIXES]
    roots = ["happy", "legal", "usual", "able", "known"]
    return " ".join(draw.choice(prefixes) + draw.choice(roots) for _ in range(6))


FAMILIES: dict[str, Callable[[random.Random], str]] = {
    "plain": lambda draw: " ".join(draw.choices(_PLAIN, k=1 + int(draw.random() * 14))),
    "plain, long": lambda draw: " ".join(draw.choices(_PLAIN, k=380)),
    "listed": lambda draw: " ".join(draw.choices(_LISTED, k=12)),
    "listed, long": lambda draw: " ".join(draw.choices(_LISTED, k=330)),
    "turned": _turned,
    "prefixes": _headed,
    "one set of words": lambda draw: _shuffled(draw, [a + b for a in _LETTERS for b in "aeiorst"]),
    "few words": lambda draw: _words(draw, "ab", 2, 6),
    "many words": lambda draw: _words(draw, _LETTERS, 3, 480),
    "names": lambda draw: "a " + _words(draw, "ABCDEab", 3, 400),
    "numbers": lambda draw: " ".join(str(int(draw.random() * 30)) for _ in range(700)),
    "one set of numbers": lambda draw: _shuffled(draw, [str(n) for n in range(40)]),
    "prepositions": lambda draw: " ".join(
        draw.choice(PREPOSITIONS.split()) + " " + draw.choice(["cat", "dog", "owl"])
        for _ in range(9)
    ),
    "you and me": lambda draw: " ".join(draw.choices(["i", "you", "can", "me", "x", "us"], k=8)),
    "marks": lambda draw: "".join(draw.choices(_MARKS, k=60)),
    "marks, long": lambda draw: "".join(draw.choices(_MARKS, k=2000)),
    "code": lambda draw: "".join(draw.choices(_PIECES, k=40)),
    "one mark": lambda draw: "".join(draw.choices(draw.choice(_PAIRS), k=1990)),
    "quoted": lambda draw: "".join(draw.choices(_QUOTES, k=30)),
    "scripts": lambda draw: "".join(draw.choices("日本語のテスト한국ж я ελ 1 9 año ไทย ", k=40)),
    "cut": lambda draw: _words(draw, "ab", 1, 1001 + int(draw.random() * 2)),
}  # fmt: skip
_FIELDS = (
    *("text", "words", "commons", "content", "stems", "names", "numbers", "negatives", "dates"),
    *("units", "quoted", "code", "num_negations", "questions", "tongue", "scripts", "capitals"),
    *("signs", "light", "roles", "is_cut"),
)


def _case(texts: list[str], draw: random.Random) -> Iterator[object]:
    """All that is said of nine texts."""
    readings = [read(text) for text in texts]
    for reading in readings:
        for name in _FIELDS:
            value = getattr(reading, name)
            yield sorted(value) if isinstance(value, frozenset) else value
    asked = readings[0]
    for other in readings[1:]:
        yield compared(asked, other), compared(other, asked)
        yield same_content(asked, other), same_words(asked, other)
    yield [agrees(texts[0], text, 0.95) for text in texts[1:5]]
    for groups in (("",), ("g",), ("g", "h", "")):
        near = [
            Candidate(
                f"e{i}",
                reading.text,
                0.97 - 0.04 * i,
                Confidence(draw.choice(groups), i % 3, i % 2),
                reading,
            )
            for i, reading in enumerate(readings[1:])
        ]
        verdict = choose(asked.text, near, Calibration(), 0.05, 0.5, reading=asked)
        yield verdict.hit, verdict.shadow, verdict.why, verdict.compare, verdict.kind
        yield [round(value, 9) for value in (*verdict.features, verdict.score, verdict.probability)]


def told(family: str) -> list[str]:
    """A digest of each case."""
    draw = random.Random(family)
    digests = []
    num_cases = NUM_CASES if len(FAMILIES[family](draw)) < 500 else FEW
    for _ in range(num_cases):
        base = FAMILIES[family](draw)
        # Some are each other's near neighbours: one word more, another, or the same in capitals.
        texts = [base, base.upper(), f"{base} not", f"please {base}?"]
        texts += [FAMILIES[family](draw) for _ in range(5)]
        said = blake2b(digest_size=4)
        for value in _case(texts, draw):
            said.update(repr(value).encode("utf-8", "backslashreplace"))
        digests.append(said.hexdigest())
    return digests


if __name__ == "__main__":
    TABLE = {family: " ".join(told(family)) for family in FAMILIES}
    FILE.write_text(json.dumps(TABLE, indent=1) + "\n", encoding="utf-8")
