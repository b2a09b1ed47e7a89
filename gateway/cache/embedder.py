"""What a text means, as a vector: the embedding model that the cache compares questions with.

A model registered like any other and named by `cache_embedder`; rows come from a worker process of
its own (embed_worker.py). Whatever keeps a vector from coming in time (no such model yet, the
worker starts anew, a text beyond what the model reads) is None, and for the cache that is a miss.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from gateway.cache.embed_worker import EmbeddingWorker
from gateway.cache.types import Vector
from gateway.directory import Directory
from gateway.errors import ApiError
from gateway.prepare.codecs import Codecs
from gateway.prepare.encoder_codec import TooLong
from gateway.types import HostedModel

log = logging.getLogger(__name__)


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


class NoEmbedder:
    """Implements Embedder for a server that has none."""

    is_configured = False
    revision = ""

    async def embed(self, texts: Sequence[str]) -> list[Vector] | None:
        """None."""
        return None


class HostedEmbedder:
    """Implements Embedder."""

    def __init__(
        self,
        name: str,
        directory: Directory,
        codecs: Codecs,
        worker: EmbeddingWorker,
        timeout_s: float,
    ) -> None:
        self._name = name
        self._directory = directory
        self._codecs = codecs
        self._worker = worker
        self._timeout_s = timeout_s
        self.is_configured = True

    @property
    def revision(self) -> str:
        """Of the model as it is hosted now; "" where it is not, or not one that embeds."""
        model = self._model()
        return "" if model is None else model.revision

    async def embed(self, texts: Sequence[str]) -> list[Vector] | None:
        """See Embedder. Texts are not cut: of one that is too long the end would not count."""
        model = self._model()
        if model is None or not self._worker.can_embed(model):
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._embed(model, texts)
        except (TimeoutError, TooLong, ValueError):
            return None
        except ApiError as error:  # Its tokenizer cannot be had, or too much waits for threads.
            log.info("the cache's embedder: %s", error)
            return None

    async def _embed(self, model: HostedModel, texts: Sequence[str]) -> list[Vector] | None:
        codec = await self._codecs.encoder(model)
        encoded = await self._codecs.pool.run_paced(
            lambda: codec.encode(texts, model.max_context),
            self._codecs.pace(model),
            sum(map(len, texts)),
        )
        if any(not item.ids or item.type_ids for item in encoded):
            return None
        raw = await self._worker.rows([item.ids for item in encoded])
        if raw is None or len(raw) != 4 * model.dim * len(texts):
            return None
        rows = np.frombuffer(raw, dtype="<f4").reshape(len(texts), model.dim)
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        if not (np.isfinite(norms).all() and norms.all()):
            return None
        return list((rows / norms).astype(np.float32))

    def _model(self) -> HostedModel | None:
        model = self._directory.find_model(self._name)
        return model if model is not None and model.task == "embed" else None
