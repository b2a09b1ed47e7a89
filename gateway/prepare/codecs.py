"""The threads of stage 2, and the tokenizers they work with.

Templates and tokenizers are the gateway's only heavy work, so they run in a small thread pool,
unless a prompt is so short that waking a thread would take longer than the work. What waits for the
pool is bounded: beyond the bound the answer is an early 429. Codecs are kept per model
revision, least recently used first out, and loaded once however many requests ask at the same time.
"""

import asyncio
import contextlib
import ctypes
import logging
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from cachetools import LRUCache

from gateway.errors import MODEL_FAILED, QUEUE_FULL, ApiError
from gateway.prepare.encoder_codec import EncoderCodec, load_encoder_codec
from gateway.prepare.tokenization import TextCodec, load_codec
from gateway.types import HostedModel

log = logging.getLogger(__name__)

_PREPARE_RETRY_S = 1.0
# What a prompt takes however short it is, as if it were so much longer.
_LEAST_LENGTH = 256
# What a byte takes where nobody knows yet: templates and tokenizers of the usual kind.
_USUAL_S_PER_UNIT = 4e-7
# As what one may count at most, by the pace before it.
_SLOWEST_TIMES = 4.0
_READ_AHEAD = 2
"""Tokenizers at the start: one of 150,000 tokens takes half a second, and 55 MB for good."""
_T = TypeVar("_T")


class Pace:
    """How long a model's prompts take by their length, going by the last few done at once.

    A length is bytes, or what else the work grows with. What threads did says nothing: they wait
    for one another. (A clock of a thread's own time would tell, and is dear on some machines.) So
    after work in threads the pace is believed less and less, until it is tried again. One that was
    slow may have waited for the interpreter's lock or for a core: only some in a row count in full.
    """

    __slots__ = ("_s_per_unit",)

    def __init__(self) -> None:
        self._s_per_unit = _USUAL_S_PER_UNIT

    def expected_s(self, length: int) -> float:
        """Of the next."""
        return (length + _LEAST_LENGTH) * self._s_per_unit

    def took(self, length: int, seconds: float) -> None:
        """One took so long. Slower ones count for more than quicker ones."""
        s_per_unit = min(seconds / (length + _LEAST_LENGTH), _SLOWEST_TIMES * self._s_per_unit)
        change = s_per_unit - self._s_per_unit
        self._s_per_unit += change / (2 if change > 0 else 4)

    def passed_on(self) -> None:
        """One was left to a thread."""
        self._s_per_unit += (_USUAL_S_PER_UNIT - self._s_per_unit) / 64


class PreparePool:
    """`num_threads` work; `max_pending` requests wait or are worked on at most. What should take no
    longer than `inline_s` by its model's pace is done at once, on the event loop."""

    def __init__(self, num_threads: int, max_pending: int, inline_s: float = 0.0) -> None:
        self._inline_s = inline_s
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

    async def run_paced(self, work: Callable[[], _T], pace: Pace, length: int) -> _T:
        """The same, or at once where that is quicker."""
        if pace.expected_s(length) > self._inline_s:
            pace.passed_on()
            return await self.run(work)
        begun_s = time.perf_counter()
        try:
            return work()
        finally:
            pace.took(length, time.perf_counter() - begun_s)

    def close(self) -> None:
        """Stop the threads; what they are at is finished first."""
        self._pool.shutdown(wait=True)


class Codecs:
    """Of generating models and of encoders, `max_codecs` together."""

    def __init__(self, pool: PreparePool, max_codecs: int) -> None:
        self.pool = pool
        self._codecs: LRUCache[str, TextCodec | EncoderCodec] = LRUCache(max_codecs)
        self._loading: dict[str, asyncio.Task[TextCodec | EncoderCodec]] = {}
        self._paces: LRUCache[str, Pace] = LRUCache(max_codecs)

    def pace(self, model: HostedModel) -> Pace:
        """How long its prompts take."""
        pace = self._paces.get(model.revision)
        if pace is None:
            pace = self._paces[model.revision] = Pace()
        return pace

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

    async def read_ahead(self, models: Iterable[HostedModel]) -> None:
        """Load those of a small catalog, or of pinned models, before anybody asks for them."""
        found, most = list(models), min(_READ_AHEAD, int(self._codecs.maxsize))
        if len(found) > most:
            found = [model for model in found if model.pinned][:most]
        for model in found:
            try:
                await self._get(model)
            except ApiError as error:  # Whoever asks for the model hears of it.
                log.warning("tokenizer of model %s is not read ahead: %s", model.name, error)
            except Exception:
                log.exception("tokenizer of model %s cannot be read ahead", model.name)

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
            codec = await self.pool.run(lambda: _loaded(load, Path(model.pack_dir)))
        except (OSError, ValueError) as error:
            log.error("tokenizer of model %s cannot be loaded: %s", model.name, error)
            raise ApiError(
                MODEL_FAILED, f"the tokenizer of model {model.name!r} cannot be loaded"
            ) from error
        finally:
            del self._loading[model.revision]
        self._codecs[model.revision] = codec
        return codec


def _loaded(
    load: Callable[[Path], TextCodec | EncoderCodec], folder: Path
) -> TextCodec | EncoderCodec:
    """Reading a tokenizer takes as much memory again as it leaves in use (55 MiB for one of 152,000
    tokens), and the C library keeps that unless it is told."""
    codec = load(folder)
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # Not glibc.
            ctypes.CDLL(None).malloc_trim(0)
    return codec
