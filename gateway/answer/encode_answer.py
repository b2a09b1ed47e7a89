"""Answers of encoders: rows from the workers, written as JSON (vectors, classes, ranks). Stage 9.

Comes in: a prepared request. `RowParts` has it computed, a few pieces at a time, so that a large
request waits its turn among others again and again; a piece whose worker dies is sent again by the
dispatcher like any request, for nothing of it has left the gateway. Goes out: the rows, [inputs,
width] float32, all finite, and the body of the answer in parts, which nobody needs to join. The
arithmetic on rows that clients see and models do not is here: vectors cut and made unit again,
logits to probabilities.

A large answer is millions of digits, a tenth of a second of work: it is written some rows at a time
and others get a turn between. It is whole before it leaves and is held until the client has read
it: `AnswerMemory` bounds what one tenant's requests may hold so.
"""

import asyncio
import base64
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.protocol import Finish, Usage
from gateway.answer.choice import PartsOwner, check_end, worker_was_lost
from gateway.api.encode_wire import EncodeAsk
from gateway.errors import (
    DEADLINE_EXCEEDED,
    QUEUE_FULL,
    SERVER_ERROR,
    ApiError,
    ClientGone,
    WorkerLost,
)
from gateway.prepare.encode_prepare import EncodePrepared, pieces_of
from gateway.types import PartsEnd, PreparedRequest, RunningRequest
from gateway.workers.choices import summed_usage

log = logging.getLogger(__name__)

Rows = NDArray[np.float32]

PIECES_AT_ONCE = 2
"""The next one should be there when the worker is done with one."""
_RETRY_S = 1.0
_TURN_NUMBERS = 8_192
"""Numbers written in one go: about 2 ms."""
_encode = msgspec.json.Encoder().encode


class RowParts:
    """All pieces of a request, in the order of its inputs. Used by one consumer."""

    def __init__(
        self,
        prepared: EncodePrepared,
        piece_tokens: int,
        run: Callable[[PreparedRequest], RunningRequest],
        owner: PartsOwner,
    ) -> None:
        """`run` queues a piece, of at most `piece_tokens` or one input."""
        self.prepared = prepared
        self._pieces = pieces_of(prepared.request, piece_tokens)
        self._run = run
        self._owner = owner
        self._running: deque[tuple[PreparedRequest, RunningRequest]] = deque()
        self._usages: list[Usage] = []
        self._first: RunningRequest | None = None

    # What their owner asks (active_request.Parts). Part of an answer is of no use, so nothing is
    # owed for one, and what is still running tells nobody what it used.

    @property
    def is_queued(self) -> bool:
        """The dispatcher has at least one of them."""
        return self._first is not None

    @property
    def has_ended(self) -> bool:
        """All rows are there."""
        return len(self._usages) == len(self._pieces)

    def start(self) -> None:
        """Queue the first; the others follow. Raises ApiError."""
        self._first = self._run(self._pieces[0])
        self._running.append((self._pieces[0], self._first))

    def abort(self) -> None:
        """Stop the workers within one step."""
        for _, running in self._running:
            running.abort()

    async def end(self) -> PartsEnd:
        """Stop the workers."""
        self.abort()
        usage = summed_usage(self._usages) if self.has_ended else Usage(0, 0, 0, 0.0)
        # Of the first: the others wait while it runs.
        queue_s = 0.0 if self._first is None else self._first.queue_s
        return PartsEnd(self.has_ended, usage, queue_s, ["stop"])

    async def rows(self, timeout_s: float) -> Rows:
        """All rows, [inputs, width], once the open record is durable too. Raises ApiError, also
        where all pieces together take longer than `timeout_s`, and ClientGone."""
        try:
            async with asyncio.timeout(timeout_s):
                parts = await self._parts()
                await self._owner.opened()
        except TimeoutError as error:
            message = "the request exceeded the time limit of this server: send fewer inputs"
            raise ApiError(DEADLINE_EXCEEDED, message) from error
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    async def _parts(self) -> list[Rows]:
        parts = []
        waiting = iter(self._pieces[1:])
        while self._running:
            if self._owner.is_gone:
                raise ClientGone
            while len(self._running) < PIECES_AT_ONCE and (piece := next(waiting, None)):
                self._running.append((piece, self._run(piece)))
            piece, running = self._running[0]
            parts.append(await self._rows_of(piece, running))
            self._running.popleft()
        return parts

    async def _rows_of(self, piece: PreparedRequest, running: RunningRequest) -> Rows:
        """Raises ApiError where the worker did not give what was asked for."""
        finish, vectors = await _last_event(running)
        if finish.reason != "stop":
            check_end(finish, piece, self._owner.is_gone)
            raise ClientGone
        assert piece.encode is not None
        num_rows, width = len(piece.encode.lengths), self.prepared.width
        rows = np.frombuffer(vectors, dtype="<f4") if len(vectors) % 4 == 0 else np.empty(0, "<f4")
        if rows.size != num_rows * width or not np.isfinite(rows).all():
            what = "numbers that are not finite"
            if rows.size != num_rows * width:
                what = f"{len(vectors)} bytes for {num_rows} rows of {width}"
            log.error("request %s: model %s gave %s", piece.request_id, piece.model.name, what)
            message = f"the model {piece.model.name!r} failed while processing the request"
            raise ApiError(SERVER_ERROR, message)
        self._usages.append(finish.usage)
        return rows.reshape(num_rows, width)


async def _last_event(running: RunningRequest) -> tuple[Finish, bytes]:
    """Raises ApiError: refused, or its worker was lost too often."""
    try:
        async for event in running:
            if event.finish is not None:
                return event.finish, event.vectors
    except WorkerLost as error:
        raise worker_was_lost() from error
    raise worker_was_lost()


async def answer(prepared: EncodePrepared, rows: Rows) -> list[bytes]:
    """The whole answer, in parts."""
    request, asked = prepared.request, prepared.asked
    num_tokens = len(request.prompt_token_ids)
    head: dict[str, Any] = {
        "id": request.request_id,
        "object": "list",
        "created": request.created_at,
        "model": request.model.name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    if asked.style == "ollama_one":
        [row] = rows
        return [_encode({"embedding": row.tolist()})]
    items: Iterable[Any]
    name = "results" if asked.kind == "rerank" else "data"
    if asked.style == "ollama":
        head = {"model": request.model.name, "prompt_eval_count": num_tokens}
        name = "embeddings"
    if asked.kind == "embedding":
        items = _embeddings(asked, rows)
    elif asked.kind == "classify":
        items = _classes(prepared, rows)
    elif asked.kind == "score":
        items = _scores(rows)
    else:
        items = _ranks(asked, rows)
    parts = [_encode(head)[:-1] + b"," + _encode(name) + b":["]
    left = iter(items)
    while turn := list(islice(left, max(1, _TURN_NUMBERS // rows.shape[1]))):
        comma = b"," if len(parts) > 1 else b""
        parts.append(comma + _encode(turn)[1:-1])
        await asyncio.sleep(0)
    return [*parts, b"]}"]


def probabilities(logits: Rows, multi_label: bool) -> NDArray[np.float64]:
    """A classifier's logits, [inputs, classes], as probabilities: of each class for itself where
    they do not exclude one another, or where there is only one; else together 1."""
    values = logits.astype(np.float64)
    if multi_label or values.shape[1] == 1:
        # By whichever form does not overflow.
        small = np.exp(-np.abs(values))
        return np.where(values >= 0, 1 / (1 + small), small / (1 + small))
    powers: NDArray[np.float64] = np.exp(values - values.max(axis=1, keepdims=True))
    powers /= powers.sum(axis=1, keepdims=True)
    return powers


def shortened(rows: Rows, dimensions: int | None) -> Rows:
    """Vectors cut to their first numbers and made of length 1 again. Nulls stay nulls."""
    if dimensions is None or dimensions == rows.shape[1]:
        return rows
    cut = rows[:, :dimensions].astype(np.float64)
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    return (cut / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def _embeddings(asked: EncodeAsk, rows: Rows) -> Iterable[Any]:
    write: Callable[[Rows], Any] = np.ndarray.tolist
    if asked.encoding_format == "base64":
        write = _base64
    for index, row in enumerate(shortened(rows, asked.dimensions)):
        if asked.style == "ollama":
            yield row.tolist()
            continue
        yield {"object": "embedding", "index": index, "embedding": write(row)}


def _base64(row: Rows) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()


def _classes(prepared: EncodePrepared, rows: Rows) -> Iterable[dict[str, Any]]:
    model = prepared.request.model
    for index, row in enumerate(probabilities(rows, model.multi_label)):
        yield {
            "index": index,
            "label": model.labels[int(row.argmax())],
            "probs": row.tolist(),
            "num_classes": len(model.labels),
        }


def _scores(rows: Rows) -> Iterable[dict[str, Any]]:
    for index, score in enumerate(probabilities(rows, False)[:, 0]):
        yield {"index": index, "object": "score", "score": float(score)}


def _ranks(asked: EncodeAsk, rows: Rows) -> Iterable[dict[str, Any]]:
    """The most relevant first; of equals the one that came first."""
    scores = probabilities(rows, False)[:, 0]
    # By logits: far out they still differ where probabilities are 1 or 0 alike.
    order: Sequence[int] = np.argsort(-rows[:, 0], kind="stable").tolist()
    for index in order[: asked.top_n]:
        result: dict[str, Any] = {"index": index, "relevance_score": float(scores[index])}
        if asked.return_documents:
            result["document"] = {"text": asked.inputs[index]}
        yield result


class AnswerMemory:
    """Bytes by tenant. Beyond the bound a request is an early 429; one always may."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: dict[str, int] = {}

    def hold(self, tenant_id: str, num_bytes: int) -> Callable[[], None]:
        """Hold so much until what comes back is called; calling it again does nothing.

        Raises ApiError QUEUE_FULL.
        """
        before = self._held.get(tenant_id, 0)
        if before and before + num_bytes > self._max_bytes:
            raise ApiError(
                QUEUE_FULL,
                "the answers to your tenant's running embedding and classification requests take "
                f"{before} bytes; with this one they exceed the limit of {self._max_bytes} bytes: "
                "try again later",
                retry_after_s=_RETRY_S,
            )
        self._held[tenant_id] = before + num_bytes
        is_held = True

        def release() -> None:
            nonlocal is_held
            if not is_held:
                return
            is_held = False
            self._held[tenant_id] -= num_bytes
            if not self._held[tenant_id]:
                del self._held[tenant_id]

        return release
