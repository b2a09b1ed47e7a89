"""Bodies of the encoders' routes: what is read, and what is refused by name."""

import json
from typing import Any

import pytest

from gateway.api import encode_wire
from gateway.api.bodies import decode_body
from gateway.api.encode_wire import EncodeAsk, decode
from gateway.errors import ApiError
from gateway.types import EncodeKind

MAX_INPUTS = 8


def read(kind: EncodeKind, max_inputs: int = MAX_INPUTS, **body: Any) -> EncodeAsk:
    return decode(kind, json.dumps({"model": "m", **body}).encode(), max_inputs)


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a text", ("a text",)),
        (["a", "b"], ("a", "b")),
        ([1, 2, 3], ([1, 2, 3],)),
        ([[1, 2], [3]], ([1, 2], [3])),
        (["x"] * MAX_INPUTS, ("x",) * MAX_INPUTS),
        ([[1]] * MAX_INPUTS, ([1],) * MAX_INPUTS),
        (['say "a", "b", "c", "d", "e", "f", "g", "h", "i", "j"'] * 2, None),
        ("\ud83d\ude00 \u65e5\u672c", ("\U0001f600 \u65e5\u672c",)),
    ],
)
def test_inputs_as_openai_takes_them(given: Any, inputs: Any) -> None:
    for kind in ("embedding", "classify"):
        asked = read("embedding" if kind == "embedding" else "classify", input=given)
        assert asked.inputs == (tuple(given) if inputs is None else inputs)
        assert (asked.model, asked.param) == ("m", "input")


def test_the_fields_of_embeddings() -> None:
    plain = read("embedding", input="a", encoding_format=None, dimensions=None, user="me")
    assert (plain.encoding_format, plain.dimensions, plain.cut) == ("float", None, None)
    asked = read(
        "embedding", input="a", encoding_format="base64", dimensions=3, truncate_prompt_tokens=-1
    )
    assert (asked.encoding_format, asked.dimensions, asked.cut) == ("base64", 3, -1)


def test_priorities_as_of_other_requests() -> None:
    assert read("embedding", input="a").priority == 0
    assert read("embedding", input="a", priority=-3).priority == -3
    assert read("classify", input="a", priority=4).priority == 4
    assert read("rerank", query="q", documents=["a"], priority=5).priority == 5
    with pytest.raises(ApiError) as refused:
        read("embedding", input="a", priority=5000)
    assert refused.value.param == "priority"


def test_documents_are_texts_or_objects() -> None:
    asked = read("rerank", query="q", documents=["a", {"text": "b"}, ""], top_n=2)
    assert (asked.inputs, asked.query, asked.top_n) == (("a", "b", ""), "q", 2)
    assert asked.return_documents
    assert not read("rerank", query="q", documents=["a"], return_documents=False).return_documents


BAD: list[tuple[EncodeKind, dict[str, Any], str, str]] = [
    ("embedding", {}, "invalid_request", "input"),
    ("embedding", {"input": ""}, "invalid_request", "input"),
    ("embedding", {"input": []}, "invalid_request", "input"),
    ("embedding", {"input": [[]]}, "invalid_request", "input"),
    ("embedding", {"input": ["a", ""]}, "invalid_request", "input"),
    ("embedding", {"input": ["a", 1]}, "invalid_request", "input[1]"),
    ("embedding", {"input": [1, "a"]}, "invalid_request", "input[1]"),
    ("embedding", {"input": [[1], "a"]}, "invalid_request", "input[1]"),
    ("embedding", {"input": [[1], ["a"]]}, "invalid_request", "input[1][0]"),
    ("embedding", {"input": [1.5]}, "invalid_request", "input[0]"),
    ("embedding", {"input": [None]}, "invalid_request", "input[0]"),
    ("embedding", {"input": {"text": "a"}}, "invalid_request", "input"),
    ("embedding", {"input": None}, "invalid_request", "input"),
    ("embedding", {"input": 7}, "invalid_request", "input"),
    ("embedding", {"input": ["a"] * (MAX_INPUTS + 1)}, "invalid_request", "input"),
    ("embedding", {"input": ["ends \\"] * (MAX_INPUTS + 1)}, "invalid_request", "input"),
    ("embedding", {"input": [[1]] * (MAX_INPUTS + 1)}, "invalid_request", "input"),
    ("embedding", {"input": "a", "dimensions": 0}, "invalid_request", "dimensions"),
    ("embedding", {"input": "a", "dimensions": -1}, "invalid_request", "dimensions"),
    ("embedding", {"input": "a", "dimensions": 2**40}, "invalid_request", "dimensions"),
    ("embedding", {"input": "a", "encoding_format": "int8"}, "invalid_request", "encoding_format"),
    ("embedding", {"input": "a", "truncate_prompt_tokens": 0}, "invalid_request", "truncate_"),
    ("embedding", {"input": "a", "stream": True}, "unsupported_parameter", "stream"),
    ("classify", {"input": "a", "dimensions": 3}, "unsupported_parameter", "dimensions"),
    ("rerank", {"query": "q"}, "invalid_request", "documents"),
    ("rerank", {"query": "q", "documents": []}, "invalid_request", "documents"),
    ("rerank", {"query": "", "documents": ["a"]}, "invalid_request", "query"),
    ("rerank", {"query": "q", "documents": "a"}, "invalid_request", "documents"),
    ("rerank", {"query": "q", "documents": ["a", 1]}, "invalid_request", "documents[1]"),
    ("rerank", {"query": "q", "documents": [{"text": 1}]}, "invalid_request", "documents[0].text"),
    ("rerank", {"query": "q", "documents": [{}]}, "invalid_request", "documents[0].text"),
    ("rerank", {"query": "q", "documents": ["a"] * 9}, "invalid_request", "documents"),
    ("rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "invalid_request", "top_n"),
    ("rerank", {"query": ["q"], "documents": ["a"]}, "invalid_request", "query"),
]


@pytest.mark.parametrize(("kind", "body", "code", "param"), BAD)
def test_what_cannot_be_is_refused_by_name(
    kind: EncodeKind, body: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        read(kind, **body)
    assert (caught.value.kind.code, caught.value.kind.status) == (code, 400)
    assert str(caught.value.param).startswith(param)


@pytest.mark.parametrize(
    "text", [b'"\\ud800"', b'"\\udc00\\ud800"', b'["\xff"]', b'["a"', b"[[[1]]]"]
)
def test_broken_texts_and_json(text: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode("embedding", b'{"model": "m", "input": ' + text + b"}", MAX_INPUTS)
    assert caught.value.kind.code == "invalid_request"


MANY: list[tuple[EncodeKind, str, bytes]] = [
    ("embedding", "input", b'["' + b'","' * 2_000_000 + b'"]'),
    ("embedding", "input", b"[" + b"1," * 2_000_000 + b"1]"),
    ("embedding", "input", b"[[1]" + b",[1]" * 1_000_000 + b"]"),
    ("rerank", "documents", b'["' + b'" , "' * 1_000_000 + b'"]'),
]


@pytest.mark.parametrize(("kind", "field", "many"), MANY)
def test_millions_are_counted_before_they_are_objects(
    monkeypatch: pytest.MonkeyPatch, kind: EncodeKind, field: str, many: bytes
) -> None:
    decoded: list[str] = []

    def recording(decoder: Any, body: bytes, param: str = "") -> Any:
        decoded.append(param)
        return decode_body(decoder, body, param)

    monkeypatch.setattr(encode_wire, "decode_body", recording)
    query = b'"query": "q", ' if kind == "rerank" else b""
    with pytest.raises(ApiError, match=r"at most|more than"):
        decode(kind, b'{"model": "m", %s"%s": %s}' % (query, field.encode(), many), MAX_INPUTS)
    assert decoded == []  # the body was read with its field as it came, not what is in the field
