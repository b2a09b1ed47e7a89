"""Questions as they are compared, without a model: each word has a state of its own, but for those
that are said to mean the same.
"""

import re
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from gateway.cache.policy.cache_choice import KeptCandidate, PairView
from gateway.cache.policy.cache_confidence import Confidence
from gateway.cache.question_score import QuestionReading, read_question

H = 64
SAME = {"delete": "remove", "quickest": "fastest"}
"""Words with one state."""


def state_of(word: str) -> NDArray[np.float32]:
    """Nearly orthogonal to those of all other words."""
    rng = np.random.default_rng(crc32(SAME.get(word.lower(), word.lower()).encode()))
    return rng.standard_normal(H).astype(np.float32)


def reading_of(text: str) -> QuestionReading:
    """As an embedder would have it."""
    spans = [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]
    states = np.array([state_of(text[a:b]) for a, b in spans], np.float32).reshape(-1, H)
    return read_question(text, spans, states)


def candidate(
    entry_id: str = "e1",
    similarity: float = 0.9,
    log_odds: float = 0.0,
    record: Confidence | None = None,
    *,
    numbers: tuple[str, ...] = (),
    covers: tuple[float, ...] = (1.0, 0.5),
    is_same: bool = False,
) -> KeptCandidate:
    """A neighbour that says this."""
    pair = PairView(log_odds, covers, is_same, numbers)
    return KeptCandidate(entry_id, similarity, record or Confidence(), pair)
