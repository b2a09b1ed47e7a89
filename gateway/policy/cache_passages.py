"""Quotations and code in a question, for stage 4's guards (pure)."""

import re
from collections.abc import Iterator

_OPENING = re.compile(r"[\"\u201c\u201e\u00ab\u300c\u2018]|(?<![\w'])'")
_CLOSING = {
    '"': '"',
    "\u201c": "\u201d",
    "\u201e": "\u201c\u201d",
    "\u00ab": "\u00bb",
    "\u300c": "\u300d",
    "\u2018": "\u2019",
    "'": "'",
}
_LONGEST_QUOTED = 200
_LETTER = re.compile(r"\w")
_BACKTICKED = re.compile(r"```(.{0,2000}?)```|`([^`]{1,200}+)`", re.DOTALL)
# A run of signs, a call, a subscript, a dotted or underscored name, a flag, a path. Possessive
# throughout: what a client sends must not make a pattern search for ever.
_CODE = re.compile(
    r"(?<=\d )[-+*/^%](?= \d)|(?<!\S)[*/=<>!|^~]{1,3}(?!\S)"
    r"|(?<![\w.])\w++(?:\.\w++)*+\([^()]{0,200}+\)"
    r"|\b\w++\[[^\]]{0,100}+\]|\b[^\W\d]\w*+\.[a-z]\w++|\b[^\W_]++_\w++|(?<!\S)--?[A-Za-z][\w-]*+"
    r"|(?<![\w/])(?:/[\w.-]++){2,}+|\b\w\+\+|\bC#|\\\w\+?|\b\w++\s?[\^*]\s?\w++"
    r"|\([\w.]++ [-+*/^%] [\w.]++\)|(?<![\w/.~])(?:~|\.{1,2})/[\w./-]*+|(?<!\S)\.[A-Za-z_]\w*+"
    r"|(?<!\w)_++\w*+|(?<=\d)!|[=!<>]=|:=|&&|\|\||\+=|-=|[<>{}\[\]]|(?<=\()\d++(?=,)"
)
_CODE_SIGNS = re.compile(r"[-_(){}\[\]=<>+*^|&\\~/#%]|\w\.\w|(?<!\S)\.\w|\d!")
_NEGATIVE = re.compile(r"(?<![\w)\]%.,])[-\u2212](\d++(?:[.,]\d++)*+)")
_SIGN = re.compile(
    r"(?<!\S)(?=[^\w\s])(?![?!.\u2026]*+\s*+$)[^\w\s]++(?!\S)|(?<!\w)[-+!](?=\w)|(?<=\w),(?=[^\W\d])"
    r"|[^\w\s.,;:?!'\"\u2018\u2019\u201c\u201d()\u2026\u2013\u2014-]"
)
_INDENTED = re.compile(r"^[ \t]*+(?=\S)", re.MULTILINE)
_ABBREVIATED = re.compile(r"(?:e\.g|i\.e|a\.m|p\.m|u\.s|u\.k|etc)\.?", re.IGNORECASE)


def quoted_in(text: str) -> frozenset[str]:
    """What stands in quotation marks, in lower case."""
    return frozenset(" ".join(part.lower().split()).strip(" .,!?") for part in _quotations(text))


def _quotations(text: str) -> Iterator[str]:
    """From left to right, none within another. Each kind of mark is looked for once over the whole
    text, however many open."""
    closes: dict[str, int] = {}
    ended = 0
    for opening in _OPENING.finditer(text):
        mark, begin = opening[0], opening.end()
        if begin <= ended:
            continue
        close = closes.get(mark, 0)
        if close < begin:
            found = (text.find(closing, begin) for closing in _CLOSING[mark])
            close = min((at for at in found if at >= 0), default=len(text))
            closes[mark] = close
        is_word_after = mark == "'" and _LETTER.match(text, close + 1) is not None
        if close < len(text) and 0 < close - begin <= _LONGEST_QUOTED and not is_word_after:
            ended = close + 1
            yield text[begin:close]


def code_in(text: str) -> tuple[str, ...]:
    """Passages of code, in order, without blanks inside; and of lines of which some are indented,
    how far each is: b() within a loop and b() after it are not the same."""
    found = []
    if "\n " in text or "\n\t" in text:
        depths = (str(len(match[0].expandtabs(8))) for match in _INDENTED.finditer(text))
        found.append(f"indented:{','.join(depths)}")
    if "`" in text:
        for match in _BACKTICKED.finditer(text):
            found.append("".join((match[1] or match[2] or "").split()))
        text = _BACKTICKED.sub(" ", text)
    if _CODE_SIGNS.search(text) is None:
        return tuple(found)
    found += [
        "".join(match.split()) for match in _CODE.findall(text) if not _ABBREVIATED.match(match)
    ]
    return tuple(found)


def negatives_in(text: str) -> tuple[str, ...]:
    """Numbers with a minus of their own, sorted: -5, but not 4-5."""
    return tuple(sorted(_NEGATIVE.findall(text)))


def signs_in(text: str) -> tuple[str, ...]:
    """What is written and is neither read as words nor mere punctuation, in order: signs that stand
    alone or before a word, a comma within one, emoji."""
    return tuple(_SIGN.findall(text))
