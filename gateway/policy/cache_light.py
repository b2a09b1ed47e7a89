"""The light words of a question, for stage 4's guards (pure).

Most fillers (`cache_words.FILLERS`) tell no two questions apart. Here are two things that do: a few
of them that may be what a question turns on (used up, another, trouble), and who does it to whom
where that is I and you: "can I call you..." asks for something else than "can you call me...".
"""

import re
from collections.abc import Sequence

from gateway.policy.cache_words import ADDRESS, LIGHT

_ALIKE = {"used": "use", "using": "use", "takes": "take", "taking": "take", "things": "thing"}
_ALIKE |= {"works": "work", "working": "work", "someone": "anyone", "something": "anything"}
_LIGHT = frozenset(LIGHT.split())
_ADDRESS = re.compile(rf"\b(?:{'|'.join(ADDRESS.strip().splitlines())})\b")
_BY_ME = re.compile(r"\b(?:i|we) (?:\S+ ){0,3}?you\b")
_TO_ME = re.compile(r"\byou (?:\S+ ){0,3}?(?:me|us)\b")


def light_in(words: Sequence[str]) -> frozenset[str]:
    """The light words among these, in their common form."""
    return frozenset(_ALIKE.get(word, word) for word in words if word in _LIGHT)


def roles_in(words: Sequence[str]) -> frozenset[str]:
    """What the one who asks does to the one who is asked ("by me"), and the other way ("to me");
    what only addresses ("can you tell me") left out."""
    if "you" not in words:
        return frozenset()
    plain = _ADDRESS.sub(" ", " ".join(words))
    found = (("by me", _BY_ME.search(plain)), ("to me", _TO_ME.search(plain)))
    return frozenset(role for role, match in found if match)
