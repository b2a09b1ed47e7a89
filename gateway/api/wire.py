"""What callers may send to /v1/chat/completions and /v1/completions, and what is made of it.

Comes in: a request body. Goes out: a `WireRequest`, typed, within range and free of contradictions,
or an ApiError that names the field. Fields and their ranges are wire_body.py's. Nothing here knows
models, tenants or tokens; answers are written by answer.py.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from engine.protocol import SamplingParams
from gateway.api.bodies import decode_body, invalid, unsupported
from gateway.api.form_spellings import form_of
from gateway.api.prompts import Prompt, read_prompts
from gateway.api.reasoning_types import Reasoning, check_template_values, reasoning_of
from gateway.api.told_fields import CHAT, decode_telling, shape_of
from gateway.api.tool_types import ResponseFormat, TextFormat, Tool, ToolChoice
from gateway.api.wire_body import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_SMALL_BYTES,
    NEUTRAL,
    NEUTRAL_IN_MESSAGE,
    NOTHING,
    OTHER_CONTENT,
    TIER_PRIORITIES,
    TOLD,
    TOLD_IN_FORM,
    TOLD_IN_MESSAGE,
    TOLD_SPELLINGS,
    TOLD_TIERS,
    ChatBody,
    CommonBody,
    CompletionBody,
    ContentPart,
    MessageBody,
)
from gateway.errors import UNSUPPORTED_PARAMETER, ApiError
from gateway.sealing.seals import TenantSeal

Kind: TypeAlias = Literal["chat", "completion"]
Message: TypeAlias = dict[str, Any]

_T = TypeVar("_T")

_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)
_COMPLETION = shape_of(CompletionBody)
_biases_decoder = msgspec.json.Decoder(dict[str, float] | None)
_values_decoder = msgspec.json.Decoder(dict[str, Any] | None)
_metadata_decoder = msgspec.json.Decoder(dict[str, str] | None)

# top_p 0 is legal and means the likeliest token alone; samplers want a probability above 0.
_SMALLEST_TOP_P = 1e-9
# As token ids are written in JSON keys. Ten digits: more than any vocabulary has.
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


class WireRequest(msgspec.Struct, frozen=True):
    """A well-formed request. `messages` is set for chat, `prompt` for completions.

    `max_tokens` and `seed` are None where the caller left them out; `sampling` has no seed yet.
    `logprobs`: -1 none, k the chosen token's and the k likeliest. `messages` are as templates know
    them, but `tool_calls` are tool_types.ToolCall. `user`: the caller's own user, by `user` and
    `safety_identifier` ("" where one of them is left out); () where both are.
    """

    kind: Kind
    model: str
    messages: tuple[Message, ...] = ()
    prompt: Prompt = ""
    more_prompts: tuple[Prompt, ...] = ()
    max_tokens: int | None = None
    ignore_eos: bool = False
    user: tuple[str, ...] = ()
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    seed: int | None = None
    priority: int = 0
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int = -1
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    obfuscates: bool = False
    service_tier: str = ""
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat = msgspec.field(default_factory=TextFormat)
    stop_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int = -1
    reasoning: Reasoning | None = None
    template_values: Mapping[str, Any] = msgspec.field(default_factory=dict)
    caps_max_tokens: bool = False
    """Where `max_tokens` is more than there is room for, the answer ends with the context."""
    is_bare: bool = False
    """The tokenizer puts nothing around the prompt."""
    seal: TenantSeal | None = None
    """How the dialect seals or signs reasoning, where it does."""
    shown: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Fields of the body that the answer repeats, by the dialect's own names."""
    num_bytes: int = 0
    """Of the whole body: what preparing it takes grows with it."""
    ignored: tuple[str, ...] = ()
    """Fields without effect, for the header `x-polyhost-ignored`."""


def decode(kind: Kind, body: bytes, tells_unknown: bool = False) -> WireRequest:
    """Raises ApiError: malformed JSON, a wrong type or range (with `param`), an unserved field,
    fields that contradict one another. `tells_unknown`: unknown fields are told and not refused."""
    if kind == "chat":
        chat, told = decode_telling(_chat_decoder, body, CHAT, tells_unknown)
        return chat_request(chat, len(body), told.names)
    completion, told = decode_telling(_completion_decoder, body, _COMPLETION, tells_unknown)
    return _completion(completion, len(body), told.names)


def chat_request(body: ChatBody, num_bytes: int, told: tuple[str, ...]) -> WireRequest:
    """What a body comes to that came in so many bytes, without what was `told`. Raises ApiError."""
    _refuse_unserved(body, NEUTRAL, "")
    small_field("metadata", body.metadata, _metadata_decoder)
    longest = body.max_completion_tokens
    if longest is not None and body.max_tokens not in (None, longest):
        raise invalid(
            "max_tokens",
            "max_tokens and max_completion_tokens have different values: send only "
            "max_completion_tokens",
        )
    if body.max_tokens == 0:
        raise invalid("max_tokens", "max_tokens must be at least 1")
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs is only allowed with logprobs: true")
    keeps_open = bool(body.continue_final_message)
    if keeps_open and body.add_generation_prompt:
        raise invalid(
            "add_generation_prompt",
            "continue_final_message and add_generation_prompt: true contradict each other: remove "
            "one of them",
        )
    messages = tuple(
        _message(message, f"messages[{index}].") for index, message in enumerate(body.messages)
    )
    if keeps_open and not (messages[-1]["content"] and messages[-1]["role"] == "assistant"):
        raise invalid(
            "continue_final_message",
            "continue_final_message needs an assistant message with text as the last message",
        )
    return WireRequest(
        kind="chat",
        messages=messages,
        max_tokens=body.max_tokens if longest is None else longest,
        logprobs=(body.top_logprobs or 0) if body.logprobs else -1,
        continue_final_message=keeps_open,
        add_generation_prompt=body.add_generation_prompt is not False and not keeps_open,
        tools=tuple(body.tools or ()),
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=reasoning_of(body.reasoning_effort, body.thinking),
        template_values=check_template_values(
            small_field("chat_template_kwargs", body.chat_template_kwargs, _values_decoder) or {}
        ),
        num_bytes=num_bytes,
        ignored=_told(body, told),
        **_common(body, body.safety_identifier),
    )


def _completion(body: CompletionBody, num_bytes: int, told: tuple[str, ...]) -> WireRequest:
    _refuse_unserved(body, NEUTRAL, "")
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "max_tokens must be at least 1, or 0 with echo")
    if body.max_tokens == 0 and (body.n or 1) > 1:
        raise invalid("n", "n must be 1 when max_tokens is 0")
    prompt, *more = read_prompts(body.prompt)
    return WireRequest(
        kind="completion",
        prompt=prompt,
        more_prompts=tuple(more),
        max_tokens=body.max_tokens,
        logprobs=-1 if body.logprobs is None else body.logprobs,
        echo=bool(body.echo),
        num_bytes=num_bytes,
        ignored=_told(body, told),
        **_common(body),
    )


def _common(body: CommonBody, safety_identifier: str | None = None) -> dict[str, Any]:
    """The fields of both kinds, checked, but for `max_tokens`."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise invalid("stream_options", "stream_options is only allowed with stream: true")
    longest = body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        longest = body.max_completion_tokens
    if longest is not None and (body.min_tokens or 0) > longest:
        raise invalid(
            "min_tokens", f"min_tokens must be at most {longest}, the value of max_tokens"
        )
    form = form_of(body, body.response_format) or TextFormat()
    if not isinstance(form, TextFormat):
        for param in ("min_tokens", "ignore_eos", "stop_token_ids"):
            if getattr(body, param):
                raise invalid(
                    param,
                    f"{param} is not allowed with response_format: the format decides where the "
                    "answer ends",
                )
    scored = body.prompt_logprobs
    if scored is not None and body.stream:
        raise invalid("prompt_logprobs", "prompt_logprobs is not allowed with stream: true")
    users = (body.user or "", safety_identifier or "")
    return {
        "model": body.model,
        "user": users if any(users) else (),
        "ignore_eos": bool(body.ignore_eos),
        "sampling": _sampling(body),
        "seed": body.seed,
        "priority": _place(body),
        "stop": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "response_format": form,
        "prompt_logprobs": -1 if scored is None else scored,
        "n": body.n or 1,
        "stream": bool(body.stream),
        "include_usage": bool(options and options.include_usage),
        "continuous_usage": bool(options and options.continuous_usage_stats),
        "obfuscates": bool(options and options.include_obfuscation),
        "service_tier": TOLD_TIERS.get(body.service_tier or "", ""),
    }


def _sampling(body: CommonBody) -> SamplingParams:
    top_p = 1.0 if body.top_p is None else max(body.top_p, _SMALLEST_TOP_P)
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_biases(small_field("logit_bias", body.logit_bias, _biases_decoder) or {}),
        min_tokens=body.min_tokens or 0,
    )


def _place(body: CommonBody) -> int:
    """Among its tenant's waiting requests the lowest goes first."""
    by_tier = TIER_PRIORITIES.get(body.service_tier or "auto", 0)
    if body.priority is not None and by_tier not in (0, body.priority):
        raise invalid(
            "priority", "priority and service_tier contradict each other: send only one of them"
        )
    return by_tier if body.priority is None else body.priority


def small_field(param: str, raw: msgspec.Raw, decoder: "msgspec.json.Decoder[_T]") -> _T:
    """A field whose honest values are short."""
    if len(raw) > MAX_SMALL_BYTES:
        raise invalid(param, f"{param} has {len(raw)} bytes, the maximum is {MAX_SMALL_BYTES}")
    return decode_body(decoder, bytes(raw), param)


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """Token ids as numbers; whether the model has them is prepare.py's to say."""
    if len(given) > MAX_BIASES:
        raise invalid("logit_bias", f"logit_bias may have at most {MAX_BIASES} tokens")
    biases: dict[int, float] = {}
    for name, value in given.items():
        if _TOKEN_ID.fullmatch(name) is None:
            raise invalid("logit_bias", f"logit_bias: {name[:40]!r} is not a token id")
        if not -MAX_BIAS <= value <= MAX_BIAS:
            raise invalid(
                "logit_bias",
                f"logit_bias of token {name} must be between -{MAX_BIAS:g} and {MAX_BIAS:g}",
            )
        if int(name) in biases:
            raise invalid("logit_bias", f"logit_bias has token {int(name)} twice")
        biases[int(name)] = value
    return biases


def _told(body: CommonBody, told: tuple[str, ...]) -> tuple[str, ...]:
    """What has no effect: by name at the top, `told` already, and inside messages."""
    names = list(told)
    if body.service_tier == "scale":
        names.append("service_tier")
    for name in TOLD_SPELLINGS:
        if getattr(body, name) is not None:
            names.append(name)
    if body.structured_outputs is not None:
        for name in TOLD_IN_FORM:
            if getattr(body.structured_outputs, name):
                names.append(f"structured_outputs.{name}")
    if isinstance(body, ChatBody):
        for name, neutral in TOLD.items():
            if getattr(body, name) not in neutral:
                names.append(name)
        if body.thinking is not None and body.thinking.display is not None:
            names.append("thinking.display")
        for name, neutral in TOLD_IN_MESSAGE.items():
            if any(getattr(message, name) not in neutral for message in body.messages):
                names.append(f"messages[].{name}")
    return tuple(names)


def _refuse_unserved(
    part: msgspec.Struct, neutral: dict[str, tuple[Any, ...]], prefix: str
) -> None:
    for name, values in neutral.items():
        value = getattr(part, name, None)
        if value is not None and value not in values:
            raise unsupported(prefix + name, " with this value" if values else "")


def _message(message: MessageBody, prefix: str) -> Message:
    """As chat templates know it: text parts joined by a line break, `developer` as `system`."""
    _refuse_unserved(message, NEUTRAL_IN_MESSAGE, prefix)
    content, role = message.content, message.role
    reasoning = message.reasoning_content
    reasoning = message.reasoning if reasoning is None else reasoning
    if content is None and not message.tool_calls:
        raise invalid(f"{prefix}content", f"{prefix}content is required")
    for name, owner in (
        ("tool_calls", "assistant"),
        ("reasoning_content", "assistant"),
        ("reasoning", "assistant"),
        ("tool_call_id", "tool"),
    ):
        if getattr(message, name) and role != owner:
            raise invalid(prefix + name, f"{prefix}{name} is only allowed with role {owner}")
    if role == "tool" and message.tool_call_id is None:
        raise invalid(f"{prefix}tool_call_id", f"{prefix}tool_call_id is required with role tool")
    if isinstance(content, list):
        content = "\n".join(
            _part_text(part, f"{prefix}content[{index}].") for index, part in enumerate(content)
        )
    fields: Message = {"role": "system" if role == "developer" else role, "content": content or ""}
    if reasoning is not None:
        fields["reasoning_content"] = reasoning
    for name in ("name", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            fields[name] = value
    if message.tool_calls:
        fields["tool_calls"] = message.tool_calls
    return fields


def _part_text(part: ContentPart, prefix: str) -> str:
    """Models are hosted without what they may have for images and sound."""
    if part.type != "text":
        raise ApiError(
            UNSUPPORTED_PARAMETER,
            f"{prefix}type: content of type {part.type[:40]!r} is not supported, models read text "
            "only: send text parts",
            f"{prefix}type",
        )
    if part.text is None:
        raise invalid(f"{prefix}text", f"{prefix}text is required")
    for name in OTHER_CONTENT:
        if getattr(part, name) != NOTHING:
            raise unsupported(prefix + name)
    return part.text
