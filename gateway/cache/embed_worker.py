"""The embedder's worker, as one gateway process talks to it: token ids in, rows out.

The worker is one of the existing program (`engine.worker.main`) with one encoder and a small arena,
kept alive by server/embedder_home.py; every gateway process of this server has a connection of its
own. There is no fair queue in front of it and nobody is billed: what is asked is short, what waits
is bounded, and who waits too long goes on without. Texts are embedder.py's.
"""

import asyncio
import itertools
from collections.abc import Iterable, Sequence

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
from gateway.dispatch.worker_connection import WorkerClient, WorkerUnavailable
from gateway.types import HostedModel

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

    def lose(self, reason: str) -> None:
        """Its process is known to have ended."""
        self._client.lose(reason)

    def set_models(self, models: Iterable[HostedModel]) -> None:
        """All that are hosted now."""
        named = (m for m in models if m.name == self._name and m.task == "embed")
        model = next(named, None)
        if model != self._model:
            self._model = model
            self._tell_model()

    def can_embed(self, model: HostedModel) -> bool:
        """Whether rows of this very revision could be had now."""
        return self._is_loaded and model == self._model

    async def rows(self, inputs: Sequence[Sequence[int]]) -> bytes | None:
        """A row for each input, end to end, as the protocol has them; None: not now.

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
            encode=EncodeInputs([len(ids) for ids in inputs]),
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

    def on_lost(self, worker_id: str, epoch: str, reason: str) -> None:
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
