"""What the score of stage 4's decision weighs (data; fitted by `python -m bench.cache_fit`)."""

from dataclasses import dataclass

NAMES = (
    "similarity",  # the lead's cosine
    "second",  # the next one of its group that passes the guards
    "margin",  # how much farther the nearest with another answer is
    "votes",  # its group's share of the neighbours, the nearer counting more
    "alike",  # how many neighbours are of its group
    "run",  # how many in a row from the first
    "record",  # comparisons of its group: log-odds
    "missing",  # content words of the question that none of its group has; 0 for a lone one
    "words",  # content words of the question; 0 for a lone one
    "elsewhere",  # their share that neighbours with other answers have; 0 for a lone one
    "lone",  # the lead is the only one of its group that passes
    "lone near",  # and its cosine, less 0.75
)


@dataclass(frozen=True, slots=True)
class Weights:
    """Of log-odds: one value for each of NAMES, and the bias."""

    values: tuple[float, ...]
    bias: float


FITTED = Weights(
    (2.601, 1.004, 5.063, 1.724, 0.859, 1.402, 0.266, -0.604, 0.396, -1.126, -0.014, 0.745),
    -3.843,
)
"""On banking77 and clinc150, run in shadow."""

PRIORS = ((1.0, 0.0), (2.244, -3.022), (1.0, 0.0))
"""For each class of evidence (`cache_confidence.CLASSES`), slope and bias from the score to the
log-odds that are believed before there are comparisons. The second: pairs of the same content."""
