"""The bytes of answers, and who notices that a client has gone."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import SamplingParams
from gateway.errors import SERVER_ERROR, ApiError
from gateway.stream import DONE, Chunks, DisconnectWatch, UsageFigures, error_event, json_answer
from gateway.types import HostedModel, PreparedRequest
from tests.gateway.edge_kit import parse_events

MODEL = HostedModel("org/m", "0123456789abcdef", "p", 100, 100, 0)
CHAT = PreparedRequest("chatcmpl-1", "chat", MODEL, [1], 7, SamplingParams(), [], created_at=5)
COMPLETION = replace(CHAT, request_id="cmpl-1", kind="completion")
USAGE = UsageFigures(10, 4, 2)


def only(raw: bytes) -> Any:
    (event,) = parse_events(raw)
    return event


@given(st.text())
def test_any_text_survives(text: str) -> None:
    assert only(Chunks(CHAT).text(text))["choices"][0]["delta"] == {"content": text}
    assert only(Chunks(COMPLETION).text(text))["choices"][0]["text"] == text
    if "\n\n" in text:
        assert Chunks(CHAT).text(text).count(b"\n\n") == 1


def test_a_models_name_may_hold_anything() -> None:
    odd = replace(CHAT, model=replace(MODEL, name='"\ue000"\n'))
    event = only(Chunks(odd).text("x"))
    assert (event["model"], event["choices"][0]["delta"]) == ('"\ue000"\n', {"content": "x"})


def test_the_fields_of_a_chunk() -> None:
    event = only(Chunks(CHAT).first())
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
    assert Chunks(COMPLETION).first() == b""
    last = only(Chunks(COMPLETION).last("length"))["choices"][0]
    assert (last["text"], last["finish_reason"]) == ("", "length")
    assert only(Chunks(CHAT).last("stop"))["choices"][0]["delta"] == {}


def test_usage_only_where_asked() -> None:
    assert Chunks(CHAT).usage(USAGE) == b""
    chunks = Chunks(replace(CHAT, include_usage=True))
    assert only(chunks.text("x"))["usage"] is None
    event = only(chunks.usage(USAGE))
    assert event["choices"] == []
    assert event["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 4,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


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
    body = only(b"data: " + json_answer(request_, "text", "stop", USAGE) + b"\n\n")
    choice = body["choices"][0]
    text = choice["message"]["content"] if request_.kind == "chat" else choice["text"]
    assert (text, choice["finish_reason"], body["usage"]["total_tokens"]) == ("text", "stop", 14)


async def test_a_watch_calls_back_once_and_at_once_when_late() -> None:
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    watch = DisconnectWatch(messages.get)
    calls: list[str] = []
    watch.when_gone(lambda: calls.append("early"))
    watch.start()
    await messages.put({"type": "http.request", "body": b"", "more_body": False})
    await asyncio.sleep(0.01)
    assert not watch.gone
    await messages.put({"type": "http.disconnect"})
    await asyncio.sleep(0.01)
    assert watch.gone
    watch.when_gone(lambda: calls.append("late"))
    assert calls == ["early", "late"]


async def test_a_stopped_watch_is_silent() -> None:
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    watch = DisconnectWatch(messages.get)
    watch.stop()
    watch.start()
    await asyncio.sleep(0)
    watch.stop()
    await messages.put({"type": "http.disconnect"})
    await asyncio.sleep(0.01)
    assert not watch.gone
