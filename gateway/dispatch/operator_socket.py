"""What the running server tells its operator: one question, one answer, over a socket in the data
folder.

    {"ask": "why", "what": MODEL or REQUEST_ID or "", "tenant": ID or "", "limit": N}
    {"ask": "decisions", "model": MODEL or "", "limit": N}
    {"ask": "fleet"}     workers, arenas, an hour of residency: packed (fleet_told.py)

One line of JSON each way; the server closes then. The answer has `at` (epoch seconds) and what was
asked for, or `error`. Times in it are epoch seconds or, where the name says so, seconds from then.

Why a socket and not a route: waiting requests, tenants and decisions are the operator's, and over
HTTP every caller holds a key of some tenant. Who may read the data folder may read the database and
may ask here: the socket is this user's alone (its folder, its mode, and the caller's user id where
the system tells it). It only reads: nothing can be changed here.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import msgspec

from gateway.dispatch.decisions import DecisionRecord
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.explain import WaitReason
from gateway.dispatch.fleet_told import encode, tell
from gateway.server import machine

logger = logging.getLogger(__name__)

MAX_QUESTION_BYTES = 1 << 16
QUESTION_TIMEOUT_S = 5.0
"""For the question to come, and for the answer to be taken."""
MAX_ROWS = 1000
"""Of one answer."""
MAX_CALLERS = 8
"""At a time; who comes beyond that is sent away."""


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The line that is sent."""

    ask: str
    what: str = ""
    tenant: str = ""
    model: str = ""
    limit: int = 100


_questions = msgspec.json.Decoder(Question)


def operator_socket(data_path: Path) -> Path:
    """Where a data folder's server listens."""
    return machine.socket_path(data_path, "operator")


class Desk(Protocol):
    """Who answers on a socket like this one."""

    def answer(self, line: bytes) -> dict[str, Any] | Awaitable[dict[str, Any]]:
        """To one question."""


class OperatorDesk:
    """Answers, made of what the dispatcher says about itself. On the event loop."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        knows_model: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._dispatcher = dispatcher
        self._knows_model = knows_model
        self._clock = clock
        self._wall_clock = wall_clock

    def answer(self, line: bytes) -> dict[str, Any]:
        """To one question; `error` where it is none, or about nobody."""
        try:
            question = _questions.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return {"error": f"not a question: {error}"}
        limit = max(1, min(MAX_ROWS, question.limit))
        if question.ask == "why":
            found = self._why(question.what, question.tenant, limit)
        elif question.ask == "decisions":
            found = self._decisions(question.model, limit)
        elif question.ask == "fleet":
            now_s = self._clock()
            fleet = tell(self._dispatcher, now_s, self._wall_clock() - now_s)
            found = {"fleet": encode(fleet)}
        else:
            found = {"error": f"nothing is known of {question.ask!r}: ask why, decisions or fleet"}
        return {"at": self._wall_clock()} | found

    def _why(self, what: str, tenant_id: str, limit: int) -> dict[str, Any]:
        reasons = self._dispatcher.explain(what) if what else []
        if reasons:
            return {"requests": [_reason(reason) for reason in reasons[:limit]]}
        if what and not self._knows_model(what):
            return {"error": f"{what!r} is neither a hosted model nor a request that is here now"}
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

    def _decisions(self, model: str, limit: int) -> dict[str, Any]:
        offset_s = self._wall_clock() - self._clock()
        records = self._dispatcher.decisions.recent(model or None, limit)
        counts = sorted(self._dispatcher.decisions.counts().items())
        return {
            "decisions": [_record(record, offset_s) for record in records],
            "counts": [{"kind": k, "reason": r, "count": n} for (k, r), n in counts],
        }


@contextlib.asynccontextmanager
async def listening(path: Path, desk: Desk) -> AsyncIterator[None]:
    """Answer on this path. Raises OSError where it cannot be bound.

    What lies there is of a server that is gone: the caller holds the data folder's lock.
    """
    callers: dict[asyncio.StreamWriter, asyncio.Task[Any] | None] = {}

    async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        full = len(callers) >= MAX_CALLERS
        callers[writer] = asyncio.current_task()
        try:
            async with asyncio.timeout(QUESTION_TIMEOUT_S):
                if full or not _is_own(writer):
                    return
                found = desk.answer(await reader.readline())
                answer = found if isinstance(found, dict) else await found
                writer.write(msgspec.json.encode(answer) + b"\n")
                await writer.drain()
        except (TimeoutError, OSError, ValueError):  # ValueError: a line beyond the limit
            logger.info("an operator's question was not answered")
        finally:
            writer.close()
            del callers[writer]

    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        server = await asyncio.start_unix_server(call, sock=listener, limit=MAX_QUESTION_BYTES)
        try:
            yield
        finally:
            server.close()
            path.unlink(missing_ok=True)
            # Who is being answered has its connection closed, and so comes to an end.
            tasks = [task for task in callers.values() if task is not None]
            for writer in callers:
                writer.close()
            if tasks:
                await asyncio.wait(tasks, timeout=QUESTION_TIMEOUT_S)


def _is_own(writer: asyncio.StreamWriter) -> bool:
    """Whether the caller is this user, or root; taken for granted where the system does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    peer = writer.get_extra_info("socket").getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    _, uid, _ = struct.unpack("3i", peer)
    return uid in (0, os.getuid())


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
    }
