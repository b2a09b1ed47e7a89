"""How fast long work goes, and when it will be done. Pure.

A moving mean over the last seconds: what a download did ten minutes ago says nothing of now, and
what it did in the last second says too much.
"""

import math
from dataclasses import dataclass

HALF_LIFE_S = 5.0
STALLED_S = 60.0
"""What has done nothing for so long has no pace."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Speed of one piece of work, in whatever it is counted in, a second. `per_s` 0: not known."""

    at_s: float = 0.0
    done: float = 0.0
    per_s: float = 0.0
    seen_s: float = 0.0
    """Over how long it has been seen."""

    def at(self, now_s: float) -> float:
        """Of this moment: less and less where nothing was seen for a while, and then none."""
        lull_s = now_s - self.at_s
        if lull_s > STALLED_S:
            return 0.0
        return self.per_s * math.exp2(-max(0.0, lull_s - HALF_LIFE_S) / HALF_LIFE_S)

    def seen(self, done: float, now_s: float) -> "Pace":
        """It has come this far. Less than before: it is another piece of work."""
        passed_s = now_s - self.at_s
        if done < self.done or self.at_s == 0.0:
            return Pace(now_s, done)
        if passed_s <= 0:
            return self
        latest = (done - self.done) / passed_s
        # The first look weighs all, later ones as much as their time against the half-life.
        weight = 1.0 if self.seen_s == 0.0 else 1.0 - math.exp2(-passed_s / HALF_LIFE_S)
        per_s = self.per_s + weight * (latest - self.per_s)
        return Pace(now_s, done, per_s, self.seen_s + passed_s)
