"""The application over HTTP: answers as OpenAI's, errors as OpenAI's, whatever comes in."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yarl
from multidict import CIMultiDict

from gateway.errors import DEADLINE_EXCEEDED, MODEL_FAILED, QUEUE_FULL, UNAVAILABLE, ApiError
from gateway.limits.store import MemoryStore
from tests.gateway.edge_kit import KEY, Client, Kit, client_of, key_record, make_kit

METRICS_TOKEN = "a-token-for-prometheus"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


async def error_of(answer: Any) -> tuple[int, dict[str, Any]]:
    """Status and error object; nothing but the object may be in the body."""
    async with answer as response:
        body = await response.json()
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert response.headers["x-request-id"]
        return response.status, body["error"]


async def test_a_chat(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("The game is afoot!")
    async with client.post("/v1/chat/completions", CHAT) as answer:
        assert answer.status == 200
        assert answer.headers["content-type"] == "application/json"
        body = await answer.json()
        assert body["id"] == "chatcmpl-" + answer.headers["x-request-id"]
        assert int(answer.headers["openai-processing-ms"]) >= 0
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "The game is afoot!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    sent = kit.dispatcher.requests[0].request
    num_text = len(kit.ids("The game is afoot!")) + 1
    assert body["usage"] == {
        "prompt_tokens": len(sent.prompt_token_ids),
        "completion_tokens": num_text,
        "total_tokens": len(sent.prompt_token_ids) + num_text,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert kit.tokenizer.decode(sent.prompt_token_ids, skip_special_tokens=False) == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_streamed_chat(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("naïve café 😀👍")
    body = {**CHAT, "stream_options": {"include_usage": True}}
    events = await client.events("/v1/chat/completions", body)
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(c["usage"] is None for c in chunks[:-1])
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
    assert text == "naïve café 😀👍"
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1] if c["choices"]][-1] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(kit.ids("naïve café 😀👍")) + 1


async def test_a_stream_without_usage_says_nothing_of_it(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("x")
    events = await client.events("/v1/chat/completions", CHAT)
    assert all("usage" not in event for event in events[:-1])


async def test_completions_by_text_and_by_tokens(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak(" Watson.")
    ids = kit.ids("my dear")
    for prompt in ("my dear", ids, ["my dear"], [ids]):
        request = {"model": "tiny", "prompt": prompt}
        async with client.post("/v1/completions", request) as answer:
            body = await answer.json()
        assert body["object"] == "text_completion"
        assert body["choices"][0]["text"] == " Watson."
        assert kit.dispatcher.requests[-1].request.prompt_token_ids == ids
    events = await client.events("/v1/completions", {"model": "tiny", "prompt": ids})
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == " Watson."
    assert events[0]["id"].startswith("cmpl-")
    assert kit.ledger.posted[0].kind == "completion"


async def test_openais_own_client(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("Elementary, my dear Watson.")
    messages: Any = [{"role": "user", "content": "Who?"}]
    async with openai.AsyncOpenAI(base_url=client.base + "/v1", api_key=KEY) as sdk:
        answer = await sdk.chat.completions.create(model="tiny", messages=messages, seed=1)
        assert answer.choices[0].message.content == "Elementary, my dear Watson."
        stream = await sdk.chat.completions.create(model="tiny", messages=messages, stream=True)
        parts = [c.choices[0].delta.content or "" async for c in stream if c.choices]
        assert "".join(parts) == "Elementary, my dear Watson."
        # What the SDK gave may be sent back as it is.
        messages.append(answer.choices[0].message.model_dump())
        await sdk.chat.completions.create(model="tiny", messages=messages)
        assert [model.id async for model in sdk.models.list()] == ["tiny"]
        tiny = await sdk.models.retrieve("tiny")
        assert tiny.owned_by == "polyhost"
        assert tiny.model_extra == {
            "task": "generate",
            "max_model_len": 256,
            "residency": "resident",
            "load_eta_s": 0.0,
        }
        with pytest.raises(openai.NotFoundError) as caught:
            await sdk.chat.completions.create(model="nobody", messages=messages)
        assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/models/tiny"])
@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": KEY}, {"x-api-key": "sk-ph-x"}],
)
async def test_bad_keys(client: Client, path: str, headers: dict[str, str]) -> None:
    method = "POST" if path.endswith("completions") else "GET"
    headers = {**headers, "content-type": "application/json"}
    data = json.dumps(CHAT) if method == "POST" else None
    answer = client.session.request(method, client.base + path, data=data, headers=headers)
    status, error = await error_of(answer)
    assert (status, error["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("name", ["x-api-key", "api-key", "authorization"])
async def test_where_keys_are_accepted(client: Client, name: str) -> None:
    value = f"bearer {KEY}" if name == "authorization" else KEY
    async with client.session.get(client.base + "/v1/models", headers={name: value}) as answer:
        assert answer.status == 200


async def test_a_revoked_key_stops_at_once(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("x")
    assert (await client.chat())[0] == 200
    kit.use_keys(key_record(revoked_at=1.0))
    status, body = await client.chat()
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    kit.use_keys(key_record(expires_at=1.0))
    assert (await client.chat())[0] == 401


async def test_unknown_and_hidden_models_sound_the_same(kit: Kit, client: Client) -> None:
    status, body = await client.chat(model="nobody")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert body["error"]["param"] == "model"
    kit.use_keys(key_record(allowed_models=frozenset({"other"})))
    status, hidden = await client.chat()
    assert status == 404
    expected = body["error"]["message"].replace("nobody", "tiny")
    assert hidden["error"]["message"] == expected
    async with client.session.get(client.base + "/v1/models", headers={"api-key": KEY}) as answer:
        assert await answer.json() == {"object": "list", "data": []}
    assert kit.dispatcher.requests == []


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"max_tokens": 300}, "context_length_exceeded", "messages"),
        ({"messages": [{"role": "user", "content": "x y " * 400}]},
         "context_length_exceeded", "messages"),
        ({"messages": 5}, "invalid_request", "messages"),
        ({"max_tokens": "x"}, "invalid_request", "max_tokens"),
        ({"tools": [{}]}, "invalid_request", "tools[0].type"),
        ({"best": 1}, "unsupported_parameter", "best"),
    ],
)  # fmt: skip
async def test_bad_requests_do_nothing(
    kit: Kit, client: Client, fields: dict[str, Any], code: str, param: str
) -> None:
    kit.use_keys(key_record())
    status, error = await error_of(client.post("/v1/chat/completions", {**CHAT, **fields}))
    assert (status, error["code"], error["param"]) == (400, code, param)
    assert kit.dispatcher.requests == []
    assert kit.ledger.opened == []
    assert isinstance(kit.edge.store, MemoryStore)
    assert kit.edge.store.num_counts == 0


@pytest.mark.parametrize("body", [b"{", b"", b"\xff", b"[" * 100_000])
async def test_bodies_that_are_no_json(client: Client, body: bytes) -> None:
    status, error = await error_of(client.post("/v1/completions", body))
    assert (status, error["code"]) == (400, "invalid_request")


async def test_other_media(client: Client) -> None:
    answer = client.post(
        "/v1/completions", b"a=b", content_type="application/x-www-form-urlencoded"
    )
    status, error = await error_of(answer)
    assert (status, error["code"]) == (415, "unsupported_media_type")
    answer = client.post("/v1/completions", CHAT, content_encoding="gzip")
    assert (await error_of(answer))[0] == 415


async def test_paths_and_methods_that_are_not_served(client: Client) -> None:
    headers = {"api-key": KEY}
    for path in ("/v1/moderations", "/", "/v1/chat/completions/", "/v1/chat"):
        status, error = await error_of(client.session.get(client.base + path, headers=headers))
        assert (status, error["code"]) == (404, "not_found")
    for path in ("/v1/chat/completions", "/v1/models", "/health/live", "/admin/sign-in"):
        for method in ("GET", "POST"):  # Starlette's own pattern matches before a last newline
            url = yarl.URL(f"{client.base}{path}%0A", encoded=True)
            asked = client.session.request(method, url, json=CHAT, headers=headers)
            status, error = await error_of(asked)
            assert (status, error["code"]) == (404, "not_found")
    async with client.session.get(client.base + "/v1/completions") as answer:
        assert answer.status == 405
        assert answer.headers["allow"] == "POST"
        assert (await answer.json())["error"]["code"] == "method_not_allowed"


async def chunks_of(total: int) -> AsyncIterator[bytes]:
    for _ in range(total // 1000):
        yield b"x" * 1000


async def test_bodies_over_the_limit(tmp_path: Path) -> None:
    kit = make_kit(tmp_path / "tiny", max_body_bytes=10_000)
    async with client_of(kit) as client:
        url = client.base + "/v1/completions"
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        big = {"model": "tiny", "prompt": "x" * 20_000}
        for answer in (
            client.post("/v1/completions", big),
            client.session.post(url, data=chunks_of(50_000), headers=headers),
            client.session.post(url, data=b"x" * 70_000, headers=headers),
        ):
            status, error = await error_of(answer)
            assert (status, error["code"]) == (413, "request_too_large")
        kit.dispatcher.script = kit.speak("x")
        assert (await client.chat("y" * 100))[0] == 200


async def test_a_body_that_never_comes(tmp_path: Path) -> None:
    kit = make_kit(tmp_path / "tiny", receive_timeout_s=0.05)
    async with client_of(kit) as client:
        port = int(client.base.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        writer.write(head.encode() + b"Content-Length: 100\r\n\r\n{")
        answer = await reader.read()  # To the end: the connection is closed.
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


async def test_without_a_key_no_body_is_waited_for(client: Client) -> None:
    port = int(client.base.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    status = await reader.readline()
    writer.close()
    assert status.startswith(b"HTTP/1.1 401 ")


async def test_a_full_queue_says_when_to_come_back(kit: Kit, client: Client) -> None:
    kit.dispatcher.refusal = ApiError(QUEUE_FULL, "full", retry_after_s=1.25)
    async with client.post("/v1/chat/completions", CHAT) as answer:
        assert answer.status == 429
        assert answer.headers["retry-after"] == "2"
        assert answer.headers["retry-after-ms"] == "1250"
        assert (await answer.json())["error"]["code"] == "queue_full"
    assert kit.ledger.opened == []


async def test_the_unexpected_is_a_500_that_can_be_looked_up(
    kit: Kit, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    kit.dispatcher.refusal = RuntimeError("secret detail")
    with caplog.at_level(logging.ERROR):
        async with client.post("/v1/chat/completions", CHAT) as answer:
            body = await answer.json()
            request_id = answer.headers["x-request-id"]
    assert answer.status == 500
    assert body["error"]["code"] == "server_error"
    assert request_id in body["error"]["message"]
    assert "secret" not in json.dumps(body)
    assert request_id in caplog.text
    assert "secret detail" in caplog.text


async def test_health_and_metrics(kit: Kit, client: Client) -> None:
    for path, status in (("/health/live", 200), ("/health/ready", 200)):
        async with client.session.get(client.base + path) as answer:
            assert answer.status == status
    kit.dispatcher.is_ready = False
    async with client.session.get(client.base + "/health/ready") as answer:
        assert answer.status == 503
        assert (await answer.json())["reasons"]
    kit.dispatcher.script = kit.speak("x y z")
    await client.chat()
    async with client.session.get(client.base + "/metrics") as answer:
        assert answer.status == 200
        text = await answer.text()
    assert 'polyhost_request_success_total{finished_reason="stop",model_name="tiny"} 1.0' in text
    assert "polyhost_ready 0.0" in text


@pytest.mark.parametrize(
    ("setting", "sent", "status"),
    [
        ("", None, 403),
        ("", "Bearer ", 403),
        (METRICS_TOKEN, None, 401),
        (METRICS_TOKEN, f"Bearer {METRICS_TOKEN[:-1]}", 401),
        (METRICS_TOKEN, f"Bearer {KEY}", 401),
        (METRICS_TOKEN, f"Basic {METRICS_TOKEN}", 401),
        (METRICS_TOKEN, "Bearer caf\xe9", 401),
        (METRICS_TOKEN, f"bearer {METRICS_TOKEN}", 200),
        ("*", None, 200),
    ],
)
async def test_metrics_are_for_who_has_the_token(
    tmp_path: Path, setting: str, sent: str | None, status: int
) -> None:
    kit = make_kit(tmp_path / "tiny", metrics_token=setting)
    async with client_of(kit) as client:
        headers = {} if sent is None else {"authorization": sent}
        async with client.session.get(client.base + "/metrics", headers=headers) as answer:
            assert answer.status == status
            text = await answer.text()
    assert ("polyhost_ready" in text) == (status == 200)
    assert METRICS_TOKEN not in text
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"
    if status == 403:
        assert "metrics_token" in text


async def test_a_ledger_that_takes_nothing_new_is_no_readiness(kit: Kit, client: Client) -> None:
    kit.ledger.refuses = True
    async with client.session.get(client.base + "/health/ready") as answer:
        assert answer.status == 503
        assert (await answer.json())["reasons"] == ["the usage ledger does not accept new requests"]
    async with client.session.get(client.base + "/metrics") as answer:
        assert "polyhost_ready 0.0" in await answer.text()
    kit.ledger.refuses = False
    async with client.session.get(client.base + "/health/ready") as answer:
        assert answer.status == 200


async def test_many_at_a_time(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("The game is afoot!")
    answers = await asyncio.gather(*(client.chat(f"Question {n}") for n in range(40)))
    assert [status for status, _ in answers] == [200] * 40
    assert len({body["id"] for _, body in answers}) == 40
    assert len({posting.request_id for posting in kit.ledger.posted}) == 40


async def test_web_pages_may_call_where_their_origin_is_named(tmp_path: Path) -> None:
    origins = "https://app.example.com, https://b.example.com"
    kit = make_kit(tmp_path / "tiny", cors_origins=origins)
    kit.dispatcher.script = kit.speak("x")
    async with client_of(kit) as client:
        url = client.base + "/v1/chat/completions"
        for origin, allowed in (("https://app.example.com", True), ("https://evil.test", False)):
            asks = {
                "origin": origin,
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,content-type",
            }
            async with client.session.options(url, headers=asks) as answer:
                assert (answer.status == 200) == allowed
            async with client.post("/v1/chat/completions", CHAT, origin=origin) as answer:
                assert answer.status == 200
                told = answer.headers.get("access-control-allow-origin")
                assert told == (origin if allowed else None)


async def test_no_web_page_may_call_by_default(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("x")
    async with client.post("/v1/chat/completions", CHAT, origin="https://a.test") as answer:
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]
    asks = {"origin": "https://a.test", "access-control-request-method": "POST"}
    url = client.base + "/v1/chat/completions"
    async with client.session.options(url, headers=asks) as answer:
        assert answer.status == 405


@pytest.mark.parametrize(
    ("error", "should_retry", "after_ms"),
    [
        (ApiError(QUEUE_FULL, "full", retry_after_s=0.25), None, "250"),
        (ApiError(DEADLINE_EXCEEDED, "late"), "false", None),
        (ApiError(MODEL_FAILED, "broken"), "false", None),
        (ApiError(UNAVAILABLE, "soon", retry_after_s=3), None, "3000"),
    ],
    ids=lambda value: getattr(value, "message", str(value)),
)
async def test_sdks_are_told_whether_and_when_to_ask_again(
    kit: Kit, client: Client, error: ApiError, should_retry: str | None, after_ms: str | None
) -> None:
    kit.dispatcher.refusal = error
    async with client.post("/v1/chat/completions", CHAT) as answer:
        assert answer.status == error.kind.status
        assert answer.headers.get("x-should-retry") == should_retry
        assert answer.headers.get("retry-after-ms") == after_ms


async def test_the_first_of_several_headers_counts(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("x")
    url = client.base + "/v1/chat/completions"
    headers = [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer other")]
    async with client.session.post(url, json=CHAT, headers=CIMultiDict(headers)) as answer:
        assert answer.status == 200
