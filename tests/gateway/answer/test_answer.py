"""The bytes of answers: chunks and whole ones, of one choice and of several."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import SamplingParams, TokenLogprobs
from gateway.answer.answer import (
    DONE,
    Choices,
    Chunks,
    WholeChoice,
    error_event,
    json_answer,
)
from gateway.answer.choice import Piece
from gateway.answer.encoder import ChoiceEnd, UsageFigures
from gateway.api.tools.output_parser import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    Padding,
    ReasoningDelta,
    ToolCallEnd,
    ToolCallStart,
)
from gateway.errors import SERVER_ERROR, ApiError
from gateway.text.detokenize import ScoredToken
from gateway.text.pieces import PieceTable, read_pieces
from gateway.types import HostedModel, PreparedRequest
from tests.gateway.edge_kit import byte_level_tokenizer, parse_events

PIECES = PieceTable(read_pieces(byte_level_tokenizer()))
MODEL = HostedModel("org/m", "0123456789abcdef", "p", 100, 100, 0)
CHAT = PreparedRequest("chatcmpl-1", "chat", MODEL, [1], 7, SamplingParams(), [], created_at=5)
COMPLETION = msgspec.structs.replace(CHAT, request_id="cmpl-1", kind="completion")
USAGE = UsageFigures(10, 4, 2, 3)
A: int = byte_level_tokenizer().encode("a").ids[0]
CALL: list[Event] = [
    Padding("<tool_call>"),
    ToolCallStart(0, "call_1", "f", '{"name": "f", "arguments": '),
    ArgumentsDelta(0, '{"a":', '{"a":'),
    ArgumentsDelta(0, " 1}", " 1}"),
    ToolCallEnd(0, True, "}"),
]


def said(text: str, index: int = 0) -> Piece:
    return Piece(index, [ContentDelta(text, text)] if text else [])


def scored(start: int, token_id: int = A) -> ScoredToken:
    return ScoredToken(token_id, start, TokenLogprobs(-0.5, [(token_id, -0.5)]))


def begun(request: PreparedRequest) -> Chunks:
    """Whose first chunks are out."""
    chunks = Chunks(request, PIECES)
    for index in range(request.num_choices):
        chunks.piece(Piece(index))
    return chunks


def only(raw: bytes) -> Any:
    (event,) = parse_events(raw)
    return event


@given(st.text(min_size=1))
def test_any_text_survives(text: str) -> None:
    assert only(begun(CHAT).piece(said(text)))["choices"][0]["delta"] == {"content": text}
    assert only(begun(COMPLETION).piece(said(text)))["choices"][0]["text"] == text
    if "\n\n" in text:
        assert begun(CHAT).piece(said(text)).count(b"\n\n") == 1


def test_a_models_name_may_hold_anything() -> None:
    odd = msgspec.structs.replace(CHAT, model=replace(MODEL, name='"\ue000"\n'))
    event = only(begun(odd).piece(said("x")))
    assert (event["model"], event["choices"][0]["delta"]) == ('"\ue000"\n', {"content": "x"})


def test_the_fields_of_a_chunk() -> None:
    event = only(Chunks(CHAT, PIECES).piece(Piece(0)))
    assert event == {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 5,
        "model": "org/m",
        "system_fingerprint": "fp_0123456789ab",
        "choices": [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
    }
    assert Chunks(COMPLETION, PIECES).piece(Piece(0)) == b""
    last = only(Chunks(COMPLETION, PIECES).last(0, "length"))["choices"][0]
    assert (last["text"], last["finish_reason"]) == ("", "length")
    assert only(begun(CHAT).last(0, "stop"))["choices"][0]["delta"] == {}
    # A choice that ended without a word has its role all the same.
    role, end = parse_events(Chunks(CHAT, PIECES).last(0, "stop"))
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert end["choices"][0]["finish_reason"] == "stop"


def test_each_choice_has_its_own_index_and_beginning() -> None:
    chunks = Chunks(msgspec.structs.replace(CHAT, num_choices=3), PIECES)
    raw = chunks.piece(said("x", 2)) + chunks.piece(said("y", 0)) + chunks.piece(said("z", 2))
    told = [(e["choices"][0]["index"], e["choices"][0]["delta"]) for e in parse_events(raw)]
    role = {"role": "assistant", "content": ""}
    assert told == [
        (2, role), (2, {"content": "x"}), (0, role), (0, {"content": "y"}), (2, {"content": "z"}),
    ]  # fmt: skip


def test_usage_only_where_asked() -> None:
    assert begun(CHAT).usage(USAGE) == b""
    chunks = begun(msgspec.structs.replace(CHAT, include_usage=True))
    assert only(chunks.piece(said("x")))["usage"] is None
    event = only(chunks.usage(USAGE))
    assert event["choices"] == []
    assert event["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 4,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }


def test_the_usage_of_a_kept_answer_does_not_guess_its_reasoning() -> None:
    assert "completion_tokens_details" not in UsageFigures(10, 4, 0, None).body()


def test_usage_in_every_event() -> None:
    counted = iter(range(1, 9))
    request = msgspec.structs.replace(CHAT, continuous_usage=True)
    chunks = Chunks(request, PIECES, lambda: UsageFigures(10, next(counted)))
    events = parse_events(chunks.piece(said("x")) + chunks.piece(said("y")))
    events += parse_events(chunks.last(0, "stop"))
    assert [e["usage"]["completion_tokens"] for e in events] == [1, 2, 3, 4]
    assert chunks.usage(USAGE) == b""


def test_padded_events_are_alike_in_size() -> None:
    chunks = begun(msgspec.structs.replace(CHAT, obfuscates=True))
    events = [chunks.piece(said("x" * n)) for n in range(1, 40)]
    sizes = {len(event) for event in events}
    assert len(sizes) <= 2
    assert all(only(event)["obfuscation"] for event in events)
    assert "obfuscation" not in only(begun(CHAT).piece(said("x")))


def test_a_tier_is_told_back_where_one_was_asked_for() -> None:
    request = msgspec.structs.replace(CHAT, service_tier="flex")
    assert only(begun(request).piece(said("x")))["service_tier"] == "flex"
    whole = Choices(request, PIECES)
    whole.add(said("x"))
    body = json.loads(whole.whole([ChoiceEnd(0, "stop")], USAGE))
    assert body["service_tier"] == "flex"
    assert "service_tier" not in only(begun(CHAT).piece(said("x")))


def test_ends() -> None:
    assert parse_events(DONE) == ["[DONE]"]
    error = only(error_event(ApiError(SERVER_ERROR, "lost")))
    assert error == {
        "error": {
            "message": "lost",
            "type": "server_error",
            "param": None,
            "code": "server_error",
        }
    }


@pytest.mark.parametrize("request_", [CHAT, COMPLETION])
def test_whole_answers(request_: PreparedRequest) -> None:
    whole = WholeChoice(request_, 0, PIECES)
    for part in ("te", "", "xt"):
        whole.add(said(part))
    raw = json_answer(request_, [whole.body("stop")], USAGE)
    body = only(b"data: " + raw + b"\n\n")
    choice = body["choices"][0]
    text = choice["message"]["content"] if request_.kind == "chat" else choice["text"]
    assert (text, choice["finish_reason"], body["usage"]["total_tokens"]) == ("text", "stop", 14)
    assert choice["logprobs"] is None


def test_calls_and_reasoning_as_deltas() -> None:
    events: list[Event] = [ReasoningDelta("hm", "<think>hm"), *CALL]
    deltas = [e["choices"][0]["delta"] for e in parse_events(begun(CHAT).piece(Piece(0, events)))]
    assert deltas == [
        {"reasoning": "hm", "reasoning_content": "hm"},
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function",
                         "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]},
    ]  # fmt: skip
    assert begun(CHAT).piece(Piece(0, [Padding("\n")])) == b""


def test_calls_and_reasoning_in_a_message() -> None:
    whole = WholeChoice(CHAT, 0, PIECES)
    whole.add(Piece(0, [ReasoningDelta("hm", "hm"), *CALL]))
    assert whole.body("tool_calls")["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning": "hm",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_1", "type": "function",
             "function": {"name": "f", "arguments": '{"a": 1}'}}
        ],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_under_one_name(name: str) -> None:
    request = msgspec.structs.replace(CHAT, reasoning_fields=(name,))
    piece = Piece(0, [ReasoningDelta("hm", "hm")])
    assert only(begun(request).piece(piece))["choices"][0]["delta"] == {name: "hm"}
    whole = WholeChoice(request, 0, PIECES)
    whole.add(piece)
    found = whole.body("stop")["message"]
    assert {key for key in found if "reasoning" in key} == {name}


def test_scores_go_with_the_piece_they_belong_to() -> None:
    request = msgspec.structs.replace(CHAT, logprobs=1)
    piece = Piece(0, [ContentDelta("a", "a")], [scored(0)])
    choice = only(begun(request).piece(piece))["choices"][0]
    entry = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert choice["delta"] == {"content": "a"}
    assert choice["logprobs"] == {"content": [{**entry, "top_logprobs": [entry]}], "refusal": None}
    # Where a parser holds the text back, the scores come with an empty piece.
    choice = only(begun(request).piece(Piece(0, [], [scored(0)])))["choices"][0]
    assert (choice["delta"], len(choice["logprobs"]["content"])) == ({"content": ""}, 1)
    # And where it makes several chunks of one piece, they are not repeated.
    chunks = parse_events(begun(request).piece(Piece(0, CALL, [scored(0), scored(1)])))
    assert [bool(c["choices"][0]["logprobs"]) for c in chunks] == [True, False]


def test_an_echo_comes_first_with_its_scores() -> None:
    request = msgspec.structs.replace(COMPLETION, echoes=("aa",), logprobs=0)
    prompt = [ScoredToken(A, 0, None), scored(1)]
    piece = Piece(0, [ContentDelta("a", "a")], [scored(0)], prompt)
    first, second = (e["choices"][0] for e in parse_events(Chunks(request, PIECES).piece(piece)))
    assert (first["text"], second["text"]) == ("aa", "a")
    assert first["logprobs"] == {
        "tokens": ["a", "a"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"a": -0.5}],
        "text_offset": [0, 1],
    }
    assert second["logprobs"]["text_offset"] == [2]
    whole = WholeChoice(request, 0, PIECES)
    whole.add(piece)
    body = whole.body("stop")
    assert body["text"] == "aaa"
    assert body["logprobs"]["text_offset"] == [0, 1, 2]
    assert body["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
