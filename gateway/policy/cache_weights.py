"""What the score of stage 4's decision weighs (data; fitted by `python -m bench.cache_fit`)."""

from dataclasses import dataclass

NAMES = ("similarity", "margin", "votes", "alike", "run", "record")


@dataclass(frozen=True, slots=True)
class Weights:
    """Of log-odds: one value for each of NAMES, and the bias."""

    values: tuple[float, ...]
    bias: float


FITTED = Weights((3.785, 2.757, 2.131, 1.644, 1.655, 0.342), -4.643)
"""On banking77 and clinc150, run in shadow."""
