"""The common form of a word, for stage 4's guards (pure): plural, tense and synonyms taken off."""

from gateway.policy.cache_words import SYNONYMS


def first_of_line(text: str) -> dict[str, str]:
    """A list's word to the first word of its line."""
    rows = (line.split() for line in text.strip().splitlines())
    return {word: row[0] for row in rows if row for word in row}


_SYNONYMS = first_of_line(SYNONYMS)


def stem(word: str) -> str:
    """A crude common form: plural, third person, past, gerund; one word of a line of synonyms."""
    same = _SYNONYMS.get(word)
    if same is not None:
        return same
    if word.endswith("'s"):
        word = word[:-2]
    size = len(word)
    if size > 5 and word.endswith("ing"):
        word = word[:-3]
    elif size > 4 and word.endswith(("ied", "ies")):
        word = word[:-3] + "y"
    elif size > 4 and word.endswith("ed"):
        word = word[:-2]
    elif size > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
        if size > 4 and word.endswith(("xe", "she", "che", "sse", "oe")):
            word = word[:-1]
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "lse":
        word = word[:-1]
    if len(word) > 3 and word.endswith("e"):
        word = word[:-1]
    return _SYNONYMS.get(word) or _SYNONYMS.get(word + "e", word)
