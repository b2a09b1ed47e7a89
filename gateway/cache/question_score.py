"""How likely it is that one answer serves two questions, from the questions alone.

An embedding model gives a question a vector, and each of its words a state. Seven figures compare
two questions by them (`FIGURES`); a logistic regression on pairs that were made for it
(`python -m bench.cache_train`) turns the figures into log-odds. The cosine of the two vectors alone
cannot tell "from Vienna to Prague" from "from Prague to Vienna", or "turn on" from "turn off": two
questions that share all words but one are closer than most paraphrases.

The weights are those of `question_weights.json` beside this file, which names the embedding model
that they were fitted with and what that model makes of one sentence (`PROBE`): by that it is known
again, however it was stored. For another model the weights are a guess, and nothing is answered by
them before comparisons have shown that they serve (`PairWeights.know`).
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gateway.cache.policy.cache_choice import PairView

FIGURES = (
    "cosine",  # of the two vectors
    "own match",  # of the words that only one question has, the mean of the best cosine with a word
    # of the other, 1 where it has none; of the two questions the worse one
    "numbers",  # 1: they have other numbers or signs
    "order",  # 1: they have the same words in another order
    "negation",  # 1: one of the two is negated
    "one word",  # 1: each has a single word of its own
    "frame",  # where each has words of its own: the share of their words that both have, squared
)
MAX_WORDS = 128
"""A longer question is answered only from one with the same words."""
PROBE = "What is the capital of France?"
LEAST_LOG_ODDS = -20.0
LEAST_AGREEMENT = 0.9
"""The cosine from which two answers may say the same."""
_MAX_CHARS = 2000
PROBED = 16
_PROBE_TOLERANCE = 0.01
_STEPS = 127
_NUMBER = re.compile(r"(?<![\w)])-\d+|\d+")
_NEGATION = re.compile(
    r"\b(?:not|no|never|without|cannot|nicht|kein\w*|ohne|pas|jamais|sans|sin|nunca|não|sem|senza"
    r"|non|niet|geen|zonder|не|нет|без|nie|bez|inte|utan)\b|n['\u2019]t\b",
    re.IGNORECASE,
)
_QUIET = (
    ".,;:?!\"'`\u2018\u2019\u201c\u201d\u201e\u2026"
    "\u00bf\u00a1\u00ab\u00bb\u3002\uff0c\uff1f\uff01\u3001"
)
WEIGHTS = Path(__file__).with_name("question_weights.json")


@dataclass(frozen=True, slots=True, eq=False)
class QuestionReading:
    """A question as it is compared.

    text        as it was asked
    words       lower case, in order, quiet punctuation left out
    states      int8 [words, H]: the state of each, of length 127
    numbers     numbers and signs, sorted
    is_negated  an odd number of negations
    """

    text: str
    words: tuple[str, ...]
    states: NDArray[np.int8]
    numbers: tuple[str, ...]
    is_negated: bool

    @property
    def num_bytes(self) -> int:
        """No less than it takes."""
        parts = len(self.words) + len(self.numbers)
        return self.states.nbytes + 4 * len(self.text) + 100 * parts + 1000

    @property
    def plain(self) -> str:
        """The text but for capitals, blanks, and punctuation at its ends."""
        return " ".join(self.text.casefold().split()).strip(_QUIET + " ")


@dataclass(frozen=True, slots=True)
class PairWeights:
    """Of log-odds: one value for each of FIGURES, and the bias. `probe`: the first numbers of
    PROBE's vector."""

    model: str
    values: tuple[float, ...]
    bias: float
    probe: tuple[float, ...]

    def know(self, vector: NDArray[np.float32]) -> bool:
        """Whether it is their model that has made this vector of PROBE."""
        first = vector[:PROBED]
        known = np.array(self.probe, np.float32)
        return len(first) == len(known) and bool(np.abs(first - known).max() <= _PROBE_TOLERANCE)


@cache
def fitted() -> PairWeights:
    """Those that come with the gateway."""
    found = json.loads(WEIGHTS.read_text(encoding="utf-8"))
    values = tuple(float(found["values"][name]) for name in FIGURES)
    return PairWeights(found["model"], values, float(found["bias"]), tuple(found["probe"]))


def read_question(
    text: str, spans: Sequence[tuple[int, int]], states: NDArray[np.float32]
) -> QuestionReading:
    """`spans`: where in the text each word lies; `states` [words, H]: the state of each."""
    found = [text[begin:end].lower().strip(_QUIET + " ") for begin, end in spans]
    kept = [i for i, word in enumerate(found) if word][: MAX_WORDS + 1]
    words = tuple(found[i] for i in kept)
    norms = np.maximum(np.linalg.norm(states[kept], axis=1, keepdims=True), 1e-9)
    signs = [word for word in words if word != "-" and not any(map(str.isalnum, word))]
    return QuestionReading(
        text,
        words,
        np.rint(states[kept] / norms * _STEPS).astype(np.int8),
        (*sorted(_NUMBER.findall(text[:_MAX_CHARS])), *sorted(signs)),
        len(_NEGATION.findall(text[:_MAX_CHARS])) % 2 == 1,
    )


def view(
    asked: QuestionReading, kept: QuestionReading, cosine: float, weights: PairWeights | None = None
) -> PairView:
    """`cosine`: of their vectors."""
    is_same = asked.plain == kept.plain
    if not 0 < len(asked.words) <= MAX_WORDS or not 0 < len(kept.words) <= MAX_WORDS:
        covers = (0.0,) * len(asked.words)
        return PairView(LEAST_LOG_ODDS, covers, is_same, kept.numbers)
    likes = _likes(asked, kept)
    weights = weights or fitted()
    found = figures_of(asked, kept, cosine, likes)
    terms = (weight * figure for weight, figure in zip(weights.values, found, strict=True))
    return PairView(weights.bias + sum(terms), tuple(likes.max(1).tolist()), is_same, kept.numbers)


def figures_of(
    a: QuestionReading,
    b: QuestionReading,
    cosine: float,
    likes: NDArray[np.float32] | None = None,
) -> tuple[float, ...]:
    """In the order of FIGURES; `likes`: the cosines of their words. Symmetric."""
    likes = _likes(a, b) if likes is None else likes
    counts = Counter(a.words), Counter(b.words)
    own = _own(a.words, counts[1]), _own(b.words, counts[0])
    matches = likes.max(1)[own[0]], likes.max(0)[own[1]]
    shared = (counts[0] & counts[1]).total()
    share = shared / (len(a.words) + len(b.words) - shared) if own[0] and own[1] else 0.0
    return (
        cosine,
        min(float(found.mean()) if len(found) else 1.0 for found in matches),
        float(a.numbers != b.numbers),
        float(not own[0] and not own[1] and a.words != b.words),
        float(a.is_negated != b.is_negated),
        float(len(own[0]) == len(own[1]) == 1),
        share * share,
    )


def agrees(a: QuestionReading, b: QuestionReading, cosine: float) -> bool:
    """Whether these answers may stand for one another, to teach by. Of texts too long for the score
    the cosine and the numbers decide."""
    if cosine < LEAST_AGREEMENT or a.numbers != b.numbers:
        return False
    is_long = max(len(a.words), len(b.words)) > MAX_WORDS
    return is_long or view(a, b, cosine).log_odds > 0


def _likes(a: QuestionReading, b: QuestionReading) -> NDArray[np.float32]:
    """[words of a, words of b]."""
    likes: NDArray[np.float32] = a.states.astype(np.float32) @ b.states.astype(np.float32).T
    return likes / np.float32(_STEPS * _STEPS)


def _own(words: Sequence[str], others: Counter[str]) -> list[int]:
    """The places of the words that the other question does not have, or has less often."""
    seen = Counter[str]()
    places = []
    for place, word in enumerate(words):
        seen[word] += 1
        if seen[word] > others[word]:
            places.append(place)
    return places
