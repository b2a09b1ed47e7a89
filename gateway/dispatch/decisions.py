"""Why things were done: one record for every decision about models and queues, bounded.

Who decides says so here, where it decides: placement (loads, and loads that are not due yet),
the workers' evictions, refusals, quarantines. The records are read by operators (`polyhost
decisions`, explain.py) and written to the log, one line each, as key=value. Nothing here decides
anything, and nothing reads it to decide.

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from engine.protocol import SwapCandidate, SwapChoice
from gateway.policy.reasons import Figures, Kind, Reason

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
    """One decision. `model` is whom it is about: of an eviction, the newcomer.

    tenant       where it is about one tenant's requests
    detail       what the words above do not say, for people
    count        how often it was said, the last time at `last_s`
    candidates   of an eviction
    """

    at_s: float
    kind: Kind
    reason: Reason
    model: str = ""
    worker: str = ""
    figures: Figures | None = None
    tenant: str = ""
    detail: str = ""
    candidates: tuple[SwapCandidate, ...] = ()
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
    figures: Figures | None
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
    """What a worker decided about who leaves. Nobody did: the newcomer is held."""
    goes = any(not candidate.outcome.startswith("kept") for candidate in choice.candidates)
    shown = choice.candidates[:MAX_CANDIDATES]
    hidden = len(choice.candidates) - len(shown)
    return DecisionRecord(
        now_s,
        "eviction" if goes else "held",
        choice.reason if goes else "nobody gives way",
        choice.newcomer,
        worker_id,
        Figures(waited_s=choice.waited_s, pages_short=choice.num_pages_short, score=choice.score),
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
    if record.count > 1:
        fields += [("count", record.count), ("first_at_s", record.at_s)]
    words = [f"{name}={_word(value)}" for name, value in fields if value != ""]
    return " ".join(words) + (f": {record.detail}" if record.detail else "")


def _word(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value).replace(" ", "_")
