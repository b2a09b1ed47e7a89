"""Where else a load could have gone, and why it did not (pure): for the record of the decision.

placement.py decides; this restates its order of preference for people. The worker that was chosen
is compared with MAX_OTHERS others, those that placement would have looked at first.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from gateway.dispatch.policy.fleet_view import (
    LoadOption,
    ModelView,
    PushedOut,
    WeightRoom,
    load_seconds,
)
from gateway.dispatch.policy.reasons import Reason

MAX_OTHERS = 3
"""Workers of one record beside the chosen one."""


Option: TypeAlias = tuple[WeightRoom, ModelView]
Cost: TypeAlias = Callable[[WeightRoom, ModelView], tuple[float, PushedOut | None]]
"""Seconds until the load could begin there, and what it pushes out; None: too little would go."""


def considered(
    options: Sequence[Option], chosen: WeightRoom, reason: Reason, cost: Cost
) -> tuple[LoadOption, ...]:
    """The chosen one first, then others in the order of `options`. Nothing where there was only
    one. Call it before the load is claimed."""
    if len(options) < 2:
        return ()
    ordered = sorted(options, key=lambda option: option[0] is not chosen)
    found = [_option(room, model, cost) for room, model in ordered[: 1 + MAX_OTHERS]]
    first = found[0]._replace(outcome="chosen", wait_s=0.0)
    weight_bytes = ordered[0][1].weight_bytes
    return (first, *(_judged(first, other, reason, weight_bytes) for other in found[1:]))


def _option(room: WeightRoom, model: ModelView, cost: Cost) -> LoadOption:
    wait_s, pushed = cost(room, model)
    return LoadOption(
        room.view.worker_id,
        "equal" if pushed is not None else "not enough memory",
        model.state == "warm",
        load_seconds(model),
        wait_s,
        0.0 if pushed is None else pushed.loss_s,
        room.free_bytes,
    )


def _judged(first: LoadOption, other: LoadOption, reason: Reason, weight_bytes: int) -> LoadOption:
    """By which of placement's rules, in their order, it came behind the first."""
    outcome = other.outcome
    if outcome == "equal":
        if first.free_bytes >= weight_bytes > other.free_bytes:
            outcome = "models would have to leave"
        elif other.loss_s > 0.0 == first.loss_s:
            outcome = "models in demand would have to leave"
        elif other.wait_s > first.wait_s:
            outcome = "begins later"
        elif other.loss_s > first.loss_s:
            outcome = "pushes more out"
        elif first.is_warm and not other.is_warm:
            outcome = "loads from disk"
        elif other.free_bytes < first.free_bytes:
            outcome = "less free memory"
        elif reason == "higher value":
            outcome = "its models are worth more"
    return other._replace(outcome=outcome)
