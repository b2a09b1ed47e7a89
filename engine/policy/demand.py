"""How much a model is wanted: device seconds spent for it, decayed by two half-lives. Pure.

Service and not calls: a thousand one-token pings keep nothing on the device. The fast half-life
follows a burst and forgets it, the slow one remembers who comes again and again; what a model is
taken to be wanted is the mean of the two rates. What was popular an hour ago ages by itself, and
between two models that both rest, the one whose demand was a single burst ages sooner.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HalfLives:
    """Seconds in which service counts half."""

    fast_s: float = 10.0
    slow_s: float = 120.0


HALF_LIVES = HalfLives()


@dataclass(frozen=True, slots=True)
class Demand:
    """Decayed service of one model: `fast_s` and `slow_s` device seconds as of `at_s`."""

    fast_s: float = 0.0
    slow_s: float = 0.0
    at_s: float = 0.0

    def added(self, service_s: float, now_s: float, half_lives: HalfLives = HALF_LIVES) -> "Demand":
        """With `service_s` more at `now_s`."""
        return self.added_often(((now_s, service_s),), half_lives)

    def added_often(
        self, services: Sequence[tuple[float, float]], half_lives: HalfLives = HALF_LIVES
    ) -> "Demand":
        """With each (now, service) more, in their order."""
        fast_s, slow_s, at_s = self.fast_s, self.slow_s, self.at_s
        by_fast, by_slow = -1.0 / half_lives.fast_s, -1.0 / half_lives.slow_s
        for now_s, more_s in services:
            past_s = max(0.0, now_s - at_s)
            fast_s = fast_s * math.exp2(past_s * by_fast) + more_s
            slow_s = slow_s * math.exp2(past_s * by_slow) + more_s
            at_s = now_s
        return Demand(fast_s, slow_s, at_s)

    def rate(self, now_s: float, half_lives: HalfLives = HALF_LIVES) -> float:
        """Device seconds a second: under steady load, the model's share of the device."""
        past_s = max(0.0, now_s - self.at_s)
        fast = self.fast_s * math.exp2(-past_s / half_lives.fast_s) / half_lives.fast_s
        slow = self.slow_s * math.exp2(-past_s / half_lives.slow_s) / half_lives.slow_s
        return (fast + slow) * (math.log(2) / 2)
