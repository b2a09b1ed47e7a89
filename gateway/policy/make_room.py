"""What would have to leave a worker for a model of so many bytes: an outlook for people. Pure.

In placement's order (fleet_view.py): what nobody uses first, then by the seconds of loading lost
for each byte. When the load really comes the worker decides by what is asked for then, and weighs
pins, floors and how long a model has been there (engine/residency/).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gateway.policy.fleet_view import ModelView, WorkerView, load_seconds

Fit: TypeAlias = Literal["free", "evicts", "never"]


@dataclass(frozen=True, slots=True)
class Outlook:
    """free: it fits beside what is there; evicts: once `leavers` are gone; never: the arena is too
    small, or what is pinned leaves too little."""

    fit: Fit
    leavers: tuple[str, ...] = ()
    free_bytes: int = 0
    arena_bytes: int = 0


def outlook(view: WorkerView, num_bytes: int, asks_s: Mapping[str, float]) -> Outlook:
    """`asks_s`: how often each model is asked for, in asks a second."""
    if num_bytes <= view.free_bytes:
        return Outlook("free", (), view.free_bytes, view.arena_bytes)

    def loss(row: tuple[str, ModelView]) -> tuple[bool, float, str]:
        name, model = row
        worth = asks_s.get(name, 0.0) * load_seconds(model) / max(1, model.weight_bytes)
        return not model.idle, worth, name

    may_go = [
        (name, model)
        for name, model in view.models.items()
        if model.state == "resident" and not model.pinned
    ]
    spare, leavers = view.free_bytes, []
    for name, model in sorted(may_go, key=loss):
        spare += model.weight_bytes
        leavers.append(name)
        if spare >= num_bytes:
            return Outlook("evicts", tuple(leavers), view.free_bytes, view.arena_bytes)
    return Outlook("never", (), view.free_bytes, view.arena_bytes)
