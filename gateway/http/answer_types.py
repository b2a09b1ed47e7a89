"""What answers hold, as types: for the OpenAPI document, and the test of it with real answers.

Answers are written as bytes where they are made (answer/, dialects/), without objects in between;
nothing on the path of a request imports this. A field with a default may be absent. What a schema
or a caller decides (arguments, tools, metadata) is any value.
"""

from typing import Any, Literal

import msgspec

_Finish = Literal["stop", "length", "tool_calls"]


class _Struct(msgspec.Struct, kw_only=True):
    pass


class _CachedTokens(_Struct):
    cached_tokens: int


class _ReasoningTokens(_Struct):
    reasoning_tokens: int


class _Usage(_Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _CachedTokens
    completion_tokens_details: _ReasoningTokens | None = None


class _TopLogprob(_Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class _TokenLogprob(_TopLogprob):
    top_logprobs: list[_TopLogprob]


class _ChatLogprobs(_Struct):
    content: list[_TokenLogprob] | None
    refusal: None


class _Function(_Struct):
    name: str
    arguments: str


class _Call(_Struct):
    id: str
    type: Literal["function"]
    function: _Function


class _Message(_Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] = []


class _ChatChoice(_Struct):
    index: int
    message: _Message
    logprobs: _ChatLogprobs | None
    finish_reason: _Finish


class _PromptLogprob(_Struct):
    logprob: float
    rank: int | None
    decoded_token: str


_PromptLogprobs = list[dict[str, _PromptLogprob] | None]


class _Answer(_Struct):
    id: str
    created: int
    model: str


class ChatAnswer(_Answer):
    """A chat completion."""

    object: Literal["chat.completion"]
    system_fingerprint: str
    choices: list[_ChatChoice]
    usage: _Usage
    service_tier: str | None = None
    prompt_logprobs: _PromptLogprobs | None = None


class _FunctionDelta(_Struct):
    arguments: str
    name: str | None = None


class _CallDelta(_Struct):
    index: int
    function: _FunctionDelta
    id: str | None = None
    type: Literal["function"] | None = None


class _Delta(_Struct):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_CallDelta] = []


class _ChunkChoice(_Struct):
    index: int
    delta: _Delta
    logprobs: _ChatLogprobs | None
    finish_reason: _Finish | None


class ChatChunk(_Answer):
    """An event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    system_fingerprint: str
    choices: list[_ChunkChoice]
    usage: _Usage | None = None
    service_tier: str | None = None
    obfuscation: str = ""


class _TextLogprobs(_Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class _TextChoice(_Struct):
    index: int
    text: str
    logprobs: _TextLogprobs | None
    finish_reason: _Finish | None
    prompt_logprobs: _PromptLogprobs | None = None


class CompletionAnswer(_Answer):
    """A text completion, and each event of a streamed one."""

    object: Literal["text_completion"]
    system_fingerprint: str
    choices: list[_TextChoice]
    usage: _Usage | None = None
    service_tier: str | None = None
    obfuscation: str = ""


class _EncodeUsage(_Struct):
    prompt_tokens: int
    total_tokens: int


class _EncodeAnswer(_Answer):
    object: Literal["list"]
    usage: _EncodeUsage


class _Embedding(_Struct):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(_EncodeAnswer):
    """A vector for each input, as numbers or in base64."""

    data: list[_Embedding]


class _Class(_Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(_EncodeAnswer):
    """Class probabilities for each input."""

    data: list[_Class]


class _Document(_Struct):
    text: str


class _Ranked(_Struct):
    index: int
    relevance_score: float
    document: _Document | None = None


class RerankAnswer(_EncodeAnswer):
    """Documents, the most relevant first."""

    results: list[_Ranked]


class _Score(_Struct):
    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(_EncodeAnswer):
    """The relevance of each pair."""

    data: list[_Score]


class TokenizeAnswer(_Struct):
    """A prompt in token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(_Struct):
    """Token ids as text."""

    prompt: str


class _InputDetails(_Struct):
    cached_tokens: int
    cache_write_tokens: int


class _ResponseUsage(_Struct):
    input_tokens: int
    input_tokens_details: _InputDetails
    output_tokens: int
    output_tokens_details: _ReasoningTokens
    total_tokens: int


_Status = Literal["in_progress", "completed", "incomplete"]


class _Part(_Struct):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class _Item(_Struct):
    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: _Status
    role: Literal["assistant"] | None = None
    content: list[_Part] = []
    summary: list[Any] = []
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class ResponseAnswer(_Struct):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[_Item]
    previous_response_id: str | None
    service_tier: str
    store: bool
    truncation: str
    usage: _ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    user: str | None
    conversation: dict[str, str] | None = None


class _Thought(_Struct):
    thinking_tokens: int


class _MessagesUsage(_Struct):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: _Thought | None = None


class _AnswerBlock(_Struct):
    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class MessagesAnswer(_Struct):
    """A message of Anthropic's API."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[_AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: _MessagesUsage


class CountAnswer(_Struct):
    """The tokens of a message."""

    input_tokens: int


class ModelAnswer(_Struct):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    task: Literal["generate", "embed", "classify"]
    max_model_len: int
    residency: str
    load_eta_s: float | None


class ModelsAnswer(_Struct):
    """The models that this key may use."""

    object: Literal["list"]
    data: list[ModelAnswer]


class MessagesModel(_Struct):
    """A model in Anthropic's form, for requests with `anthropic-version`."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: str
    max_input_tokens: int
    max_tokens: int


class MessagesModels(_Struct):
    """A page of models in Anthropic's form."""

    data: list[MessagesModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class PageAnswer(_Struct):
    """Usage or costs by buckets of time."""

    object: Literal["page"]
    data: list[dict[str, Any]]
    has_more: bool
    next_page: str | None


class _ErrorBody(_Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(_Struct):
    """OpenAI's error object."""

    error: _ErrorBody


class _MessagesErrorBody(_Struct):
    type: str
    message: str
    details: dict[str, Any] | None = None


class MessagesErrorAnswer(_Struct):
    """Anthropic's error object."""

    type: Literal["error"]
    error: _MessagesErrorBody
    request_id: str


class OllamaErrorAnswer(_Struct):
    """Ollama's error object."""

    error: str


class VersionAnswer(_Struct):
    """The server's version."""

    version: str
