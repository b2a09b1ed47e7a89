"""What the running server tells its operator: one question, one answer, over a socket in the data
folder.

    {"ask": "why", "what": MODEL or REQUEST_ID or "", "tenant": ID or "", "limit": N}
    {"ask": "decisions", "model": MODEL or "", "limit": N}
    {"ask": "grants", "model": MODEL or "", "limit": N}
    {"ask": "check"}     compare the dispatcher's and each worker's books
    {"ask": "fleet"}     workers, arenas, an hour of residency, who waits: a packed `FleetReport`

One line of JSON each way; the server closes then (gateway/ipc/control_socket.py). The answer has
`at` (epoch seconds) and what was asked for, or `error`. Times in it are epoch seconds or, where the
name says so, seconds from then. The fleet is msgpack, for JSON has no infinity, and times that
nobody can foresee are just that. All of it is bounded: rows by what runs on the workers, history by
decisions.py, waiting groups and evictions by the numbers here. It only reads: nothing can be
changed here (a worker whose books turn out to be broken ends, as it would when idle).
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import msgspec
from msgspec.structs import replace

from engine.protocol import Layout, WorkerStatus
from gateway.dispatch.decisions import PER_MODEL, DecisionRecord, Move, Swapped
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.explain import WaitReason
from gateway.dispatch.grant_choices import GrantChoice
from gateway.dispatch.integrity_check import CheckResult
from gateway.dispatch.tickets import IntegrityError
from gateway.dispatch.worker_drains import WorkerState
from gateway.protocols import DispatcherSnapshot

logger = logging.getLogger(__name__)

MAX_WAITING_GROUPS = 20
MAX_EVICTIONS = 3
_MAX_LOADS = 500
"""Models on devices that show why they were loaded."""
Labels: TypeAlias = Mapping[str, tuple[str, ...]]
"""By worker, as the settings have them."""
_ON_DEVICE: Final = ("resident", "loading", "draining")


class Worker(msgspec.Struct, frozen=True):
    """One that is connected. `since`: model -> when it came into the state it is in, where that was
    seen; what lies where may be not known yet. `state`: whether it serves or leaves
    (worker_drains.py). `num_running`: requests it has been granted."""

    status: WorkerStatus
    layout: Layout | None
    since: dict[str, float]
    state: WorkerState = "serving"
    num_running: int = 0
    labels: tuple[str, ...] = ()


class WaitingReport(msgspec.Struct, frozen=True):
    """Requests of one tenant for one model, and why the oldest of them waits."""

    tenant_id: str
    model: str
    num_waiting: int
    waited_s: float
    code: str
    text: str


class FleetReport(msgspec.Struct, frozen=True):
    """All of it. Instants are epoch seconds; `since_at`: from when on moves are known.

    `lost`: workers that are not connected -> since when; 0: never seen. `loads`: why models on a
    device were loaded last.
    """

    at: float
    since_at: float
    workers: list[Worker]
    lost: dict[str, float]
    moves: list[Move]
    swaps: list[Swapped]
    evictions: list[DecisionRecord]
    loads: dict[str, DecisionRecord]
    waiting: list[WaitingReport]
    dispatcher: DispatcherSnapshot


_packer = msgspec.msgpack.Encoder()
_unpacker: msgspec.msgpack.Decoder[FleetReport] = msgspec.msgpack.Decoder(FleetReport)


def encode(fleet: FleetReport) -> bytes:
    """For the socket."""
    return _packer.encode(fleet)


def decode(packed: bytes) -> FleetReport:
    """What `encode` made. Raises msgspec.DecodeError."""
    return _unpacker.decode(packed)


def fleet_report(
    dispatcher: Dispatcher, now_s: float, offset_s: float, labels: Labels
) -> FleetReport:
    """The fleet as of now. `offset_s`: from the dispatcher's clock to the wall's."""
    history = dispatcher.history
    statuses = dispatcher.worker_statuses()
    snapshot = dispatcher.snapshot()
    here = {status.worker_id for status in statuses}
    waiting = []
    if snapshot.num_waiting:
        groups = dispatcher.look().groups(None, None, most=MAX_WAITING_GROUPS)
        waiting = [
            WaitingReport(
                group.head.tenant_id,
                group.head.model,
                group.num_waiting,
                group.head.waited_s,
                group.head.code,
                group.head.text,
            )
            for group in groups
        ]
    on_device = {r.model_id for s in statuses for r in s.models if r.state in _ON_DEVICE}
    loads = {
        name: _shifted(record, offset_s)
        for name in sorted(on_device)[:_MAX_LOADS]
        for record in dispatcher.decisions.last("load", name)
    }
    return FleetReport(
        at=now_s + offset_s,
        since_at=history.since_s(now_s) + offset_s,
        workers=[
            Worker(
                replace(status, swaps=[], choices=[], service=[], taken=[]),
                history.layout(status.worker_id),
                {name: s + offset_s for name, s in history.since(status.worker_id).items()},
                dispatcher.drains.state(status.worker_id),
                dispatcher.num_on(status.worker_id),
                labels.get(status.worker_id, ()),
            )
            for status in statuses
        ],
        lost={
            worker: history.lost[worker] + offset_s if worker in history.lost else 0.0
            for worker in {*history.lost, *dispatcher.worker_ids} - here
        },
        moves=[replace(move, at=move.at + offset_s) for move in history.moves(now_s)],
        swaps=[replace(swapped, at=swapped.at + offset_s) for swapped in history.swaps()],
        evictions=[
            _shifted(record, offset_s)
            for record in dispatcher.decisions.last("eviction", limit=MAX_EVICTIONS)
        ],
        loads=loads,
        waiting=waiting,
        dispatcher=snapshot,
    )


def _shifted(record: DecisionRecord, offset_s: float) -> DecisionRecord:
    """In epoch seconds."""
    return dataclasses.replace(record, at_s=record.at_s + offset_s, last_s=record.last_s + offset_s)


MAX_ROWS = 1000
"""Of one answer."""


class OperatorQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The line that is sent."""

    ask: str
    what: str = ""
    tenant: str = ""
    model: str = ""
    limit: int = 100


_questions = msgspec.json.Decoder(OperatorQuestion)


class OperatorHandler:
    """Answers, made of what the dispatcher says about itself. On the event loop."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        knows_model: Callable[[str], bool],
        labels: Labels = MappingProxyType({}),
        checks: Mapping[str, Callable[[], None]] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`checks`: of other parts of the server whose books can be checked, by name."""
        self._dispatcher = dispatcher
        self._knows_model = knows_model
        self._labels = labels
        self._checks = {"dispatcher": dispatcher.check_integrity, **checks}
        self._clock = clock
        self._wall_clock = wall_clock

    def answer(self, line: bytes) -> dict[str, Any] | Coroutine[Any, Any, dict[str, Any]]:
        """To one question; `error` where it is none, or about nobody."""
        try:
            question = _questions.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return {"error": f"invalid request: {error}"}
        limit = max(1, min(MAX_ROWS, question.limit))
        if question.ask == "why":
            found = self._why(question.what, question.tenant, limit)
        elif question.ask == "decisions":
            found = self._decisions(question.model, limit)
        elif question.ask == "grants":
            chosen = self._dispatcher.choices.recent(question.model, limit)
            found = {"grants": [self._choice(one) for one in chosen]}
        elif question.ask == "check":
            return self._check()
        elif question.ask == "fleet":
            now_s = self._clock()
            offset_s = self._wall_clock() - now_s
            fleet = fleet_report(self._dispatcher, now_s, offset_s, self._labels)
            found = {"fleet": encode(fleet)}
        else:
            known = "why, decisions, grants, check or fleet"
            found = {"error": f"unknown request {question.ask!r}: ask {known}"}
        return {"at": self._wall_clock()} | found

    def _why(self, what: str, tenant_id: str, limit: int) -> dict[str, Any]:
        reasons = self._dispatcher.explain(what) if what else []
        if reasons:
            return {"requests": [self._request(reason) for reason in reasons[:limit]]}
        ended = self._dispatcher.choices.find(what) if what else []
        if ended:
            return {
                "ended": [
                    self._choice(one) | {"load": self._load(one.model, one.workers[0].worker_id)}
                    for one in ended[:limit]
                ]
            }
        if what and not self._knows_model(what):
            return {"error": f"{what!r} is neither a hosted model nor a live request"}
        look, which = self._dispatcher.look(), (what or None, tenant_id or None)
        groups = look.groups(*which, most=limit)
        found: dict[str, Any] = {
            "num_waiting": look.num_waiting(*which),
            "waiting": [
                {"num_waiting": group.num_waiting} | _reason(group.head) for group in groups
            ],
        }
        if what:
            found["model"] = {
                "name": what,
                "failure": self._dispatcher.model_failure(what),
                "workers": {
                    status.worker_id: next(
                        (row.state for row in status.models if row.model_id == what), "cold"
                    )
                    for status in self._dispatcher.worker_statuses()
                },
            }
        return found

    def _request(self, reason: WaitReason) -> dict[str, Any]:
        """A live request, with the choice of its worker where there was one, the load that brought
        its model, and what loads on workers without it would take."""
        chosen = self._dispatcher.choices.find(reason.request_id)
        is_chosen = chosen and chosen[0].workers[0].worker_id == reason.worker
        return _reason(reason) | {
            "choice": self._choice(chosen[0]) if is_chosen else None,
            "load": self._load(reason.model, reason.worker),
            "elsewhere": self._dispatcher.elsewhere(reason.model),
        }

    def _choice(self, choice: GrantChoice) -> dict[str, Any]:
        offset_s = self._wall_clock() - self._clock()
        fields = choice._asdict() | {"workers": [one._asdict() for one in choice.workers]}
        return {"at": fields.pop("at_s") + offset_s} | fields

    def _load(self, model: str, worker_id: str) -> dict[str, Any] | None:
        """The latest load of the model there."""
        offset_s = self._wall_clock() - self._clock()
        loads = self._dispatcher.decisions.last("load", model, limit=PER_MODEL)
        here = (record for record in loads if record.worker == worker_id)
        return next((_record(record, offset_s) for record in here), None)

    async def _check(self) -> dict[str, Any]:
        """By part of the server and by worker: the state, and what is wrong."""
        found = {name: _checked(name, check) for name, check in self._checks.items()}
        found |= await self._dispatcher.check_workers()
        return {
            "at": self._wall_clock(),
            "checks": {name: result._asdict() for name, result in found.items()},
        }

    def _decisions(self, model: str, limit: int) -> dict[str, Any]:
        offset_s = self._wall_clock() - self._clock()
        records = self._dispatcher.decisions.recent(model or None, limit)
        counts = sorted(self._dispatcher.decisions.counts().items())
        return {
            "decisions": [_record(record, offset_s) for record in records],
            "counts": [{"kind": k, "reason": r, "count": n} for (k, r), n in counts],
        }


def _checked(name: str, check: Callable[[], None]) -> CheckResult:
    try:
        check()
    except (IntegrityError, AssertionError) as error:  # policies raise the second
        logger.error("the books of the %s do not agree: %s", name, error)
        return CheckResult("broken", str(error) or type(error).__name__)
    return CheckResult("ok")


def _reason(reason: WaitReason) -> dict[str, Any]:
    fields = asdict(reason)
    fields["rooms"] = [room._asdict() for room in reason.rooms]
    return fields


def _record(record: DecisionRecord, offset_s: float) -> dict[str, Any]:
    figures = dict(record.figures or {})
    until_s = figures.get("until_s")
    if isinstance(until_s, float):
        figures["until_s"] = until_s + offset_s
    return {
        "at": record.at_s + offset_s,
        "last_at": record.last_s + offset_s,
        "count": record.count,
        "kind": record.kind,
        "reason": record.reason,
        "model": record.model,
        "worker": record.worker,
        "tenant_id": record.tenant,
        "figures": figures,
        "detail": record.detail,
        "candidates": [msgspec.structs.asdict(candidate) for candidate in record.candidates],
        "workers": [option._asdict() for option in record.workers],
    }
