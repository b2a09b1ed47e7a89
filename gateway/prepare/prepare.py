"""Stage 2: a well-formed request becomes token ids with every bound and default filled in.

Comes in: a `WireRequest` and who sent it. Goes out: a `Prepared` (the request in token ids, what
binds the worker, and how its answer is read), or an ApiError; nothing has been reserved yet.

Templates and tokenizers run in the processes of text/prepare_pool.py. What clients say of tools and
of the form of the answer is read here, in a thread where it is long: it costs milliseconds at its
bounds. What encoders are asked is prepared by encode_prepare.py.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import msgspec

from engine.protocol import SamplingParams
from gateway.api.bodies import invalid
from gateway.api.output_plan import PLAIN, OutputFormats, OutputPlan, plan, understand
from gateway.api.told_fields import MAX_NAMES
from gateway.api.tool_messages import calls_for_template, id_for_template
from gateway.api.tool_types import ResponseFormat, TextFormat
from gateway.api.tools.output_parser import IdentityParser, OutputParser
from gateway.api.wire import Message, WireRequest
from gateway.api.wire_body import BATCH_TIER
from gateway.auth.auth import find_model
from gateway.auth.directory import Directory
from gateway.cache.cache_request import (
    NO_CACHE_HEADERS,
    Turn,
    question_of,
    read_cache_headers,
    turn_of,
)
from gateway.cache.policy import cache_rule
from gateway.cache.policy.cache_rule import OFF, CachePlan, CacheRequest
from gateway.errors import context_overflow, wrong_task
from gateway.prepare.lengths import Lengths, PrepareBounds, lengths_of
from gateway.prepare.template_values import NOTHING_SAID, TemplateValues, template_values
from gateway.text.codecs import Codecs, TextModel, prompt_ids
from gateway.text.prepare_messages import EncodeChat, EncodePrompt, Ids, Job, Longer, Measure
from gateway.text.templates import TemplateRefused
from gateway.types import SEED_MASK, HostedModel, PreparedRequest, Principal

_BLOCK_BYTES = 4096
_T = TypeVar("_T")


class RandomBytes:
    """Used on one event loop. No byte is given out twice; a fork must not share one."""

    def __init__(self, source: Callable[[int], bytes] = os.urandom) -> None:
        self._source = source
        self._block = b""
        self._at = 0

    def take(self, num_bytes: int) -> bytes:
        """So many, at most 4096."""
        end = self._at + num_bytes
        if end > len(self._block):
            self._block = self._source(_BLOCK_BYTES)
            self._at, end = 0, num_bytes
        taken = self._block[self._at : end]
        self._at = end
        return taken


# Prompts beyond it are measured before they are rendered and encoded; few that fit are so long.
_LONG_CHARS_PER_TOKEN = 6
MAX_SCORES = 1 << 18
"""Log-probabilities of the tokens of several prompts in one answer: half a second to write."""
# What is structured and longer is planned in a thread.
_LONG_BYTES = 1 << 14


class Prepared(msgspec.Struct, frozen=True):
    """What the later stages work with."""

    request: PreparedRequest
    codec: TextModel
    cache: CachePlan
    new_parser: Callable[[], OutputParser] = IdentityParser
    """Makes the parser of one choice's text."""
    turn: Turn | None = None
    """Set where the cache is to be looked up."""

    ignored: tuple[str, ...] = ()
    """Fields of the request that have no effect."""
    asked: WireRequest | None = None
    """What it was made of: dialects repeat some of it."""

    answer_bytes = 0
    """A text is bounded by its stream."""


class Encoded(msgspec.Struct, frozen=True):
    """A request's prompts in token ids. `ignored`: its fields without effect."""

    model: HostedModel
    codec: TextModel
    lengths: Lengths
    prompts: list[list[int]]
    plan: OutputPlan
    ignored: tuple[str, ...]


class Preparer:
    """Stage 2 of what is generated. One object per gateway process."""

    def __init__(
        self,
        directory: Directory,
        codecs: Codecs,
        bounds: PrepareBounds,
        has_embedder: bool = False,
        judges: bool = False,
    ) -> None:
        """`has_embedder`: the cache can compare meanings; `judges`: it keeps no answer of which the
        model was not sure."""
        self._judges = judges
        self._has_embedder = has_embedder
        self._directory = directory
        self._codecs = codecs
        self._bounds = bounds
        self._random = RandomBytes()

    def close(self) -> None:
        """End the processes that templates and tokenizers run in."""
        self._codecs.close()

    async def prepare(
        self,
        asked: WireRequest,
        principal: Principal,
        headers: Mapping[str, str],
        request_id: str,
        now_at: float,
    ) -> Prepared:
        """Raises ApiError: unknown model, a prompt that does not fit or cannot be rendered."""
        cache = self._cache(asked, principal, headers)
        encoded = await self.encoded(asked, principal)
        model, codec, plan = encoded.model, encoded.codec, encoded.plan
        lengths, prompts = encoded.lengths, encoded.prompts
        longest = max(map(len, prompts))
        only_prompt = asked.max_tokens == 0
        request = PreparedRequest(
            request_id=request_id,
            kind=asked.kind,
            model=model,
            prompt_token_ids=prompts[0]
            if len(prompts) == 1
            else list(chain.from_iterable(prompts)),
            max_tokens=self._max_tokens(asked, model, longest, lengths),
            sampling=_sampling(asked, self._random),
            stop_token_ids=_stop_ids(asked, codec),
            stop_strings=asked.stop,
            stream=asked.stream,
            include_usage=asked.include_usage,
            continuous_usage=asked.continuous_usage,
            obfuscates=asked.obfuscates,
            service_tier=asked.service_tier,
            is_batch=asked.service_tier == BATCH_TIER,
            reasoning_fields=self._bounds.reasoning_fields,
            cache_mode=cache.mode,
            created_at=int(now_at),
            rates=self._directory.rates(principal.tenant_id, model.name, now_at),
            num_choices=asked.n * len(prompts),
            prompt_lengths=tuple(map(len, prompts)) if len(prompts) > 1 else (),
            priority=asked.priority,
            logprobs=asked.logprobs,
            prompt_logprobs=max(asked.prompt_logprobs, asked.logprobs if asked.echo else -1),
            shown_prompt_logprobs=asked.prompt_logprobs,
            echoes=_echoes(asked, codec, prompts),
            only_prompt=only_prompt,
            continues_text=asked.continue_final_message,
            constraint=plan.constraint,
            shown_token_ids=frozenset(
                codec.formats.special_ids[token] for token in plan.spelled_tokens
            ),
            is_judged=self._judges and cache.decision == "lookup" and cache.keeps,
        )
        turn = None
        if cache.decision == "lookup":
            longest = min(self._bounds.default_max_tokens, lengths.output or model.max_context)
            turn = turn_of(asked, longest, codec.tells_date)
            if (asked.max_tokens or 0) > request.max_tokens:  # by the context's bound
                turn = replace(turn, names_length=False)
        return Prepared(request, codec, cache, plan.new_parser, turn, encoded.ignored, asked)

    async def encoded(self, asked: WireRequest, principal: Principal) -> "Encoded":
        """The prompts in token ids, and how answers are read. Raises ApiError."""
        model = find_model(principal, self._directory, asked.model)
        lengths = lengths_of(principal, model, self._directory.limits)
        self._check(asked, model, lengths)
        codec = await self._codecs.text(model)
        said = NOTHING_SAID
        if asked.reasoning is not None or asked.template_values:
            has_marks = codec.formats.reasoning is not None
            about = asked.reasoning, asked.template_values, codec.variables, has_marks
            said = template_values(*about)
        encode = partial(self._encode, codec, model, principal.tenant_id, lengths, said)
        ids, plan = await encode(asked)
        prompts = [ids, *[(await encode(one))[0] for one in _each_prompt(asked)]]
        num_tokens = sum(map(len, prompts))
        lengths.check_prompt(_param(asked), num_tokens)
        if len(prompts) * asked.n > 1:
            _check_scores(asked, num_tokens)
        told = (*asked.ignored, *said.ignored)[:MAX_NAMES]
        return Encoded(model, codec, lengths, prompts, plan, told)

    def _cache(
        self, asked: WireRequest, principal: Principal, headers: Mapping[str, str]
    ) -> CachePlan:
        """Raises ApiError for headers that cannot be obeyed."""
        cache_headers = read_cache_headers(headers, self._has_embedder)
        if cache_headers is NO_CACHE_HEADERS and principal.cache.mode == "off":
            return OFF
        return cache_rule.decide(
            CacheRequest(
                policy=principal.cache,
                headers=cache_headers,
                temperature=asked.sampling.temperature,
                has_seed=asked.seed is not None,
                is_plain=asked.n == 1
                and not asked.more_prompts
                and asked.logprobs < 0
                and asked.prompt_logprobs < 0
                and not asked.echo,
                has_turn=bool(question_of(asked)),
                has_embedder=self._has_embedder,
            )
        )

    def _check(self, asked: WireRequest, model: HostedModel, lengths: Lengths) -> None:
        """What can be said without reading texts. Raises ApiError."""
        if model.task != "generate":
            raise wrong_task(model.name, model.task)
        if asked.n > self._bounds.max_choices:
            raise invalid("n", f"n must be at most {self._bounds.max_choices}")
        num_prompts, most = 1 + len(asked.more_prompts), self._bounds.max_prompts
        if num_prompts > 1 and num_prompts * asked.n > most:
            raise invalid(
                "prompt",
                f"prompt has {num_prompts} prompts and n is {asked.n}: one request may have at "
                f"most {most} answers, send several requests",
            )
        lengths.check_output("max_tokens", asked.max_tokens or 0)
        last = model.vocab_size - 1
        if asked.sampling.logit_bias and max(asked.sampling.logit_bias) > last:
            raise invalid(
                "logit_bias", f"logit_bias contains a token id that is not between 0 and {last}"
            )
        if asked.stop_token_ids and max(asked.stop_token_ids) > last:
            message = f"stop_token_ids contains a token id that is not between 0 and {last}"
            raise invalid("stop_token_ids", message)
        if asked.kind == "chat":
            # However it is rendered, a message is a token at least.
            self._check_length(asked, model, len(asked.messages), "at least ")
        for prompt in (asked.prompt, *asked.more_prompts):
            if isinstance(prompt, str):
                continue
            self._check_length(asked, model, len(prompt))
            if prompt and not 0 <= min(prompt) <= max(prompt) <= last:
                message = f"prompt contains a token id that is not between 0 and {last}"
                raise invalid("prompt", message)

    async def _encode(
        self,
        codec: TextModel,
        model: HostedModel,
        tenant_id: str,
        lengths: Lengths,
        said: TemplateValues,
        asked: WireRequest,
    ) -> tuple[list[int], OutputPlan]:
        """The prompt, and how its answer is read."""
        param = _param(asked)
        form = PLAIN
        if asked.kind == "completion" and not isinstance(asked.response_format, TextFormat):
            form = await _planned(asked, _completion_form, asked.response_format)
        if not isinstance(asked.prompt, str):
            return list(asked.prompt), form

        async def ask(job: Job) -> Ids:
            reply = await self._codecs.ask(model, job, tenant_id)
            if isinstance(reply, Longer):
                if reply.is_exact:
                    lengths.check_prompt(param, reply.num_tokens)
                hedge = "" if reply.is_exact else "at least "
                self._check_length(asked, model, reply.num_tokens, hedge)
            assert isinstance(reply, Ids), type(reply)
            return reply

        try:
            # Rendering and encoding megabytes that cannot fit would take seconds.
            texts = [asked.prompt] if asked.kind == "completion" else _shown_texts(asked, codec)
            if sum(map(len, texts)) > _LONG_CHARS_PER_TOKEN * model.max_context:
                await ask(Measure(model.pack_dir, texts, model.max_context))
            if asked.kind == "completion":
                about = model.pack_dir, asked.prompt, model.max_context, asked.is_bare
                found = await ask(EncodePrompt(*about))
                ids, plan = prompt_ids(found), form
            else:
                ids, plan = await _chat(codec, model, asked, said, ask)
        except TemplateRefused as error:
            raise invalid(
                param,
                f"the chat template of model {model.name!r} rejects these messages: {error}",
            ) from error
        except ValueError as error:
            raise invalid(param, str(error)) from error
        if not ids:
            raise invalid(param, f"{param} must have at least one token")
        if min(ids) < 0 or max(ids) >= model.vocab_size:
            last = model.vocab_size - 1
            raise invalid(param, f"{param} contains a token id that is not between 0 and {last}")
        return ids, plan

    def _max_tokens(
        self, asked: WireRequest, model: HostedModel, num_prompt: int, lengths: Lengths
    ) -> int:
        room = self._check_length(asked, model, num_prompt)
        if asked.caps_max_tokens and asked.max_tokens:
            return min(asked.max_tokens, room)
        bound = min(self._bounds.default_max_tokens, room, lengths.output or room)
        # Where nothing is wanted the worker makes one token all the same, which is dropped.
        wanted = bound if asked.max_tokens is None else max(1, asked.max_tokens)
        if asked.sampling.min_tokens > wanted:
            raise invalid(
                "min_tokens",
                f"min_tokens must be at most {wanted}, the maximum length of the answer",
            )
        return wanted

    def _check_length(
        self, asked: WireRequest, model: HostedModel, num_prompt: int, hedge: str = ""
    ) -> int:
        """How many tokens may be generated. Raises ApiError where none may, or fewer than asked."""
        room = model.max_context - num_prompt
        wanted = asked.max_tokens or asked.sampling.min_tokens
        if asked.caps_max_tokens:
            wanted = 0
        if room >= 1 and wanted <= room:
            return room
        completion = f" and you asked for {wanted} in the completion" if wanted else ""
        param = _param(asked)
        what = f"{hedge}{num_prompt} are in the {param}{completion}"
        advice = f"Shorten the {param} or lower max_tokens"
        raise context_overflow(model.max_context, what, advice, param)


def _echoes(
    asked: WireRequest, codec: TextModel, prompts: Sequence[Sequence[int]]
) -> tuple[str, ...]:
    """The prompts as text, where answers begin with them."""
    if not asked.echo:
        return ()
    given = (asked.prompt, *asked.more_prompts)
    return tuple(
        text if isinstance(text, str) else codec.decode(ids)
        for text, ids in zip(given, prompts, strict=True)
    )


def _check_scores(asked: WireRequest, num_tokens: int) -> None:
    """Prompts' scores are written on the event loop and kept until then, for all answers at once;
    those of one answer are bounded by the context. Raises ApiError."""
    num_top = max(asked.prompt_logprobs, asked.logprobs if asked.echo else -1)
    most = MAX_SCORES // ((num_top + 1) * asked.n) if num_top >= 0 else num_tokens
    if num_tokens > most:
        param = _param(asked)
        raise invalid(
            param,
            f"{param} has {num_tokens} tokens in all, with the log-probabilities of each in every "
            f"answer it may have {most}: send several requests, or ask for fewer log-probabilities "
            "or answers",
        )


def _param(asked: WireRequest) -> str:
    return "messages" if asked.kind == "chat" else "prompt"


def _stop_ids(asked: WireRequest, codec: TextModel) -> list[int]:
    """The model's own, and the caller's."""
    own = [] if asked.ignore_eos else codec.stop_token_ids
    return [*own, *asked.stop_token_ids] if asked.stop_token_ids else own


def _completion_form(form: ResponseFormat) -> OutputPlan:
    """A completion has neither calls nor reasoning."""
    return plan(understand(response_format=form), OutputFormats(), "")


def _each_prompt(asked: WireRequest) -> Iterator[WireRequest]:
    """The same with each of the further prompts alone, without the form: it is planned once."""
    for prompt in asked.more_prompts:
        yield msgspec.structs.replace(
            asked, prompt=prompt, more_prompts=(), response_format=TextFormat()
        )


def _shown_texts(asked: WireRequest, codec: TextModel) -> list[str]:
    """What templates show of messages; of an assistant's some leave out the reasoning."""
    marks = codec.formats.reasoning
    texts = [message["content"] for message in asked.messages]
    return texts if marks is None else [text.rpartition(marks.close)[2] for text in texts]


def _sampling(asked: WireRequest, random: RandomBytes) -> SamplingParams:
    """A seed is always explicit from here on: the caller's, or one drawn here at the edge."""
    seed = int.from_bytes(random.take(8), "big") if asked.seed is None else asked.seed
    return msgspec.structs.replace(asked.sampling, seed=seed & SEED_MASK)


async def _chat(
    codec: TextModel,
    model: HostedModel,
    asked: WireRequest,
    said: TemplateValues,
    ask: Callable[[Job], Awaitable[Ids]],
) -> tuple[list[int], OutputPlan]:
    """Raises ApiError, TemplateRefused, ValueError."""
    structured = await _planned(
        asked,
        understand,
        asked.tools,
        asked.tool_choice,
        asked.parallel_tool_calls,
        asked.response_format,
    )
    marks = codec.formats.reasoning
    ends = asked.add_generation_prompt and said.closes_reasoning
    found = await ask(
        EncodeChat(
            model.pack_dir,
            [for_template(message, codec) for message in asked.messages],
            structured.shown,
            asked.add_generation_prompt,
            asked.continue_final_message,
            model.max_context,
            said.values,
            (marks.open, marks.close) if marks is not None and ends else None,
        )
    )
    made = await _planned(asked, plan, structured, codec.formats, found.tail)
    bounds = {
        "min_tokens": asked.sampling.min_tokens,
        "ignore_eos": asked.ignore_eos,
        "stop_token_ids": asked.stop_token_ids,
    }
    if made.constraint is not None and any(bounds.values()):
        param = next(name for name, value in bounds.items() if value)
        raise invalid(param, f"{param} is not allowed with tools or response_format")
    return prompt_ids(found), made


async def _planned(asked: WireRequest, work: Callable[..., _T], *about: Any) -> _T:
    """In a thread where a long request has tools or a form."""
    if asked.num_bytes > _LONG_BYTES and (asked.tools or asked.response_format is not None):
        return await asyncio.to_thread(work, *about)
    return work(*about)


def for_template(message: Message, codec: TextModel) -> dict[str, Any]:
    """The same with its calls, or the call it answers, as the model's template knows them."""
    out = dict(message)
    calls: Sequence[Any] = message.get("tool_calls", ())
    if calls:
        out["tool_calls"] = calls_for_template(calls, codec.formats.tools, codec.wants_text)
    if "tool_call_id" in message:
        out["tool_call_id"] = id_for_template(message["tool_call_id"], codec.formats.tools)
    return out
