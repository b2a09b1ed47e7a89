"""Requests in columns: what the sources of a workload and the patterns on top hand to each other.

Lives here: `Batch`, its order and its joining, and random numbers that belong to a row. Does not:
traces, rates, tenants. A batch covers a window of simulated time; a workload is a row of batches,
so a million requests are never in memory at once.

Random draws are functions of (seed, what for, the row's key), not of a generator's state: a row
gets the same tenant whatever window it falls in and whatever patterns lie on top of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

UNKNOWN = -1
"""In `tenant` and `model`: to be drawn."""
MASK = (1 << 64) - 1


@dataclass(slots=True)
class Batch:
    """Rows in order of time; all columns are equally long.

    key      of this row alone
    group    of its conversation: rows with the same group have one tenant and one model, else
             shared beginnings would not be shared (the prefix cache is salted by tenant)
    blocks   ids of the prompt's blocks, or None: the prompt shares nothing
    base     added to a row's block ids; copies and laps of a trace do not share text
    """

    at_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    tenant: Ints
    model: Ints
    key: Keys
    group: Keys
    base: Ints
    blocks: npt.NDArray[np.object_]

    def __len__(self) -> int:
        return len(self.at_s)

    def take(self, rows: npt.NDArray[Any]) -> "Batch":
        """The rows at these places, or where the mask is true."""
        return Batch(*(getattr(self, field.name)[rows] for field in fields(self)))

    def in_order(self) -> "Batch":
        """Sorted by time; equal times in order of the key, so that the order is no accident."""
        return self.take(np.lexsort((self.key, self.at_s)))


def join(batches: Sequence[Batch]) -> Batch:
    """One batch of all, in order of time."""
    filled = [batch for batch in batches if len(batch)]
    if not filled:
        return fresh(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64), keys_of(0))
    if len(filled) == 1:
        return filled[0].in_order()
    columns = [
        np.concatenate([getattr(batch, field.name) for batch in filled]) for field in fields(Batch)
    ]
    return Batch(*columns).in_order()


def fresh(at_s: Floats, prompt_tokens: Ints, output_tokens: Ints, key: Keys) -> Batch:
    """Rows that share no text and belong to nobody yet."""
    unknown = np.full(len(at_s), UNKNOWN, np.int64)
    return Batch(
        at_s=at_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        tenant=unknown,
        model=unknown.copy(),
        key=key,
        group=key,
        base=np.zeros(len(at_s), np.int64),
        blocks=np.full(len(at_s), None, np.object_),
    )


def keys_of(number: int, *salts: int | str) -> Keys:
    """`number` keys, of 0, 1, 2, ... under the salts."""
    return mixed(np.arange(number, dtype=np.uint64), *salts)


def mixed(keys: npt.NDArray[Any], *salts: int | str) -> Keys:
    """New keys, of the old ones and the salts (splitmix64 a round)."""
    values = keys.astype(np.uint64)
    for salt in salts:
        values = _splitmix(values ^ np.uint64(_number(salt)))
    return values


def uniform(keys: npt.NDArray[Any], *salts: int | str) -> Floats:
    """A number of [0, 1) for each key."""
    return (mixed(keys, *salts) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def rng(*salts: int | str) -> np.random.Generator:
    """A generator of its own for these salts."""
    return np.random.default_rng([_number(salt) for salt in salts])


def _number(salt: int | str) -> int:
    if isinstance(salt, int):
        return salt & MASK
    value = 0xCBF29CE484222325  # FNV-1a: Python's own hash of a string differs between processes
    for byte in salt.encode():
        value = ((value ^ byte) * 0x100000001B3) & MASK
    return value


def _splitmix(values: Keys) -> Keys:
    """Steele, Lea, Flood: "Fast splittable pseudorandom number generators" (2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
