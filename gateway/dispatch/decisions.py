"""What was done to queues and models, and why: bounded records for operators.

`DecisionLog` has one record for every decision about models and queues, `ResidencyLog` what
happened to models on workers in the last hour. Decisions are recorded where they are made:
placement (loads, and loads that are not due yet), the workers' evictions, refusals, quarantines.
The records are read by operators (`polyhost decisions`, explain.py) and written to the log, one
line each, as key=value. Nothing here decides anything, and nothing reads it to decide.

    kind        reason
    load        why the model goes onto that worker now
    held        why somebody waits for a model and no load is started: said at every look, kept once
    warm        why its weights go into the host tier ahead of need
    unload      why the gateway has a worker give the pages back
    eviction    what the worker made room for, and what it made of every candidate
    refusal     why requests were answered 429 or 503 without a try
    quarantine  why the model is not served for a while

What is said again and again (`held`, `refusal`) for the same model, worker and reason is one record
with a count and the last time; it ends when the model is loaded, or after MERGE_S of silence.

Times are the dispatcher's clock. Whoever shows them to people adds the offset to the wall clock.
"""

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import msgspec

from engine.protocol import (
    Layout,
    ResidencyState,
    SwapCandidate,
    SwapChoice,
    SwapRecord,
    WorkerStatus,
)
from gateway.dispatch.policy.fleet_view import LoadOption
from gateway.dispatch.policy.reasons import DecisionFigures, Kind, Reason

logger = logging.getLogger(__name__)

PER_MODEL = 16
"""Records kept of one model: what happened to it stays readable whatever others do."""
OVERALL = 1024
"""Records kept in the order they came: minutes of a busy gateway, one or two MB."""
MAX_MODELS = 512
"""Models with records of their own; those nobody decided about for longest are forgotten."""
MAX_CANDIDATES = 16
"""Of one eviction: those who go, then the least worth of those who stay."""
MAX_GOING_ON = 64
"""Of one model: what may be said again and is then counted, by reason, worker and tenant."""
MERGE_S = 60.0
"""After so long without it, what is said again is a new record."""
LOG_AGAIN_S = 10.0
"""A record that goes on is logged again at most so often."""

_MERGED: frozenset[Kind] = frozenset({"held", "refusal"})


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """One decision. `model` is whom it is about: of an eviction, the incoming model.

    tenant       where it is about one tenant's requests
    detail       what the words above do not say, for people
    count        how often it was said, the last time at `last_s`
    candidates   of an eviction
    workers      of a load that had a choice: the chosen one first
    """

    at_s: float
    kind: Kind
    reason: Reason
    model: str = ""
    worker: str = ""
    figures: DecisionFigures | None = None
    tenant: str = ""
    detail: str = ""
    candidates: tuple[SwapCandidate, ...] = ()
    workers: tuple[LoadOption, ...] = ()
    count: int = 1
    last_s: float = 0.0

    @property
    def about(self) -> tuple[str, ...]:
        """Every model whose fate this was."""
        gone = (c.model_id for c in self.candidates if not c.outcome.startswith("kept"))
        return tuple(dict.fromkeys([*([self.model] if self.model else []), *gone]))


@dataclass(slots=True, eq=False)
class _Kept:
    """A record and what has been added to it since."""

    record: DecisionRecord
    figures: DecisionFigures | None
    last_s: float
    logged_s: float
    count: int = 1

    def frozen(self) -> DecisionRecord:
        """As of now."""
        record = self.record
        return DecisionRecord(
            record.at_s,
            record.kind,
            record.reason,
            record.model,
            record.worker,
            self.figures,
            record.tenant,
            record.detail,
            record.candidates,
            record.workers,
            self.count,
            self.last_s,
        )


_Key: TypeAlias = tuple[Kind, Reason, str, str, str]


class DecisionLog:
    """The last decisions, by model and overall, and how many there were of each reason."""

    def __init__(
        self, per_model: int = PER_MODEL, overall: int = OVERALL, max_models: int = MAX_MODELS
    ) -> None:
        self._per_model = per_model
        self._max_models = max_models
        self._all: deque[_Kept] = deque(maxlen=overall)
        self._by_model: OrderedDict[str, deque[_Kept]] = OrderedDict()
        self._going_on: dict[str, dict[_Key, _Kept]] = {}
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, record: DecisionRecord) -> None:
        """Keep it, count it, log it; or add it to what it says again.

        A `held` that goes on counts once, whatever the number of looks; a refusal each time.
        """
        key = (record.kind, record.reason, record.model, record.worker, record.tenant)
        if record.kind in _MERGED:
            going_on = self._going_on.get(record.model, {}).get(key)
            if going_on is not None and record.at_s - going_on.last_s < MERGE_S:
                self._again(going_on, record)
                return
        else:
            self._going_on.pop(record.model, None)
        kept = _Kept(record, record.figures, record.at_s, record.at_s)
        self._counts[record.kind, record.reason] += 1
        self._all.append(kept)
        for model in record.about:
            self._of_model(model).append(kept)
        if record.kind in _MERGED:
            going_on_now = self._going_on.setdefault(record.model, {})
            going_on_now[key] = kept
            if len(going_on_now) > MAX_GOING_ON:
                del going_on_now[next(iter(going_on_now))]
        self._log(kept, logging.ERROR if record.kind == "quarantine" else logging.INFO)

    def add_choices(self, worker_id: str, choices: Iterable[SwapChoice], now_s: float) -> None:
        """What a worker decided about who leaves."""
        for choice in choices:
            self.add(of_choice(worker_id, choice, now_s))

    def last(self, kind: Kind, model: str | None = None, limit: int = 1) -> list[DecisionRecord]:
        """The last ones of this kind, the latest first; of one model, or of all."""
        kept = self._all if model is None else self._by_model.get(model, ())
        found = (entry.frozen() for entry in reversed(kept) if entry.record.kind == kind)
        return list(islice(found, limit))

    def recent(self, model: str | None = None, limit: int = 100) -> list[DecisionRecord]:
        """The last ones, the latest first; of one model, or of all."""
        kept = self._all if model is None else self._by_model.get(model, ())
        frozen = [entry.frozen() for entry in reversed(kept)]
        frozen.sort(key=lambda record: record.last_s, reverse=True)
        return frozen[:limit]

    def counts(self) -> Mapping[tuple[str, str], int]:
        """By kind and reason, since the start."""
        return self._counts

    def _again(self, kept: _Kept, record: DecisionRecord) -> None:
        kept.count += 1
        kept.last_s = record.at_s
        kept.figures = record.figures
        if record.kind == "refusal":
            self._counts[record.kind, record.reason] += 1
        if record.at_s - kept.logged_s >= LOG_AGAIN_S:
            kept.logged_s = record.at_s
            self._log(kept, logging.INFO)

    def _log(self, kept: _Kept, level: int) -> None:
        if logger.isEnabledFor(level):
            logger.log(level, "decision %s", line(kept.frozen()))

    def _of_model(self, model: str) -> deque[_Kept]:
        kept = self._by_model.get(model)
        if kept is None:
            kept = self._by_model[model] = deque(maxlen=self._per_model)
            if len(self._by_model) > self._max_models:
                forgotten, _ = self._by_model.popitem(last=False)
                self._going_on.pop(forgotten, None)
        self._by_model.move_to_end(model)
        return kept


def of_choice(worker_id: str, choice: SwapChoice, now_s: float) -> DecisionRecord:
    """What a worker decided about who leaves. Nobody did: the incoming model is held."""
    goes = any(not candidate.outcome.startswith("kept") for candidate in choice.candidates)
    shown = choice.candidates[:MAX_CANDIDATES]
    hidden = len(choice.candidates) - len(shown)
    return DecisionRecord(
        now_s,
        "eviction" if goes else "held",
        choice.reason if goes else "no model can be evicted",
        choice.incoming,
        worker_id,
        DecisionFigures(
            waited_s=choice.waited_s, pages_short=choice.num_pages_short, score=choice.score
        ),
        detail=f"and {hidden} more" if hidden else "",
        candidates=tuple(shown),
    )


def line(record: DecisionRecord) -> str:
    """key=value, for the log. Names have no spaces; reasons and outcomes get underscores."""
    fields: list[tuple[str, object]] = [
        ("kind", record.kind),
        ("reason", record.reason),
        ("model", record.model),
        ("worker", record.worker),
        ("tenant", record.tenant),
    ]
    fields += (record.figures or {}).items()
    for candidate in record.candidates:
        fields.append((candidate.outcome.partition(": ")[0], candidate.model_id))
    fields += [(_word(option.outcome), option.worker_id) for option in record.workers]
    if record.count > 1:
        fields += [("count", record.count), ("first_at_s", record.at_s)]
    words = [f"{name}={_word(value)}" for name, value in fields if value != ""]
    return " ".join(words) + (f": {record.detail}" if record.detail else "")


def _word(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value).replace(" ", "_")


SPAN_S = 3600.0
MAX_MOVES = 2000
MAX_SWAPS = 64


class Move(msgspec.Struct, frozen=True, array_like=True):
    """A model came from one state into another on a worker; or was found there, where both are
    one."""

    at: float
    worker: str
    model: str
    before: ResidencyState
    state: ResidencyState


class Swapped(msgspec.Struct, frozen=True, array_like=True):
    """A load or an eviction that has ended."""

    at: float
    worker: str
    swap: SwapRecord


@dataclass(slots=True)
class _Here:
    """One worker: models that are not cold, and since when each is in its state, where that was
    seen."""

    states: dict[str, ResidencyState]
    since: dict[str, float]
    layout: Layout | None = None


class ResidencyLog:
    """Models on all workers of one dispatcher, since it began, and how each arena lies: for
    pictures.

        note    a worker's status: its layout where it has one, and which models changed state
        lose    the worker is gone: nothing is anywhere on it any more

    A model that a worker does not name is `cold` there. What a worker has when it is first heard of
    is no change: how long it was so is not known, and the move says the same state twice.

    Bounded: MAX_MOVES changes and MAX_SWAPS swaps, of an hour at most; `since_s` says from when on
    all of them are kept.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _Here] = {}
        self._lost: dict[str, float] = {}
        self._moves: deque[Move] = deque()
        self._swaps: deque[Swapped] = deque(maxlen=MAX_SWAPS)
        self._since_s: float | None = None

    def note(self, status: WorkerStatus, has_moved: bool, now_s: float) -> None:
        """Take in a heartbeat. `has_moved`: some state may differ, or swaps have ended."""
        here = self._workers.get(status.worker_id)
        is_found = here is None
        if here is None:
            here = self._workers[status.worker_id] = _Here({}, {})
            self._lost.pop(status.worker_id, None)
            if self._since_s is None:
                self._since_s = now_s
        if status.layout is not None:
            here.layout = status.layout
        if not has_moved:
            return
        self._swaps += [Swapped(now_s, status.worker_id, swap) for swap in status.swaps]
        now: dict[str, ResidencyState] = {row.model_id: row.state for row in status.models}
        # A host tier may hold thousands: only what differs is looked at.
        moved = {model for model, _ in now.items() ^ here.states.items()}
        for model in sorted(moved):
            state = now.get(model, "cold")
            before = state if is_found else here.states.get(model, "cold")
            self._move(Move(now_s, status.worker_id, model, before, state), here)

    def lose(self, worker_id: str, now_s: float) -> None:
        """Its process, or the way to it, is gone."""
        here = self._workers.pop(worker_id, None)
        if here is None:
            return
        self._lost[worker_id] = now_s
        for model, before in list(here.states.items()):
            self._move(Move(now_s, worker_id, model, before, "cold"), here)

    @property
    def lost(self) -> Mapping[str, float]:
        """Workers that were here and are not -> since when."""
        return self._lost

    def since_s(self, now_s: float) -> float:
        """From when on every change is kept."""
        began_s = now_s if self._since_s is None else self._since_s
        return max(began_s, now_s - SPAN_S)

    def layout(self, worker_id: str) -> Layout | None:
        """As it reported last."""
        here = self._workers.get(worker_id)
        return None if here is None else here.layout

    def since(self, worker_id: str) -> dict[str, float]:
        """Since when each model is in the state it is in. Not named: what is cold, and what was so
        already when the worker was first heard of."""
        here = self._workers.get(worker_id)
        return {} if here is None else dict(here.since)

    def moves(self, now_s: float) -> list[Move]:
        """Of the last hour, the oldest first."""
        self._forget(now_s)
        return list(self._moves)

    def swaps(self) -> Iterator[Swapped]:
        """The last ones, the newest first."""
        return reversed(self._swaps)

    def _move(self, move: Move, here: _Here) -> None:
        if move.state == "cold":
            here.states.pop(move.model, None)
            here.since.pop(move.model, None)
        else:
            here.states[move.model] = move.state
            if move.before != move.state:
                here.since[move.model] = move.at
        self._moves.append(move)
        if len(self._moves) > MAX_MOVES:
            self._since_s = self._moves.popleft().at
        self._forget(move.at)

    def _forget(self, now_s: float) -> None:
        while self._moves and self._moves[0].at < now_s - SPAN_S:
            self._moves.popleft()
