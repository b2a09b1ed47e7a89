"""What all scenarios of `bench.sim_compare` are given, and what a run of one comes to."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """`seconds`: of a run, None for the scenario's own. The others are of `popularity`."""

    seconds: float | None = None
    data: Path | None = None
    traces: tuple[str, ...] = ("arena27_multimodel:requests=3000", "servegen:rate=3,requests=3000")
    models: tuple[int, ...] = (25,)
    memory: tuple[float, ...] = (0.2, 0.35, 0.5)
    mix: str = "mixed"
