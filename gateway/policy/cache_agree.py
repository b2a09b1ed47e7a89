"""Stage 4: whether two answers say the same (pure).

The judge behind everything the cache learns: a fresh answer beside the one it would have given.
Equal but for blanks and case is agreement. Otherwise the answers' vectors must be near, and what
differs between them must not be a number, a name, a quotation, a negation, code... the same guards
that keep questions apart. Doubt is disagreement: it costs a hit, never a wrong answer.
"""

from gateway.policy.cache_guards import differences

LEAST_SIMILARITY = 0.9
# In an answer the order of the words and the kind of question are no evidence.
_NO_MATTER = frozenset(("order", "question"))


def agrees(a: str, b: str, similarity: float | None) -> bool:
    """Whether these answers may stand for one another; `similarity` is the cosine of their
    vectors, None where they were not embedded (then only equal ones agree)."""
    left, right = a.split(), b.split()
    if [word.lower() for word in left] == [word.lower() for word in right]:
        return True
    if similarity is None or similarity < LEAST_SIMILARITY:
        return False
    return _NO_MATTER.issuperset(differences(a, b))
