"""Class batch: when its deadline makes a request an ordinary one, and when a load pays (pure).

A request of class batch has what other requests leave, and no share of what they want. So it has a
window: the time that its batch may take, or its time in the queue where it is nobody's line. Once
it is expected to end in the last fifth of that, it becomes `standard`: it joins its tenant's other
requests in the fair order.

Its load is worth less than theirs, too. It takes free memory, or that of models that nobody wants,
and only where it pays: where the load is a small part of the work that waits for it, or where that
has waited so long that even at WAIT_WORTH of the value of other requests' time (the weight of the
class) it has cost as much as the load (the rule of ski rental, as in placement.py). So lines of one
model are run together while it is there, and a single line waits for twenty load times.
"""

from collections.abc import Container, Iterable
from typing import NamedTuple

from gateway.dispatch.policy.fleet_view import (
    AskRate,
    Demand,
    WeightRoom,
    WorkerView,
    load_seconds,
)

PRESSURE_SHARE = 0.8
"""Of a window: what is expected to end later than that is under pressure."""
LOAD_SHARE = 0.2
"""A load pays where it is at most this share of the work that waits for it."""
WAIT_WORTH = 0.05
"""Of the time of other requests: registry/accounts/tenants.py has the same factor."""


class Window(NamedTuple):
    """From when to when a request of class batch may take, in seconds of the dispatcher's clock."""

    began_s: float
    ends_s: float


def is_pressed(window: Window, now_s: float, left_s: float) -> bool:
    """Whether what still takes `left_s` is expected to end in the window's last part, or later."""
    began_s, ends_s = window
    return now_s + left_s >= began_s + PRESSURE_SHARE * (ends_s - began_s)


def load_pays(demand: Demand, load_s: float) -> bool:
    """Whether a load of so many seconds is worth it for requests of class batch alone."""
    shared = load_s <= LOAD_SHARE * demand.backlog_s
    return shared or load_s <= WAIT_WORTH * demand.waited_s


def worker_for(
    demand: Demand,
    workers: Iterable[WorkerView],
    wanted: Container[str],
    asks_s: AskRate,
    max_load_share: float,
    now_s: float,
) -> WorkerView | None:
    """Where requests of class batch may have their model loaded now; None: nowhere.

    Only where no load or drain is under way and nothing that is in demand has to leave. What runs
    others of the class leaves, too, but only where the oldest request has waited at WAIT_WORTH for
    as long as both loads take: so models take turns of some length. A warm copy goes before a cold
    one, then the emptiest worker.
    """
    found: list[tuple[bool, bool, int, str, WorkerView]] = []
    for view in workers:
        if view.is_moving or view.kv_short:
            continue
        room = WeightRoom(view, 0, wanted, asks_s)
        model = room.loadable(demand)
        if model is None or not load_pays(demand, load_seconds(model)):
            continue
        pushed = room.push_out(model, demand, max_load_share)
        if pushed is None or pushed.num_in_demand:
            continue
        again_s = 0.0
        if pushed.num_batch:
            again_s = load_seconds(model) + pushed.batch_s
            if again_s > WAIT_WORTH * (now_s - demand.oldest_s):
                continue
        key = (again_s > 0, model.state != "warm", -room.free_bytes, view.worker_id)
        found.append((*key, view))
    return min(found)[4] if found else None
