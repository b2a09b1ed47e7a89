"""Requests that end with stage 2: a prompt becomes token ids, token ids become text, tokens are
counted. Nothing is computed by a model.

    tokenize        vLLM's /tokenize: a prompt or messages -> {"count", "max_model_len", "tokens"}
    detokenize      vLLM's /detokenize: token ids -> {"prompt"}
    count_tokens    Anthropic's /v1/messages/count_tokens -> {"input_tokens"}

Each counts as a request in limits, with no tokens, costs nothing and is not posted.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.api import token_wire
from gateway.api.bodies import invalid
from gateway.api.wire import WireRequest
from gateway.auth.auth import authenticate, find_model
from gateway.auth.directory import Directory
from gateway.dialects import messages_wire
from gateway.errors import context_overflow, wrong_task
from gateway.limits.limits import Limiter
from gateway.pipeline.active_request import Clocks
from gateway.prepare.prepare import Encoded, Preparer
from gateway.sealing.seals import Seals
from gateway.text.codecs import Codecs, TextModel
from gateway.text.detokenize import TextStream
from gateway.types import Answer, Call, HostedModel, JsonAnswer, Principal


class TokenRequests:
    """One object per gateway process."""

    def __init__(
        self,
        directory: Directory,
        preparer: Preparer,
        codecs: Codecs,
        limiter: Limiter,
        clocks: Clocks,
        seals: Seals,
        tells_unknown: bool,
    ) -> None:
        self._directory = directory
        self._preparer = preparer
        self._codecs = codecs
        self._limiter = limiter
        self._clocks = clocks
        self._seals = seals
        self._tells_unknown = tells_unknown

    async def tokenize(self, call: Call) -> Answer:
        """Raises ApiError."""
        principal = self._authenticate(call)
        body = await call.receive_body()
        asked, shows_texts = token_wire.decode_tokenize(body, self._tells_unknown)
        found = await self._encoded(call, principal, asked)
        [ids] = found.prompts
        names = [found.codec.pieces.name(i) for i in ids] if shows_texts else None
        said = {
            "count": len(ids),
            "max_model_len": found.model.max_context,
            "tokens": ids,
            "token_strs": names,
        }
        return _answer(said)

    async def count_tokens(self, call: Call) -> Answer:
        """Raises ApiError."""
        principal = self._authenticate(call)
        body = await call.receive_body()
        seal = self._seals.of(principal.tenant_id)
        asked = messages_wire.decode(body, self._tells_unknown, seal, needs_length=False)
        found = await self._encoded(
            call, principal, msgspec.structs.replace(asked, max_tokens=None)
        )
        return _answer({"input_tokens": len(found.prompts[0])})

    async def detokenize(self, call: Call) -> Answer:
        """Raises ApiError."""
        principal = self._authenticate(call)
        body = await call.receive_body()
        asked, told = token_wire.decode_detokenize(body, self._tells_unknown)
        model = find_model(principal, self._directory, asked.model)
        if model.task != "generate":
            raise wrong_task(model.name, model.task)
        _check_ids(model, asked.tokens)
        codec = await self._codecs.text(model)
        if told:
            call.tell_ignored(told)
        await self._count(call, principal, model)
        # Thousands of tokens are milliseconds of work.
        text = await asyncio.to_thread(_text_of, codec, asked.tokens)
        return _answer({"prompt": text})

    def _authenticate(self, call: Call) -> Principal:
        now_at = self._clocks.now_at()
        return authenticate(call.headers, self._directory, now_at, call.client)

    async def _encoded(self, call: Call, principal: Principal, asked: WireRequest) -> Encoded:
        found = await self._preparer.encoded(asked, principal)
        if found.ignored:
            call.tell_ignored(found.ignored)
        await self._count(call, principal, found.model)
        return found

    async def _count(self, call: Call, principal: Principal, model: HostedModel) -> None:
        """One request, and nothing else of its limits."""
        call.note.model = model.name
        request_id = "tokens-" + call.http_id
        await self._limiter.count(principal, request_id, call.answer_headers, model)


def _check_ids(model: HostedModel, ids: Sequence[int]) -> None:
    last = model.vocab_size - 1
    if len(ids) > model.max_context:
        advice = "Send them in several requests"
        raise context_overflow(model.max_context, f"{len(ids)} were sent", advice, "tokens")
    if ids and not 0 <= min(ids) <= max(ids) <= last:
        raise invalid("tokens", f"tokens contains an id that is not between 0 and {last}")


def _text_of(codec: TextModel, ids: Sequence[int]) -> str:
    """With control tokens by their names."""
    shown = frozenset(codec.formats.special_ids.values())
    text = TextStream(codec.pieces, (), [], keep_leading_space=True, shown_ids=shown)
    return text.push(list(ids)) + text.finish()


def _answer(body: Mapping[str, Any]) -> JsonAnswer:
    return JsonAnswer([msgspec.json.encode(body)])
