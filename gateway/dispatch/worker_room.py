"""What a worker has left for one ticket, in figures: for explanations (stage 5).

capacity.py decides by the same figures; `lacks` says which of them is too small.
"""

from typing import Literal, NamedTuple, TypeAlias

Lacking: TypeAlias = Literal["worker not responding", "worker full", "not enough KV memory"]


class Room(NamedTuple):
    """What a worker has for one ticket, and what the ticket takes of it.

    fresh            the worker was heard of lately: an old status offers nothing
    leased_*         left of the model's own lease; the others are of all models together
    can_hold         it would fit if all models left that may
    has_refused      the worker has said that it never will
    gives_way        the ticket is of class batch: what is free is what that class may have, and
                     nobody makes room for it
    """

    worker_id: str
    fresh: bool
    running: int
    running_model: int
    free_requests: int
    leased_requests: int
    leased_tokens: int
    wanted_tokens: int
    free_kv_bytes: int
    wanted_kv_bytes: int
    can_hold: bool
    has_refused: bool
    gives_way: bool = False


def lacks(room: Room) -> Lacking | None:
    """What keeps a request from going there; None where it fits. As `fits`."""
    if not room.fresh:
        return "worker not responding"
    if room.free_requests < 1 or room.leased_requests < 1:
        return "worker full"
    short = room.wanted_tokens > room.leased_tokens or room.wanted_kv_bytes > room.free_kv_bytes
    waits = room.running_model or room.gives_way or not room.can_hold
    return "not enough KV memory" if room.has_refused or (short and waits) else None
