"""Stage 2: a well-formed request becomes token ids with every bound and default filled in.

Comes in: a `WireRequest` and who sent it. Goes out: a `Prepared` (the request in token ids, and the
codec that will turn its answer into text), or an ApiError; nothing has been reserved yet.

Templates and tokenizers are the gateway's only heavy work, so they run in a small thread pool. What
waits for it is bounded: beyond the bound the answer is an early 429. Codecs are kept per model
revision, least recently used first out, and loaded once however many requests ask at the same time.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cachetools import LRUCache

from engine.protocol import SamplingParams
from gateway import semantic_cache
from gateway.auth import find_model
from gateway.directory import Directory
from gateway.errors import (
    CONTEXT_LENGTH,
    INVALID_REQUEST,
    MODEL_FAILED,
    QUEUE_FULL,
    ApiError,
)
from gateway.policy import cache_rule
from gateway.policy.cache_rule import CacheAsk, CacheDecision
from gateway.templates import TemplateRefused
from gateway.tokenization import TextCodec, load_codec
from gateway.types import HostedModel, PreparedRequest, Principal
from gateway.wire import WireRequest

log = logging.getLogger(__name__)

_PREPARE_RETRY_S = 1.0
_SEED_MASK = (1 << 63) - 1
# top_p 0 is legal and means the likeliest token alone; samplers want a probability above 0.
_SMALLEST_TOP_P = 1e-9
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the later stages work with."""

    request: PreparedRequest
    codec: TextCodec
    cache: CacheDecision


@dataclass(frozen=True, slots=True)
class PrepareBounds:
    """`num_threads` work, `max_pending` requests wait or are worked on, `max_codecs` are kept."""

    num_threads: int
    max_pending: int
    max_codecs: int
    default_max_tokens: int


class Preparer:
    """Stage 2. One object per gateway process; call `close` at the end."""

    def __init__(self, directory: Directory, bounds: PrepareBounds) -> None:
        self._directory = directory
        self._bounds = bounds
        self._pool = ThreadPoolExecutor(bounds.num_threads, thread_name_prefix="prepare")
        self._codecs: LRUCache[str, TextCodec] = LRUCache(bounds.max_codecs)
        self._loading: dict[str, asyncio.Task[TextCodec]] = {}
        self._num_pending = 0

    def close(self) -> None:
        """Stop the threads; what they are at is finished first."""
        self._pool.shutdown(wait=True)

    async def prepare(
        self,
        asked: WireRequest,
        principal: Principal,
        headers: Mapping[str, str],
        request_id: str,
        now_at: float,
    ) -> Prepared:
        """Raises ApiError: unknown model, a prompt that does not fit or cannot be rendered."""
        model = find_model(principal, self._directory, asked.model)
        ask = CacheAsk(
            key_mode=principal.cache_mode,
            requested=semantic_cache.requested_mode(headers),
            temperature=asked.temperature,
            has_seed=asked.seed is not None,
        )
        codec = await self._codec(model)
        prompt_token_ids = await self._encode(codec, model, asked)
        decision = cache_rule.decide(ask)
        request = PreparedRequest(
            request_id=request_id,
            kind=asked.kind,
            model=model,
            prompt_token_ids=prompt_token_ids,
            max_tokens=self._max_tokens(asked, model, len(prompt_token_ids)),
            sampling=_sampling(asked),
            stop_token_ids=codec.stop_token_ids,
            stop_strings=asked.stop,
            stream=asked.stream,
            include_usage=asked.include_usage,
            cache_mode="exact" if decision == "lookup" else "off",
            created_at=int(now_at),
        )
        return Prepared(request, codec, decision)

    async def _codec(self, model: HostedModel) -> TextCodec:
        codec = self._codecs.get(model.revision)
        if codec is not None:
            return codec
        loading = self._loading.get(model.revision)
        if loading is None:
            loading = asyncio.create_task(self._load(model))
            self._loading[model.revision] = loading
        # Shielded: one caller that goes away must not take it from the others.
        return await asyncio.shield(loading)

    async def _load(self, model: HostedModel) -> TextCodec:
        try:
            codec = await self._in_pool(lambda: load_codec(Path(model.pack_dir)))
        except (OSError, ValueError) as error:
            log.error("tokenizer of model %s cannot be loaded: %s", model.name, error)
            raise ApiError(
                MODEL_FAILED, f"the tokenizer of model {model.name!r} cannot be loaded"
            ) from error
        finally:
            del self._loading[model.revision]
        self._codecs[model.revision] = codec
        return codec

    async def _encode(self, codec: TextCodec, model: HostedModel, asked: WireRequest) -> list[int]:
        param = "messages" if asked.kind == "chat" else "prompt"
        try:
            if asked.kind == "chat":
                ids = await self._in_pool(lambda: codec.encode_chat(asked.messages))
            elif isinstance(asked.prompt, str):
                text = asked.prompt
                ids = await self._in_pool(lambda: codec.encode_prompt(text))
            else:
                ids = list(asked.prompt)
        except TemplateRefused as error:
            raise ApiError(
                INVALID_REQUEST,
                f"the chat template of model {model.name!r} does not take these messages: {error}",
                param,
            ) from error
        except ValueError as error:
            raise ApiError(INVALID_REQUEST, str(error), param) from error
        if not ids:
            raise ApiError(INVALID_REQUEST, f"{param} must hold at least one token", param)
        if min(ids) < 0 or max(ids) >= model.vocab_size:
            raise ApiError(
                INVALID_REQUEST,
                f"{param} holds a token id outside 0 to {model.vocab_size - 1}",
                param,
            )
        return ids

    def _max_tokens(self, asked: WireRequest, model: HostedModel, num_prompt: int) -> int:
        room = model.max_context - num_prompt
        wanted = asked.max_tokens
        if room < 1 or (wanted or 0) > room:
            param = "messages" if asked.kind == "chat" else "prompt"
            completion = f" and {wanted} for the completion" if wanted else ""
            raise ApiError(
                CONTEXT_LENGTH,
                f"the context of model {model.name!r} holds {model.max_context} tokens, but "
                f"{num_prompt} are in the {param}{completion}: send less, or ask for less",
                param,
            )
        return min(self._bounds.default_max_tokens, room) if wanted is None else wanted

    async def _in_pool(self, work: Callable[[], _T]) -> _T:
        if self._num_pending >= self._bounds.max_pending:
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


def _sampling(asked: WireRequest) -> SamplingParams:
    """A seed is always explicit from here on: the caller's, or one drawn here at the edge."""
    seed = int.from_bytes(os.urandom(8), "big") if asked.seed is None else asked.seed
    return SamplingParams(
        temperature=asked.temperature,
        top_p=max(asked.top_p, _SMALLEST_TOP_P),
        seed=seed & _SEED_MASK,
    )
