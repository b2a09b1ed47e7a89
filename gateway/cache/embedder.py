"""What a text means, as a vector: the embedding model that the cache compares questions with.

A model registered like any other and named by `cache_embedder`. It runs in a worker process of its
own (the existing program, `engine.worker.main`, with one encoder and a small arena), kept alive by
server/worker_launcher.py; every gateway process of this server has a connection to it. There is
no fair queue before it and nobody is billed: what is asked is short, what waits is bounded.
Whatever keeps a vector from coming in time (no such model yet, the worker starts anew, a text
beyond what the model reads) is None, and for the cache that is a miss.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.protocol import (
    AckUsage,
    EncodeInputs,
    LoadModel,
    ModelSpec,
    Refused,
    SamplingParams,
    SetCatalog,
    Submit,
    TokenDelta,
    ToWorker,
    WorkerStatus,
)
from gateway.cache.question_score import QuestionReading, read_question
from gateway.cache.types import Vector
from gateway.errors import ApiError
from gateway.text.codecs import Codecs
from gateway.text.prepare_messages import EncoderInput, EncodeTexts, Inputs
from gateway.types import HostedModel
from gateway.workers.worker_client import LossCause, WorkerClient, WorkerUnavailable

log = logging.getLogger(__name__)

_T = TypeVar("_T")

MAX_IN_FLIGHT = 64
"""Requests at a time; beyond it there is no answer. A row takes milliseconds."""
WORKER_TIMEOUT_S = 1.0
"""After it the worker drops a request; nobody waits so long."""
_TENANT = "cache"
"""Of its requests towards the worker: no tenant's id looks like it."""


class EmbeddingWorker:
    """Implements WorkerListener. On the event loop only."""

    def __init__(self, client: WorkerClient, name: str) -> None:
        """`name`: of the hosted model."""
        self._client = client
        self._name = name
        self._model: HostedModel | None = None
        self._is_loaded = False
        self._waiting: dict[str, asyncio.Future[bytes | None]] = {}
        self._names = itertools.count()

    def start(self) -> None:
        """Begin to connect."""
        self._client.start(self)

    def close(self) -> None:
        """Say nothing more."""
        self._client.close()
        self._fail_all()

    def lose(self, reason: str, cause: LossCause) -> None:
        """Its process is known to have ended."""
        self._client.lose(reason, cause)

    def set_models(self, models: Iterable[HostedModel]) -> None:
        """All that are hosted now."""
        named = (m for m in models if m.name == self._name and m.task == "embed")
        model = next(named, None)
        if model != self._model:
            self._model = model
            self._tell_model()

    @property
    def model(self) -> HostedModel | None:
        """As it is hosted now; None where it is not, or is not one that embeds."""
        return self._model

    @property
    def can_embed(self) -> bool:
        """Whether rows of the model could be had now."""
        return self._is_loaded and self._model is not None

    async def rows(self, inputs: Sequence[Sequence[int]], states: bool = False) -> bytes | None:
        """A row for each input, end to end, as the protocol has them, and with `states` one for
        each token behind them; None: not now.

        Who is cancelled while waiting is forgotten, here and by the worker after its time.
        """
        model = self._model
        if model is None or not self._is_loaded or len(self._waiting) >= MAX_IN_FLIGHT:
            return None
        request_id = f"embed-{next(self._names)}"
        message = Submit(
            request_id=request_id,
            attempt=1,
            tenant_id=_TENANT,
            model_id=model.name,
            prompt_token_ids=[token for ids in inputs for token in ids],
            max_tokens=0,
            sampling=SamplingParams(),
            stop_token_ids=[],
            timeout_s=WORKER_TIMEOUT_S,
            encode=EncodeInputs([len(ids) for ids in inputs], states=states),
        )
        waiter: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = waiter
        try:
            self._client.send(message)
            return await waiter
        except WorkerUnavailable:
            return None
        finally:
            self._waiting.pop(request_id, None)

    def on_connected(self, worker_id: str, epoch: str) -> None:
        """A fresh process, which has no model yet."""
        self._tell_model()

    def on_status(self, worker_id: str, status: WorkerStatus) -> None:
        """Whether the model is there; one that is not is asked for again, which costs nothing."""
        name = "" if self._model is None else self._model.name
        states = [row.state for row in status.models if row.model_id == name]
        self._is_loaded = states == ["resident"]
        if name and states in ([], ["cold"], ["warm"]):
            self._send(LoadModel(name))

    def on_deltas(self, worker_id: str, epoch: str, deltas: Sequence[TokenDelta]) -> None:
        """Rows, or why there are none. Nobody is billed, so every finish is acknowledged."""
        ended = [delta for delta in deltas if delta.finish is not None]
        for delta in ended:
            assert delta.finish is not None
            self._end(delta.request_id, delta.vectors if delta.finish.reason == "stop" else b"")
        if ended:
            self._send(AckUsage([(delta.request_id, delta.attempt) for delta in ended]))

    def on_refused(self, worker_id: str, refused: Refused) -> None:
        """Not now."""
        self._end(refused.request_id, b"")

    def on_lost(self, worker_id: str, epoch: str, reason: str, cause: LossCause) -> None:
        """What was asked is not answered any more."""
        self._is_loaded = False
        self._fail_all()

    def _tell_model(self) -> None:
        self._is_loaded = False
        if self._model is not None:
            spec = ModelSpec(self._model.name, self._model.pack_dir, pinned=True)
            self._send(SetCatalog([spec]))
            self._send(LoadModel(self._model.name))

    def _send(self, message: ToWorker) -> None:
        try:
            self._client.send(message)
        except WorkerUnavailable:
            self._is_loaded = False  # Said again once it is connected.

    def _end(self, request_id: str, vectors: bytes) -> None:
        waiter = self._waiting.pop(request_id, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(vectors or None)

    def _fail_all(self) -> None:
        for request_id in list(self._waiting):
            self._end(request_id, b"")


@dataclass(frozen=True, slots=True, eq=False)
class Meaning:
    """A question's vector (of length 1), and what it is compared by."""

    vector: Vector
    reading: QuestionReading


class Embedder(Protocol):
    """A way from texts to vectors."""

    @property
    def is_configured(self) -> bool:
        """Whether the server is set up to compare meanings, be the model there now or not."""

    @property
    def revision(self) -> str:
        """Of the model; vectors of two revisions have nothing to do with one another."""

    async def embed(self, texts: Sequence[str]) -> list[Vector] | None:
        """A vector of length 1 for each text; None where they cannot be had in time."""

    async def read(self, texts: Sequence[str]) -> list[Meaning] | None:
        """The same, and what each is compared by."""


class NoEmbedder:
    """Implements Embedder for a server that has none."""

    is_configured = False
    revision = ""

    async def embed(self, texts: Sequence[str]) -> list[Vector] | None:
        """None."""
        return None

    async def read(self, texts: Sequence[str]) -> list[Meaning] | None:
        """None."""
        return None


class HostedEmbedder:
    """Implements Embedder."""

    is_configured = True

    def __init__(self, codecs: Codecs, worker: EmbeddingWorker, timeout_s: float) -> None:
        self._codecs = codecs
        self._worker = worker
        self._timeout_s = timeout_s

    @property
    def revision(self) -> str:
        """Of the model as it is hosted now, or ""."""
        model = self._worker.model
        return "" if model is None else model.revision

    async def embed(self, texts: Sequence[str]) -> list[Vector] | None:
        """See Embedder. Texts are not cut: of one that is too long the end would not count."""
        return await self._made(lambda model: self._embed(model, texts))

    async def read(self, texts: Sequence[str]) -> list[Meaning] | None:
        """See Embedder."""
        return await self._made(lambda model: self._read(model, texts))

    async def _made(self, make: Callable[[HostedModel], Awaitable[_T | None]]) -> _T | None:
        model = self._worker.model
        if model is None or not self._worker.can_embed:
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                return await make(model)
        except (TimeoutError, ValueError):
            return None
        except ApiError as error:  # Its tokenizer cannot be had, or too much waits for threads.
            log.info("the cache's embedder: %s", error)
            return None

    async def _embed(self, model: HostedModel, texts: Sequence[str]) -> list[Vector] | None:
        encoded = await self._in_tokens(model, texts, words=False)
        if encoded is None or any(item.type_ids for item in encoded):
            return None
        rows = await self._rows(model, [item.ids for item in encoded])
        return None if rows is None else _vectors(rows)

    async def _read(self, model: HostedModel, texts: Sequence[str]) -> list[Meaning] | None:
        encoded = await self._in_tokens(model, texts, words=True)
        if encoded is None:
            return None
        rows = await self._rows(model, [item.ids for item in encoded], states=True)
        vectors = None if rows is None else _vectors(rows[: len(texts)])
        if rows is None or vectors is None:
            return None
        meanings = []
        first = len(texts)
        for text, item, vector in zip(texts, encoded, vectors, strict=True):
            states = [rows[first + begin : first + end].mean(0) for begin, end in item.tokens]
            table = np.array(states, np.float32).reshape(-1, model.dim)
            meanings.append(Meaning(vector, read_question(text, item.spans, table)))
            first += len(item.ids)
        return meanings

    async def _in_tokens(
        self, model: HostedModel, texts: Sequence[str], *, words: bool
    ) -> list[EncoderInput] | None:
        """None where one is too long."""
        job = EncodeTexts(model.pack_dir, list(texts), model.max_context, cut=False, words=words)
        reply = await self._codecs.ask(model, job)
        return reply.inputs if isinstance(reply, Inputs) else None

    async def _rows(
        self, model: HostedModel, ids: Sequence[Sequence[int]], states: bool = False
    ) -> NDArray[np.float32] | None:
        """Of the inputs, and with `states` of all tokens behind them."""
        if not all(ids):
            return None
        num_rows = len(ids) + states * sum(map(len, ids))
        raw = await self._worker.rows(ids, states)
        if raw is None or len(raw) != 4 * model.dim * num_rows:
            return None
        rows = np.frombuffer(raw, dtype="<f4").reshape(num_rows, model.dim)
        return rows if np.isfinite(rows).all() else None


def _vectors(rows: NDArray[np.float32]) -> list[Vector] | None:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return list((rows / norms).astype(np.float32)) if norms.all() else None
