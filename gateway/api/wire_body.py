"""The bodies of /v1/chat/completions and /v1/completions as structs: names, types and ranges.

Three sorts of fields:

    obeyed    they have their types here
    told      taken without effect, and named in the answer's header `x-polyhost-ignored` (`TOLD`,
              `TOLD_IN_MESSAGE`): they say how an answer may be made or kept, not what is in it
    refused   what would change the answer and is not served. Only neutral values are let through
              (`NEUTRAL`): a client that spells out a default gets its answer, one that wants the
              feature gets `unsupported_parameter`

`metadata`, `prompt_cache_key`, `user` and `safety_identifier` never change an answer's text; the
last two say whose kept answers may be given. Names that are not here are unknown: refused at the
top, told inside messages (told_fields.py).

What fields mean together is wire.py's. `top_k`, `min_p`, `repetition_penalty`, `min_tokens`,
`ignore_eos`, `priority`, `continue_final_message` and `add_generation_prompt` are spelled as vLLM
spells them.

Decoding runs on the event loop, so what could be millions of values is bounded before it is made
into objects (`msgspec.Raw`, read by wire.py), and structs of which there are many are not tracked
by the garbage collector: they cannot form circles.
"""

from typing import Annotated, Any, Literal

import msgspec

from gateway.api.form_spellings import GuidedFields
from gateway.api.reasoning_types import Effort, ThinkingBody
from gateway.api.tool_types import ResponseFormat, ToolCalls, ToolChoice, Tools

MAX_STOP_STRINGS = 4
MAX_STOP_IDS = 128
MAX_STOP_CHARS = 1024
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_PROMPT_IDS = 1 << 20
MAX_SMALL_BYTES = 65_536
MAX_BIAS = 100.0
MAX_PRIORITY = 1000

NOTHING = msgspec.Raw(b"null")

_Count = Annotated[int, msgspec.Meta(ge=1)]
_CountOrZero = Annotated[int, msgspec.Meta(ge=0)]
_Model = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_CHARS)]
_Stops = Annotated[list[_Stop], msgspec.Meta(max_length=MAX_STOP_STRINGS)]
_StopIds = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]], msgspec.Meta(max_length=MAX_STOP_IDS)
]
_Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
# HF's rule is "above 0"; beyond these bounds float32 logits lose their order.
_Repetition = Annotated[float, msgspec.Meta(ge=0.01, le=100)]
# -1 and 0: no bound, as vLLM and HF spell it.
_TopK = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Priority = Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
_CallId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class ContentPart(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A part of a message. Models here read text; what other kinds carry is not looked at."""

    type: str
    text: str | None = None
    image_url: msgspec.Raw = NOTHING
    input_audio: msgspec.Raw = NOTHING
    video_url: msgspec.Raw = NOTHING
    file: msgspec.Raw = NOTHING
    image: msgspec.Raw = NOTHING
    source: msgspec.Raw = NOTHING


OTHER_CONTENT = ("image_url", "input_audio", "video_url", "file", "image", "source")


class MessageBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A message of a chat, of any role."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str | Annotated[list[ContentPart], msgspec.Meta(min_length=1, max_length=MAX_PARTS)] | None
    ) = None
    name: str | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: _CallId | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # What an SDK's own assistant message carries when it is sent back: let through when empty.
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    images: Any = None
    function_call: Any = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class CommonBody(GuidedFields, forbid_unknown_fields=True, kw_only=True):
    """What both routes take."""

    model: _Model
    max_tokens: _CountOrZero | None = None
    min_tokens: _CountOrZero | None = None
    ignore_eos: bool | None = None
    temperature: _Temperature | None = None
    top_p: _Share | None = None
    top_k: _TopK | None = None
    min_p: _Share | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: _Repetition | None = None
    logit_bias: msgspec.Raw = NOTHING
    seed: int | None = None
    stop: _Stop | _Stops | None = None
    stop_token_ids: _StopIds | None = None
    prompt_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    n: _Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: Priority | None = None
    service_tier: Literal["auto", "default", "priority", "flex", "scale"] | None = None
    # vLLM's, whose defaults some clients spell out.
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    guided_decoding_backend: str | None = None


class ChatBody(CommonBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[MessageBody], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    metadata: msgspec.Raw = NOTHING
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: msgspec.Raw = NOTHING
    prompt_cache_retention: msgspec.Raw = NOTHING
    prompt_cache_options: msgspec.Raw = NOTHING
    verbosity: msgspec.Raw = NOTHING
    reasoning_effort: Effort | None = None
    thinking: ThinkingBody | None = None
    chat_template_kwargs: msgspec.Raw = NOTHING
    web_search_options: Any = None


class CompletionBody(CommonBody, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions."""

    prompt: msgspec.Raw
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: int | None = None
    suffix: str | None = None


TIER_PRIORITIES = {"priority": -1}
"""OpenAI's service tiers that order one tenant's requests; the others do not."""

BATCH_TIER = "flex"
"""The tier of requests of class batch."""

TOLD_TIERS = {
    "auto": "default",
    "default": "default",
    "scale": "default",
    "priority": "priority",
    "flex": "flex",
}
"""What an answer says it was served at, by what was asked for."""

TOLD: dict[str, tuple[Any, ...]] = {
    "store": (None, False),
    "prediction": (NOTHING,),
    "prompt_cache_retention": (NOTHING,),
    "prompt_cache_options": (NOTHING,),
    "verbosity": (NOTHING,),
}
"""Fields without effect, with the values that ask for nothing."""
TOLD_IN_MESSAGE: dict[str, tuple[Any, ...]] = {"annotations": (None, [])}

TOLD_SPELLINGS = ("spaces_between_special_tokens", "guided_decoding_backend")
TOLD_IN_FORM = (
    "disable_fallback",
    "disable_any_whitespace",
    "disable_additional_properties",
    "whitespace_pattern",
)

# Fields that are not served, with the values that mean the same as leaving them out.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "best_of": (1,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "suffix": ("",),
}
NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "refusal": ("",),
    "audio": (),
    "images": ([],),
    "function_call": (),
}
