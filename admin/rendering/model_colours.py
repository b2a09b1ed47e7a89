"""The colour of each model: the same on every page, and no two alike while there are eight.

A model prefers the colour of its name's hash. Where an older model has it, it takes the next one
that is free; past eight the colours come again under a pattern, up to NUM_SLOTS. So a new model
changes no other's colour, and every process comes to the same. Charts of other things (tenants,
keys) give colours by rank within the chart (`by_rank`).
"""

import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

NUM_COLOURS: Final = 8
NUM_HATCHES: Final = 4
NUM_SLOTS: Final = NUM_COLOURS * NUM_HATCHES
REFRESH_S: Final = 5.0


class ModelColours:
    """`find`: names of the models that are served, the oldest first; it may raise what a database
    that does not answer raises, and then what was known stays."""

    def __init__(
        self,
        find: Callable[[], Sequence[str]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find = find
        self._clock = clock
        self._slots: Mapping[str, int] = {}
        self._found_s = float("-inf")

    def classes(self, name: str) -> str:
        """Of a model's colour, and of its pattern, where it has one."""
        number = self.hatch(name)
        return f"c{self._slot(name) % NUM_COLOURS}" + (f" p{number}" if number else "")

    def fill(self, name: str) -> str:
        """The same colour in a picture, without the pattern."""
        return f"fill-c{self._slot(name) % NUM_COLOURS}"

    def hatch(self, name: str) -> int:
        """Which pattern lies over a model's colour; 0 is none."""
        return self._slot(name) // NUM_COLOURS

    def _slot(self, name: str) -> int:
        """A name that no served model has (a registration, a removed model) has its hash's."""
        now_s = self._clock()
        if now_s - self._found_s >= REFRESH_S:
            self._found_s = now_s
            self._slots = assign(self._find())
        return self._slots.get(name, _preferred(name))


def assign(names: Iterable[str]) -> dict[str, int]:
    """Slots of models, in the order in which they choose. After NUM_SLOTS they begin again."""
    slots: dict[str, int] = {}
    taken: set[int] = set()
    for number, name in enumerate(names):
        if number % NUM_COLOURS == 0:
            taken = set()
        level = number // NUM_COLOURS % NUM_HATCHES * NUM_COLOURS
        at = _preferred(name)
        while at in taken:
            at = (at + 1) % NUM_COLOURS
        taken.add(at)
        slots[name] = level + at
    return slots


def by_rank(refs: Iterable[str]) -> dict[str, str]:
    """Classes of a chart's parts, in their order; "" is the rest of them."""
    named = [ref for ref in refs if ref]
    return {ref: f"c{rank % NUM_COLOURS}" for rank, ref in enumerate(named)} | {"": "rest"}


def _preferred(name: str) -> int:
    return zlib.crc32(name.encode()) % NUM_COLOURS
