"""What callers may send to /v1/embeddings, /v1/classify, /v1/rerank and /v1/score, and what is made
of it.

Comes in: a request body. Goes out: an `EncodeAsk`, or an ApiError that names the field. Names are
OpenAI's for embeddings, Cohere's and Jina's for rerank, vLLM's where those have none. Nothing here
knows models or tokens; answers are written by encode_answer.py.

Decoding runs on the event loop, so inputs are counted before they are made into objects.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from gateway.api.bodies import decode_body, invalid
from gateway.api.prompts import surely_more_texts
from gateway.api.told_fields import decode_telling, shape_of
from gateway.api.wire_body import MAX_PROMPT_IDS, Priority
from gateway.errors import INVALID_REQUEST, ApiError
from gateway.types import EncodeKind

Inputs: TypeAlias = tuple[str, ...] | tuple[list[int], ...]
EncodingFormat: TypeAlias = Literal["float", "base64"]

_Model = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Cut = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]


_NOTHING = msgspec.Raw(b"null")


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: _Model
    truncate_prompt_tokens: _Cut | None = None
    user: str | None = None
    priority: Priority | None = None


class EmbeddingBody(_Body, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings."""

    input: msgspec.Raw
    encoding_format: EncodingFormat | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None


class ClassifyBody(_Body, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/classify."""

    input: msgspec.Raw


class _DocumentBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    text: str


class RerankBody(_Body, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/rerank."""

    query: Annotated[str, msgspec.Meta(min_length=1)]
    documents: msgspec.Raw
    top_n: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None


class ScoreBody(_Body, forbid_unknown_fields=True, kw_only=True):
    """Both fields have two names at vLLM."""

    text_1: msgspec.Raw = _NOTHING
    text_2: msgspec.Raw = _NOTHING
    queries: msgspec.Raw = _NOTHING
    documents: msgspec.Raw = _NOTHING


_embedding_decoder = msgspec.json.Decoder(EmbeddingBody)
_classify_decoder = msgspec.json.Decoder(ClassifyBody)
_score_decoder = msgspec.json.Decoder(ScoreBody)
_rerank_decoder = msgspec.json.Decoder(RerankBody)
_text_decoder = msgspec.json.Decoder(str)
_texts_decoder = msgspec.json.Decoder(list[str])
_ids_decoder = msgspec.json.Decoder(list[int])
_id_lists_decoder = msgspec.json.Decoder(list[list[int]])
_documents_decoder = msgspec.json.Decoder(list[str | _DocumentBody])


@dataclass(frozen=True, slots=True)
class EncodeAsk:
    """A well-formed request. `inputs` of a rerank are its documents.

    `cut`: tokens an input is cut to; -1: what the model takes; None: longer ones are refused.
    `dimensions`: None for all. `document_cut`: tokens of a document, 0: as many as fit. `queries`:
    of a score, one for all inputs or one for each.
    """

    kind: EncodeKind
    model: str
    inputs: Inputs
    query: str = ""
    queries: tuple[str, ...] = ()
    document_cut: int = 0
    cut: int | None = None
    encoding_format: EncodingFormat = "float"
    dimensions: int | None = None
    top_n: int | None = None
    return_documents: bool = True
    priority: int = 0
    ignored: tuple[str, ...] = ()
    style: Literal["openai", "ollama", "ollama_one"] = "openai"
    """How an embedding is answered; the last: one alone."""

    @property
    def param(self) -> str:
        """What the inputs are called."""
        if self.kind == "score":
            return "text_2"
        return "documents" if self.kind == "rerank" else "input"

    @property
    def is_of_pairs(self) -> bool:
        """Its inputs are read beside a query."""
        return self.kind in ("rerank", "score")


def decode(
    kind: EncodeKind, body: bytes, max_inputs: int, tells_unknown: bool = False
) -> EncodeAsk:
    """Raises ApiError: malformed JSON, a wrong type or range (with `param`), an unserved field,
    more than `max_inputs`. `tells_unknown`: unknown fields are told and not refused."""
    if kind == "rerank":
        ranks, told = decode_telling(_rerank_decoder, body, shape_of(RerankBody), tells_unknown)
        return _rerank(ranks, max_inputs, told.names)
    if kind == "score":
        scores, told = decode_telling(_score_decoder, body, shape_of(ScoreBody), tells_unknown)
        return _score(scores, max_inputs, told.names)
    if kind == "classify":
        asked, told = decode_telling(_classify_decoder, body, shape_of(ClassifyBody), tells_unknown)
        inputs = read_inputs(asked.input, max_inputs)
        return EncodeAsk(
            "classify",
            asked.model,
            inputs,
            cut=_cut(asked),
            priority=asked.priority or 0,
            ignored=told.names,
        )
    wanted, told = decode_telling(_embedding_decoder, body, shape_of(EmbeddingBody), tells_unknown)
    return EncodeAsk(
        "embedding",
        wanted.model,
        read_inputs(wanted.input, max_inputs),
        cut=_cut(wanted),
        encoding_format=wanted.encoding_format or "float",
        dimensions=wanted.dimensions,
        priority=wanted.priority or 0,
        ignored=told.names,
    )


def _rerank(asked: RerankBody, max_inputs: int, told: tuple[str, ...]) -> EncodeAsk:
    raw = bytes(asked.documents)
    _count_texts("documents", raw, max_inputs)
    documents = decode_body(_documents_decoder, raw, "documents")
    _check_count("documents", documents, max_inputs)
    return EncodeAsk(
        "rerank",
        asked.model,
        tuple(part if isinstance(part, str) else part.text for part in documents),
        asked.query,
        cut=_cut(asked),
        document_cut=asked.max_tokens_per_doc or 0,
        top_n=asked.top_n,
        return_documents=asked.return_documents is not False,
        priority=asked.priority or 0,
        ignored=told,
    )


def _score(asked: ScoreBody, max_inputs: int, told: tuple[str, ...]) -> EncodeAsk:
    queries = _side(asked.text_1, asked.queries, ("text_1", "queries"), max_inputs)
    documents = _side(asked.text_2, asked.documents, ("text_2", "documents"), max_inputs)
    if len(queries) not in (1, len(documents)):
        raise invalid(
            "text_1",
            f"text_1 has {len(queries)} texts and text_2 has {len(documents)}: send one text_1, or "
            "as many as text_2",
        )
    return EncodeAsk(
        "score",
        asked.model,
        documents,
        queries=queries,
        cut=_cut(asked),
        priority=asked.priority or 0,
        ignored=told,
    )


def _side(
    text: msgspec.Raw, other: msgspec.Raw, names: tuple[str, str], max_inputs: int
) -> tuple[str, ...]:
    """One text or several, by either name."""
    name = names[0] if other == _NOTHING else names[1]
    raw = bytes(text if other == _NOTHING else other)
    if text != _NOTHING and other != _NOTHING:
        raise invalid(name, f"{names[0]} and {names[1]} are the same: send only one of them")
    if raw == b"null":
        raise invalid(names[0], f"{names[0]} is required")
    if raw.startswith(b'"'):
        return (decode_body(_text_decoder, raw, name),)
    _count_texts(name, raw, max_inputs)
    texts = decode_body(_texts_decoder, raw, name)
    _check_count(name, texts, max_inputs)
    return tuple(texts)


def _cut(body: _Body) -> int | None:
    cut = body.truncate_prompt_tokens
    if cut == 0:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens must be at least 1, or -1")
    return cut


def read_inputs(raw: msgspec.Raw, max_inputs: int) -> Inputs:
    """A text, texts, token ids or lists of these. What comes first says which. Raises ApiError."""
    body = bytes(raw)
    begin = bytes(c for c in body[:256] if c not in b" \t\r\n")[:2]
    if begin.startswith(b'"'):
        return _texts([decode_body(_text_decoder, body, "input")])
    if not begin.startswith(b"["):
        raise invalid("input", "input must be a string, an array of strings, or token ids")
    if begin in (b'["', b"[]"):
        _count_texts("input", body, max_inputs)
        texts = decode_body(_texts_decoder, body, "input")
        _check_count("input", texts, max_inputs)
        return _texts(texts)
    if body.count(b",") >= MAX_PROMPT_IDS:
        raise invalid("input", f"input has more than {MAX_PROMPT_IDS} token ids")
    if begin != b"[[":
        return _ids([decode_body(_ids_decoder, body, "input")])
    if body.count(b"[") > max_inputs + 1:
        raise _too_many("input", max_inputs)
    lists: list[list[int]] = decode_body(_id_lists_decoder, body, "input")
    return _ids(lists)


def _texts(texts: Sequence[str]) -> Inputs:
    for index, text in enumerate(texts):
        if not text:
            raise invalid("input", f"input[{index}] must not be an empty string")
    return tuple(texts)


def _ids(lists: Sequence[list[int]]) -> Inputs:
    for index, ids in enumerate(lists):
        if not ids:
            raise invalid("input", f"input[{index}] must have at least one token id")
    return tuple(lists)


def _count_texts(param: str, body: bytes, max_inputs: int) -> None:
    """Millions of short texts are not made into objects to be refused."""
    if surely_more_texts(body, max_inputs):
        raise _too_many(param, max_inputs)


def _check_count(param: str, inputs: Sequence[Any], max_inputs: int) -> None:
    if not inputs:
        raise invalid(param, f"{param} must not be empty")
    if len(inputs) > max_inputs:
        raise _too_many(param, max_inputs)


def _too_many(param: str, max_inputs: int) -> ApiError:
    message = f"{param} may have at most {max_inputs} items in one request: send several requests"
    return ApiError(INVALID_REQUEST, message, param)
