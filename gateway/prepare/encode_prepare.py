"""Stage 2 of what encoders are asked: texts become inputs in tokens, every bound checked.

Comes in: an `EncodeAsk` and who sent it. Goes out: an `EncodePrepared`, whose request holds all
inputs end to end, or an ApiError; nothing has been reserved yet. `pieces_of` cuts such a request
into what workers get: a request of a million tokens must not stand in the way of others.

Texts are encoded some at a time, each time as a job of its own for the prepare processes, and no
further than the request may have tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec

from engine.protocol import EncodeInputs, SamplingParams
from gateway.api.bodies import invalid
from gateway.api.encode_wire import EncodeAsk
from gateway.auth.auth import find_model
from gateway.auth.directory import Directory
from gateway.cache.cache_request import read_cache_headers
from gateway.cache.policy import cache_rule
from gateway.cache.policy.cache_rule import CachePlan, CacheRequest
from gateway.errors import INVALID_REQUEST, WRONG_TASK, ApiError, context_overflow, wrong_task
from gateway.prepare.lengths import lengths_of
from gateway.text.codecs import Codecs
from gateway.text.prepare_messages import (
    EncodePairs,
    EncoderFacts,
    EncoderInput,
    EncodeTexts,
    Inputs,
    Job,
    Longer,
)
from gateway.types import HostedModel, PreparedRequest, Principal
from gateway.workers.choices import choice_id

_BATCH_INPUTS = 64
_BATCH_CHARS = 131_072
_MAX_PIECE_INPUTS = 256
"""Bounds a piece's rows, whose frame from the worker is then 4 MiB at 4,096 dimensions."""

_ROW_BYTES = 4
_BASE64_BYTES = 16 / 3
_DECIMAL_BYTES = 21
"""Of one number: as it comes from the worker, and as it is written."""


@dataclass(frozen=True, slots=True)
class EncodePrepared:
    """What the later stages work with. `width`: numbers in a row of the worker's answer."""

    asked: EncodeAsk
    request: PreparedRequest
    width: int
    cache: CachePlan

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields of the request that have no effect."""
        return self.asked.ignored

    @property
    def answer_bytes(self) -> int:
        """What all rows and the answer that is written of them take, about."""
        assert self.request.encode is not None
        written = _BASE64_BYTES if self.asked.encoding_format == "base64" else _DECIMAL_BYTES
        return int((_ROW_BYTES + written) * self.width * len(self.request.encode.lengths))


class EncodePreparer:
    """Stage 2 for encoders. One object per gateway process. A request has `max_tokens` at most."""

    def __init__(self, directory: Directory, codecs: Codecs, max_tokens: int) -> None:
        self._directory = directory
        self._codecs = codecs
        self._max_tokens = max_tokens

    async def prepare(
        self,
        asked: EncodeAsk,
        principal: Principal,
        headers: Mapping[str, str],
        request_id: str,
        now_at: float,
    ) -> EncodePrepared:
        """Raises ApiError: unknown model, one for something else, inputs that do not fit."""
        model = find_model(principal, self._directory, asked.model)
        width = _width(asked, model)
        ask = CacheRequest(
            policy=principal.cache,
            headers=read_cache_headers(headers, has_embedder=True),
            temperature=0.0,
            has_seed=False,
            is_plain=False,
        )
        codec = await self._codecs.encoder(model)
        inputs = await self._inputs(codec, model, asked, principal.tenant_id)
        request = PreparedRequest(
            request_id=request_id,
            kind=asked.kind,
            model=model,
            prompt_token_ids=list(chain.from_iterable(item.ids for item in inputs)),
            max_tokens=0,
            sampling=SamplingParams(),
            stop_token_ids=[],
            priority=asked.priority,
            created_at=int(now_at),
            rates=self._directory.rates(principal.tenant_id, model.name, now_at),
            encode=EncodeInputs([len(item.ids) for item in inputs], _type_ids(inputs)),
        )
        lengths = lengths_of(principal, model, self._directory.limits)
        lengths.check_prompt(asked.param, len(request.prompt_token_ids))
        return EncodePrepared(asked, request, width, cache_rule.decide(ask))

    async def _inputs(
        self, codec: EncoderFacts, model: HostedModel, asked: EncodeAsk, tenant_id: str
    ) -> list[EncoderInput]:
        """In tokens, each no longer than the model takes, all together no more than allowed."""
        longest, cut = _longest(codec, model, asked)
        room = longest - codec.num_special_pair
        found: list[EncoderInput] = []
        num_tokens = 0
        for batch in _batches(asked.inputs, 1 if len(asked.queries) > 1 else _BATCH_INPUTS):
            if isinstance(batch[0], str):
                texts = [text for text in batch if isinstance(text, str)]
                job: Job = EncodeTexts(model.pack_dir, texts, longest, cut)
                if asked.is_of_pairs:
                    query, most = _query(asked, len(found)), asked.document_cut
                    job = EncodePairs(model.pack_dir, query, room, texts, longest, most)
                encoded = await self._ask(job, model, asked, len(found), tenant_id)
            else:
                lists = [ids for ids in batch if not isinstance(ids, str)]
                encoded = [EncoderInput(ids[:longest] if cut else ids) for ids in lists]
                self._check_ids(model, asked, encoded, len(found))
            found += encoded
            num_tokens += sum(len(item.ids) for item in encoded)
            if num_tokens > self._max_tokens:
                raise invalid(
                    asked.param,
                    f"{asked.param} has more than {self._max_tokens} tokens, the maximum for one "
                    "request: split it into several requests",
                )
        if not all(item.ids for item in found):
            raise invalid(asked.param, f"{asked.param} contains a text that has no tokens")
        return found

    async def _ask(
        self, job: Job, model: HostedModel, asked: EncodeAsk, before: int, tenant_id: str
    ) -> list[EncoderInput]:
        """By a prepare process; `before` inputs are done. A query that leaves no room for a
        document is refused: it stands before every one of them."""
        try:
            reply = await self._codecs.ask(model, job, tenant_id)
        except ValueError as error:
            raise invalid(asked.param, str(error)) from error
        if isinstance(reply, Longer):
            if reply.is_exact:
                raise _too_long(model, asked, before + reply.index, reply.num_tokens)
            what = "the query leaves no room for a document beside its special tokens"
            param = "text_1" if asked.kind == "score" else "query"
            raise context_overflow(model.max_context, what, f"Shorten the {param}", param)
        assert isinstance(reply, Inputs)
        return reply.inputs

    def _check_ids(
        self, model: HostedModel, asked: EncodeAsk, inputs: Sequence[EncoderInput], before: int
    ) -> None:
        last = model.vocab_size - 1
        for index, item in enumerate(inputs, before):
            if not 0 <= min(item.ids) <= max(item.ids) <= last:
                message = f"input[{index}] contains a token id that is not between 0 and {last}"
                raise invalid(asked.param, message)
            if len(item.ids) > model.max_context:
                raise _too_long(model, asked, index, len(item.ids))


def pieces_of(request: PreparedRequest, piece_tokens: int) -> list[PreparedRequest]:
    """The request as workers get it: in pieces of whole inputs, each of at most `piece_tokens`
    (or one longer input). Names are as those of choices."""
    assert request.encode is not None
    spans = list(_spans(request.encode.lengths, piece_tokens))
    if len(spans) == 1:
        return [request]
    pieces = []
    first_token = 0
    for number, (first, end) in enumerate(spans):
        lengths = request.encode.lengths[first:end]
        tokens = slice(first_token, first_token + sum(lengths))
        first_token = tokens.stop
        pieces.append(
            msgspec.structs.replace(
                request,
                request_id=choice_id(request.request_id, number, len(spans)),
                prompt_token_ids=request.prompt_token_ids[tokens],
                encode=EncodeInputs(lengths, request.encode.type_ids[tokens]),
                continues=number > 0,
            )
        )
    return pieces


def _spans(lengths: Sequence[int], piece_tokens: int) -> Iterator[tuple[int, int]]:
    first = num_tokens = 0
    for index, length in enumerate(lengths):
        full = num_tokens + length > piece_tokens or index - first >= _MAX_PIECE_INPUTS
        if index > first and full:
            yield first, index
            first, num_tokens = index, 0
        num_tokens += length
    yield first, len(lengths)


def _width(asked: EncodeAsk, model: HostedModel) -> int:
    """Raises ApiError where the model is for something else."""
    if model.task != ("embed" if asked.kind == "embedding" else "classify"):
        raise wrong_task(model.name, model.task)
    if asked.is_of_pairs and len(model.labels) != 1:
        raise ApiError(
            WRONG_TASK,
            f"the model {model.name!r} is a classifier with {len(model.labels)} classes: reranking "
            "and scoring need a cross-encoder (one class)",
            "model",
        )
    if asked.dimensions is not None and asked.dimensions > model.dim:
        message = f"dimensions must be between 1 and {model.dim} for model {model.name!r}"
        raise ApiError(INVALID_REQUEST, message, "dimensions")
    return model.dim if asked.kind == "embedding" else len(model.labels)


def _longest(codec: EncoderFacts, model: HostedModel, asked: EncodeAsk) -> tuple[int, bool]:
    """How many tokens an input may have, and whether longer ones are cut."""
    if asked.cut is None or asked.cut < 0:
        return model.max_context, asked.cut is not None
    longest = min(asked.cut, model.max_context)
    num_special = codec.num_special_pair if asked.is_of_pairs else codec.num_special
    if isinstance(asked.inputs[0], str) and longest <= num_special:
        raise invalid(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens must be greater than {num_special}, the number of special "
            "tokens that the model adds to each text",
        )
    return longest, True


def _too_long(model: HostedModel, asked: EncodeAsk, index: int, num_tokens: int) -> ApiError:
    what = f"{asked.param}[{index}] has at least {num_tokens}, special tokens included"
    advice = "Shorten it, or set truncate_prompt_tokens"
    return context_overflow(model.max_context, what, advice, asked.param)


def _query(asked: EncodeAsk, index: int) -> str:
    """What the document of that index is read beside."""
    if not asked.queries:
        return asked.query
    return asked.queries[index if len(asked.queries) > 1 else 0]


def _batches(
    inputs: Sequence[str] | Sequence[list[int]], most: int
) -> Iterator[list[str | list[int]]]:
    """Of what takes about as long to encode."""
    batch: list[str | list[int]] = []
    size = 0
    for item in inputs:
        batch.append(item)
        size += len(item)
        if len(batch) == most or size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _type_ids(inputs: Sequence[EncoderInput]) -> list[int]:
    if not any(item.type_ids for item in inputs):
        return []
    return [i for item in inputs for i in (item.type_ids or [0] * len(item.ids))]
