"""Where models are now, in one word each, from what the workers say."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final

from admin.live.fleet_watch import LiveState
from engine.protocol import ModelStatus

_ORDER: Final = ("resident", "loading", "draining", "warm", "failed", "cold")
KINDS: Final = {
    "resident": "ok",
    "loading": "busy",
    "draining": "busy",
    "warm": "off",
    "cold": "off",
    "failed": "bad",
    "quarantined": "bad",
}
ON_DEVICE: Final = ("resident", "loading", "draining")


@dataclass(frozen=True, slots=True)
class Place:
    """A model on the worker where it is nearest to being served.

    `load_s`: what a load takes, None where nobody knows yet. KV is in use by requests, or cached
    for reuse; models of one pack have it together.
    """

    state: str
    kind: str
    reason: str = ""
    load_s: float | None = None
    num_running: int = 0
    num_waiting: int = 0
    kv_bytes: int = 0
    cached_kv_bytes: int = 0
    num_replicas: int = 0


def places(live: LiveState, names: Iterable[str]) -> dict[str, Place]:
    """Each model's place."""
    rows: dict[str, list[ModelStatus]] = {}
    for worker in live.workers:
        for row in worker.models:
            rows.setdefault(row.model_id, []).append(row)
    return {name: _place(live, name, rows.get(name, [])) for name in names}


def place(live: LiveState, name: str, sharing: Collection[str] = ()) -> Place:
    """One model's. `sharing`: all names of its pack, of which workers count pages for one."""
    names = {name, *sharing}
    in_use, cached = (
        sum(
            worker.page_bytes * max(0, worker.pages.get(f"{each}/{kind}", 0))
            for worker in live.workers
            for each in names
        )
        for kind in ("kv", "kv_cached")
    )
    return replace(places(live, [name])[name], kv_bytes=in_use, cached_kv_bytes=cached)


def load_times(live: LiveState) -> dict[str, float]:
    """What a load of each model takes, in seconds, where some worker knows it."""
    names = {row.model_id for worker in live.workers for row in worker.models}
    found = {name: each.load_s for name, each in places(live, names).items()}
    return {name: load_s for name, load_s in found.items() if load_s is not None}


def models_in(live: LiveState, states: Iterable[str]) -> frozenset[str]:
    """Names of the models that some worker has in one of these states."""
    wanted = frozenset(states)
    return frozenset(
        row.model_id for worker in live.workers for row in worker.models if row.state in wanted
    )


def _place(live: LiveState, name: str, rows: list[ModelStatus]) -> Place:
    snapshot = live.dispatcher
    waiting = snapshot.waiting_by_model.get(name, 0)
    running = snapshot.running_by_model.get(name, 0)
    best = min(rows, key=lambda row: _ORDER.index(row.state), default=None)
    known_s = [row.load_s_estimate for row in rows if row.load_s_estimate >= 0]
    load_s = min(known_s) if known_s else None
    state: str = best.state if best is not None else "cold"
    reason = best.reason if best is not None else ""
    if name in snapshot.quarantined:
        state, reason = "quarantined", snapshot.quarantined[name]
    return Place(
        state,
        KINDS[state],
        reason,
        load_s,
        running,
        waiting,
        num_replicas=sum(row.state == "resident" for row in rows),
    )
