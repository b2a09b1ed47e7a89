"""The threads of stage 2, and the tokenizers they work with.

Templates and tokenizers are the gateway's only heavy work, so they run in a small thread pool. What
waits for it is bounded: beyond the bound the answer is an early 429. Codecs are kept per model
revision, least recently used first out, and loaded once however many requests ask at the same time.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from cachetools import LRUCache

from gateway.encoder_codec import EncoderCodec, load_encoder_codec
from gateway.errors import MODEL_FAILED, QUEUE_FULL, ApiError
from gateway.tokenization import TextCodec, load_codec
from gateway.types import HostedModel

log = logging.getLogger(__name__)

_PREPARE_RETRY_S = 1.0
_T = TypeVar("_T")


class PreparePool:
    """`num_threads` work; `max_pending` requests wait or are worked on at most."""

    def __init__(self, num_threads: int, max_pending: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="prepare")
        self._max_pending = max_pending
        self._num_pending = 0

    async def run(self, work: Callable[[], _T]) -> _T:
        """In a thread. Raises ApiError QUEUE_FULL, and what `work` raises."""
        if self._num_pending >= self._max_pending:
            raise ApiError(
                QUEUE_FULL,
                "too many requests are being prepared: try again in a moment",
                retry_after_s=_PREPARE_RETRY_S,
            )
        self._num_pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._num_pending -= 1

    def close(self) -> None:
        """Stop the threads; what they are at is finished first."""
        self._pool.shutdown(wait=True)


class Codecs:
    """Of generating models and of encoders, `max_codecs` together."""

    def __init__(self, pool: PreparePool, max_codecs: int) -> None:
        self.pool = pool
        self._codecs: LRUCache[str, TextCodec | EncoderCodec] = LRUCache(max_codecs)
        self._loading: dict[str, asyncio.Task[TextCodec | EncoderCodec]] = {}

    async def text(self, model: HostedModel) -> TextCodec:
        """Of a generating model. Raises ApiError MODEL_FAILED."""
        codec = await self._get(model)
        assert isinstance(codec, TextCodec)
        return codec

    async def encoder(self, model: HostedModel) -> EncoderCodec:
        """Of a model that embeds or classifies. Raises ApiError MODEL_FAILED."""
        codec = await self._get(model)
        assert isinstance(codec, EncoderCodec)
        return codec

    async def _get(self, model: HostedModel) -> TextCodec | EncoderCodec:
        codec = self._codecs.get(model.revision)
        if codec is not None:
            return codec
        loading = self._loading.get(model.revision)
        if loading is None:
            loading = asyncio.create_task(self._load(model))
            self._loading[model.revision] = loading
        # Shielded: one caller that goes away must not take it from the others.
        return await asyncio.shield(loading)

    async def _load(self, model: HostedModel) -> TextCodec | EncoderCodec:
        load: Callable[[Path], TextCodec | EncoderCodec]
        load = load_codec if model.task == "generate" else load_encoder_codec
        try:
            codec = await self.pool.run(lambda: load(Path(model.pack_dir)))
        except (OSError, ValueError) as error:
            log.error("tokenizer of model %s cannot be loaded: %s", model.name, error)
            raise ApiError(
                MODEL_FAILED, f"the tokenizer of model {model.name!r} cannot be loaded"
            ) from error
        finally:
            del self._loading[model.revision]
        self._codecs[model.revision] = codec
        return codec
