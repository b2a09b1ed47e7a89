"""Named distributions of prompt and answer lengths, for workloads that bring none.

Lives here: log-normal lengths and their parameters. Does not: lengths of real requests (traces.py).
"""

from dataclasses import dataclass

import numpy as np

from bench.sim.batches import Floats, Ints, Keys, uniform


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Median, deviation of the logarithm, and the most; 1 is the least."""

    median: float
    sigma: float
    most: int

    def at(self, keys: Keys, what: str) -> Ints:
        """A length for each key."""
        values = np.rint(self.median * np.exp(self.sigma * normal(keys, what)))
        return np.clip(values, 1, self.most).astype(np.int64)


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Prompt and answer, drawn apart."""

    prompt: Lognormal
    output: Lognormal

    def draw(self, keys: Keys) -> tuple[Ints, Ints]:
        """Lengths of prompt and answer for each key."""
        return self.prompt.at(keys, "prompt"), self.output.at(keys, "output")


# Medians and p90/p50 of published traces: chat and code of the Azure LLM inference traces of 2023
# (1020 to 2735 and 129 to 424 tokens; 1469 to 5194 and 13 to 55), summary of arXiv articles as
# summarised in Vidur's traces, short of the arena log in the VTC artifact (40 to 432, 211 to 513),
# long of Mooncake's conversations (6909 to 27367 and 350 to 597). sigma = ln(p90/p50) / 1.2816.
DISTRIBUTIONS: dict[str, LengthDistribution] = {
    "chat": LengthDistribution(Lognormal(1020, 0.77, 8192), Lognormal(129, 0.93, 2048)),
    "code": LengthDistribution(Lognormal(1469, 0.99, 8192), Lognormal(13, 1.13, 1024)),
    "short": LengthDistribution(Lognormal(40, 1.86, 2048), Lognormal(211, 0.69, 1024)),
    "summary": LengthDistribution(Lognormal(2710, 0.24, 4096), Lognormal(171, 0.63, 2048)),
    "long": LengthDistribution(Lognormal(6909, 1.07, 65536), Lognormal(350, 0.42, 2048)),
}


def normal(keys: Keys, *salts: int | str) -> Floats:
    """A standard normal number for each key (Box and Muller)."""
    radius = np.sqrt(-2.0 * np.log1p(-uniform(keys, *salts, "radius")))
    return np.asarray(radius * np.cos(2.0 * np.pi * uniform(keys, *salts, "angle")))
