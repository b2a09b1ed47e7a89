"""Which packs the host tier gives up for another one. Pure.

A load from the disk takes ten times as long as one from the host tier, so what lies there decides
the reload seconds more than who leaves the device. A pack is worth its model's demand x weight, a
byte, as on the device; one whose model is on the device now is worth `RESIDENT_SHARE` of that, for
it will not be read soon. Equal ones leave in the order of last use. A pack only comes in where it
is worth at least as much as all that it would push out: without that, every rare model that was
loaded once would push out a popular one (TinyLFU's admission: Einziger, Friedman, Manes 2017).
"""

from collections.abc import Sequence
from dataclasses import dataclass

RESIDENT_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class HeldPack:
    """A pack in the tier that nobody reads. `worth`: of keeping it, a byte."""

    revision: str
    num_bytes: int
    worth: float
    last_used: int


def choose_drops(
    num_bytes: int, worth: float, held: Sequence[HeldPack], num_free: int
) -> list[str] | None:
    """Revisions to drop so that `num_bytes` of that worth fit; None: it stays out."""
    short = num_bytes - num_free
    chosen: list[HeldPack] = []
    for pack in sorted(held, key=lambda pack: (pack.worth, pack.last_used)):
        if short <= 0:
            break
        chosen.append(pack)
        short -= pack.num_bytes
    if short > 0:
        return None
    for pack in reversed(chosen[:-1]):
        # The last one may have made an earlier, smaller one unnecessary.
        if short + pack.num_bytes <= 0:
            chosen.remove(pack)
            short += pack.num_bytes
    if sum(pack.worth * pack.num_bytes for pack in chosen) > worth * num_bytes:
        return None
    return [pack.revision for pack in chosen]
