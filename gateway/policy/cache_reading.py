"""What the semantic cache's guards see of a question (pure).

`read` takes a text apart once: words, names, numbers, dates, units, quoted and code passages,
negations, what kind of question, which language. `cache_guards` compares two such readings. No
grammar: patterns and the short lists of `cache_words`, so that a reading takes tens of
microseconds. Scripts without blanks between words (Chinese, Japanese, Thai) are read as runs of
characters of one kind; there, only numbers, quotes, code and those runs are seen.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.policy.cache_light import light_in, roles_in
from gateway.policy.cache_opposites import opposable_in
from gateway.policy.cache_parts import parts_in
from gateway.policy.cache_passages import code_in, negatives_in, quoted_in, signs_in
from gateway.policy.cache_stems import first_of_line, stem
from gateway.policy.cache_words import (
    AUXILIARIES,
    DATE_LEADS,
    DATES,
    DOUBTFUL_DATES,
    FILLERS,
    FUNCTION_WORDS,
    MANNERS,
    MEASURES,
    NEGATED_TAIL,
    NEGATING_PREFIXES,
    NEGATIONS,
    NEGATIONS_ONLY_IN,
    NUMBERS,
    NUMBERS_ONLY_IN,
    PLACES_AND_TONGUES,
    TIME_SPANS,
    TIME_WORDS,
    TITLES,
    UNITS,
)

LONGEST_CHARS = 2000
"""Of a longer text no more is read, and it equals only itself (`Reading.is_cut`)."""


def words_of(text: str) -> frozenset[str]:
    """A list's words."""
    return frozenset(text.split())


_DATES = first_of_line(DATES)
_UNITS = first_of_line(UNITS)
_DOUBTFUL = words_of(DOUBTFUL_DATES)
_DATE_LEADS = words_of(DATE_LEADS)
_FILLERS = words_of(FILLERS)
_NEGATIONS = words_of(NEGATIONS)
_TIME_WORDS = words_of(TIME_WORDS)
_TIME_SPANS = words_of(TIME_SPANS)
_KNOWN_NAMES = words_of(PLACES_AND_TONGUES)
_TONGUES = {
    word: tuple(tongue for tongue, words in FUNCTION_WORDS.items() if word in words.split())
    for word in " ".join(FUNCTION_WORDS.values()).split()
}

_TOKEN = re.compile(
    r"\d+(?:[.,:/-]\d+)*(?:[eE][+-]?\d+(?!\w))?|°[CcFf]\b|km/h|[^\W\d_]+(?:['\u2019-][^\W\d_]+)*|[$€£¥₹%]|[?!.;:](?=\s|$)|[?\uff1f。]"
)
_BARE_POINT = re.compile(r"(?<![\w.,])\.(?=\d)")
_SCRIPTS = (
    ("han", 0x4E00, 0x9FFF),
    ("kana", 0x3040, 0x30FF),
    ("hangul", 0xAC00, 0xD7AF),
    ("cyrillic", 0x0400, 0x04FF),
    ("greek", 0x0370, 0x03FF),
    ("hebrew", 0x0590, 0x05FF),
    ("arabic", 0x0600, 0x06FF),
    ("devanagari", 0x0900, 0x097F),
    ("thai", 0x0E00, 0x0E7F),
)
_SPACELESS = re.compile(r"[\u3040-\u30ff]+|[\u4e00-\u9fff]+|[\u0e00-\u0e7f]+")
_QUESTION_WORDS = {
    "who": "who", "whom": "who", "whose": "who", "wer": "who", "wem": "who", "wen": "who",
    "qui": "who", "quién": "who", "quiénes": "who", "chi": "who", "quem": "who", "wie-nl": "who",
    "кто": "who",
    "when": "when", "wann": "when", "quand": "when", "cuándo": "when", "quando": "when",
    "wanneer": "when", "когда": "when",
    "where": "where", "wo": "where", "woher": "where", "wohin": "where", "où": "where",
    "dónde": "where", "dove": "where", "onde": "where", "waar": "where", "где": "where",
    "why": "why", "warum": "why", "weshalb": "why", "pourquoi": "why", "perché": "why",
    "waarom": "why", "почему": "why", "зачем": "why",
    "wieviel": "how much", "combien": "how much", "cuánto": "how much", "cuánta": "how much",
    "cuántos": "how much", "quanto": "how much", "quanti": "how much", "hoeveel": "how much",
    "сколько": "how much",
}  # fmt: skip
_MEASURES = words_of(MEASURES)
_ALSO_JOIN = frozenset(("when", "where", "who", "qui", "whose", "quando", "quand"))
# A duration, a date and a count of days answer one another's question.
_HOW = {"many": "how much", "long": "when", "soon": "when", "far": "how far", "old": "how old"}
_TITLES = words_of(TITLES)
_MANNERS = words_of(MANNERS)
_AUXILIARIES = words_of(AUXILIARIES)


@dataclass(frozen=True, slots=True)
class Reading:
    """A question as the guards see it. `words`: lower case, in order, signs left out; `commons`:
    the common form of each, empty for a filler; `content`: those that are not empty; `capitals`:
    short words all of capitals (US, IT, WHO); `signs`: those that may be what is asked about. The
    others hold what their names say.

    Worked out once for all comparisons: `word_set`; `opposable`: words with their stems that have
    an opposite; `bared`: words that begin with a negating prefix, without it; `parts`: prepositions
    with what follows them; `movable`: numbers and names in order, as in `commons`."""

    text: str
    words: tuple[str, ...]
    word_set: frozenset[str]
    commons: tuple[str, ...]
    content: tuple[str, ...]
    stems: frozenset[str]
    names: frozenset[str]
    numbers: tuple[float | str, ...]
    negatives: tuple[str, ...]
    dates: frozenset[str]
    units: frozenset[str]
    quoted: frozenset[str]
    code: tuple[str, ...]
    num_negations: int
    questions: frozenset[str]
    tongue: str
    scripts: frozenset[str]
    capitals: tuple[str, ...]
    signs: tuple[str, ...]
    light: frozenset[str]
    roles: frozenset[str]
    opposable: tuple[tuple[str, str], ...]
    bared: frozenset[str]
    parts: tuple[tuple[str, str], ...]
    movable: tuple[str, ...]
    is_cut: bool


def read(text: str) -> Reading:
    """Take a question apart."""
    kept = _BARE_POINT.sub("0.", text[:LONGEST_CHARS].replace("\u2019", "'"))
    quoted = quoted_in(kept)
    code = code_in(kept)
    tokens = _TOKEN.findall(kept)
    words = tuple(token.lower() for token in tokens if token[0].isalnum())
    tongue = _tongue(words)
    stems = {word: stem(word) for word in dict.fromkeys(words)}
    numbers, commons, units = _counted(tokens, tongue, stems)
    names = _names(tokens)
    content = tuple(common for common in commons if common)
    scripts = _scripts(kept)
    if not scripts.isdisjoint(("han", "kana", "thai")):
        content = (*content, *_SPACELESS.findall(kept))
    return Reading(
        text=text,
        words=words,
        word_set=frozenset(stems),
        commons=commons,
        content=content,
        stems=frozenset(content),
        names=names,
        numbers=numbers,
        negatives=negatives_in(kept),
        dates=_dates(tokens, words),
        units=units,
        quoted=quoted,
        code=code,
        num_negations=_negations(words, tongue),
        questions=_questions(tokens),
        tongue=tongue,
        scripts=scripts,
        capitals=tuple(word for word in tokens if 1 < len(word) < 4 and word.isupper()),
        signs=signs_in(kept),
        light=light_in(words),
        roles=roles_in(words),
        opposable=opposable_in(stems),
        bared=_bared(stems),
        parts=parts_in(words, commons),
        movable=tuple(
            common
            for word, common in zip(words, commons, strict=True)
            if common and (word[0].isdigit() or word in names)
        ),
        is_cut=len(text) > LONGEST_CHARS,
    )


def _bared(words: Iterable[str]) -> frozenset[str]:
    """legal of illegal, happy of unhappy."""
    return frozenset(
        word[len(prefix) :]
        for word in words
        if len(word) > 5 and word.startswith(NEGATING_PREFIXES)
        for prefix in NEGATING_PREFIXES
        if word.startswith(prefix)
    )


def _counted(
    tokens: list[str], tongue: str, stems: Mapping[str, str]
) -> tuple[tuple[float | str, ...], tuple[str, ...], frozenset[str]]:
    """Numbers (sorted), the common form of each word (stem, value or unit; empty for a filler),
    units."""
    numbers: list[float | str] = []
    commons: list[str] = []
    units: set[str] = set()
    before = ""
    for token in tokens:
        word = token.lower()
        value = _number(word, tongue)
        unit = _UNITS.get(word)
        if value is not None:
            if numbers and before and _is_factor(word) and isinstance(numbers[-1], float):
                numbers[-1] = numbers[-1] * float(value)
            else:
                numbers.append(value)
            commons.append(str(value))
            before = word
            continue
        if unit is not None and (before or len(word) > 1 or not word.isalpha()):
            units.add(unit)
        elif before and word in ("k", "m", "bn") and numbers and isinstance(numbers[-1], float):
            numbers[-1] *= {"k": 1e3, "m": 1e6, "bn": 1e9}[word]
        before = ""
        if token[0].isalnum():
            commons.append(unit or _common(word, stems))
    return tuple(sorted(numbers, key=str)), tuple(commons), frozenset(units)


def _common(word: str, stems: Mapping[str, str]) -> str:
    """The stem of a word that means something by itself, else nothing; dates are seen to apart."""
    if "'" in word:
        if word.endswith("n't"):
            return ""
        if word[-2] in "'vrl":
            word = word.partition("'")[0]
    if len(word) < 2 or word in _FILLERS or (word in _DATES and word not in _DOUBTFUL):
        return ""
    return stems.get(word) or stem(word)


def _is_factor(word: str) -> bool:
    return word in ("hundred", "thousand", "million", "billion", "hundert", "tausend", "mille")


def _number(word: str, tongue: str) -> float | str | None:
    """A figure's value; a date or a version stays the string it is."""
    if word[0].isdigit():
        plain = word.replace(",", "") if _GROUPED.fullmatch(word) else word
        try:
            number = float(plain)
        except ValueError:
            return word
        return number if math.isfinite(number) else word
    value = NUMBERS.get(word)
    if value is None:
        return _compound(word) if "-" in word else None
    only = NUMBERS_ONLY_IN.get(word)
    return float(value) if only is None or only == tongue else None


_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def _compound(word: str) -> float | None:
    parts = [NUMBERS.get(part) for part in word.split("-")]
    known = [float(part) for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _names(tokens: list[str]) -> frozenset[str]:
    """Lower case of what is written as a name: a capital that no sentence's start explains, two
    capitals in a word, a place, a language, a product that the list has."""
    names = set()
    starts = True
    low = ""
    for token in tokens:
        if token in "?!.;:\uff1f。":
            starts = low not in _TITLES
            continue
        low = token.lower()
        if low in _KNOWN_NAMES:
            names.add(low)
        elif token[0].isupper() and low not in _DATES and low not in ("i", "i'm", "i've", "i'd"):
            num_capitals = sum(letter.isupper() for letter in token)
            if not starts or num_capitals > 1:
                names.add(low.removesuffix("'s"))
        starts = False
    return frozenset(names)


def _dates(tokens: list[str], words: tuple[str, ...]) -> frozenset[str]:
    dates = set()
    plain = [token for token in tokens if token[0].isalnum()]
    before = ""
    for i, word in enumerate(words):
        name = _DATES.get(word) or _DATES.get(word.removesuffix("s"))
        if name is not None:
            if word not in _DOUBTFUL or _is_date(plain[i], before):
                dates.add(name)
        elif before in _TIME_WORDS and word in _TIME_SPANS:
            dates.add(f"{before} {word}")
        before = word
    return frozenset(dates)


def _is_date(word: str, before: str) -> bool:
    """Of a word that may be an ordinary one: "May", "3 am", "in march", not "may" or "I am"."""
    if before[:1].isdigit():
        return True
    if word.lower() == "am":
        return False
    return before in _DATE_LEADS or (before != "" and word[0].isupper())


def _negations(words: tuple[str, ...], tongue: str) -> int:
    count = 0
    for word in words:
        if word in _NEGATIONS:
            only = NEGATIONS_ONLY_IN.get(word)
            count += only is None or only == tongue
        elif word.endswith(NEGATED_TAIL):
            count += 1
    return count


def _questions(tokens: list[str]) -> frozenset[str]:
    """What is asked for, of each sentence: who, when, where, why, how much..., whether."""
    kinds = set()
    begin = True
    for i, token in enumerate(tokens):
        word = token.lower()
        if token in "?!.;:\uff1f。":
            begin = True
            continue
        if word == "how" and begin and i + 1 < len(tokens) and tokens[i + 1].lower() == "come":
            kinds.add("why")
        elif word == "how" and i + 1 < len(tokens) and tokens[i + 1].lower() in _MEASURES:
            following = tokens[i + 1].lower()
            kinds.add(_HOW.get(following, f"how {following}"))
        elif word in _QUESTION_WORDS and (begin or word not in _ALSO_JOIN):
            kinds.add(_QUESTION_WORDS[word])
        elif begin and word in _AUXILIARIES and not _asks_to_tell(tokens, i):
            kinds.add("whether")
        elif begin and word == "how":
            kinds.add("how")
        elif begin and word in ("what", "what's") and _MANNERS.isdisjoint(tokens):
            kinds.add("what")
        begin = False
    return frozenset(kinds)


def _asks_to_tell(tokens: list[str], i: int) -> bool:
    """ "Can you...", "do you know...", "is there...": what is asked for comes later."""
    return i + 1 < len(tokens) and tokens[i + 1].lower() in ("you", "someone", "anyone", "there")


def _tongue(words: tuple[str, ...]) -> str:
    """The language most function words speak for; empty where none is ahead."""
    votes: dict[str, int] = {}
    for word in words:
        for tongue in _TONGUES.get(word, ()):
            votes[tongue] = votes.get(tongue, 0) + 1
    if not votes:
        return ""
    (best, most), *others = sorted(votes.items(), key=lambda item: -item[1])
    return best if not others or most > others[0][1] else ""


def _scripts(text: str) -> frozenset[str]:
    if text.isascii():
        return frozenset(("latin",))
    found = set()
    for letter in text:
        code = ord(letter)
        if code < 0x0250:
            if letter.isalpha():
                found.add("latin")
            continue
        for name, low, high in _SCRIPTS:
            if low <= code <= high:
                found.add(name)
                break
    return frozenset(found)
