"""Ollama's routes: on by a setting, in the name of a key, as its clients spell them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.errors import WorkerLost
from gateway.http.own_hosts import exposure
from gateway.settings.settings import Settings
from registry.accounts.quotas import Limits
from tests.gateway.dialects.test_messages import CALL, HERMES
from tests.gateway.edge_kit import KEY, Client, Kit, client_of, key_record, make_kit
from tests.gateway.encoder_kit import make_encoder_kit, rows_of

USER = {"role": "user", "content": "Hello"}
CHAT: dict[str, Any] = {"model": "tiny:latest", "messages": [USER]}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return make_kit(tmp_path / "tiny", ollama_key_id="key_1")


async def ask(client: Client, path: str, body: Any, **headers: str) -> tuple[int, list[Any]]:
    """Without a key, as `curl -d` sends it: the status, and the objects of all lines."""
    form = {"content-type": "application/x-www-form-urlencoded", **headers}
    data = json.dumps(body)
    async with client.session.post(client.base + path, data=data, headers=form) as answer:
        raw = (await answer.read()).decode()
        return answer.status, [json.loads(line) for line in raw.splitlines()]


async def get(client: Client, path: str) -> Any:
    async with client.session.get(client.base + path) as answer:
        assert answer.status == 200
        return await answer.json()


async def test_without_the_setting_there_is_nothing(tmp_path: Path) -> None:
    async with client_of(make_kit(tmp_path)) as client:
        await client.chat()  # the model's files are read ahead, and not for the next test
        for path in ("/api/chat", "/api/tags"):
            assert (await ask(client, path, CHAT))[0] == 404


async def test_a_chat_streams_unless_told_otherwise(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("The game")
    status, lines = await ask(client, "/api/chat", CHAT)
    assert status == 200
    assert "".join(line["message"]["content"] for line in lines) == "The game"
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert len(lines) >= 2
    last = lines[-1]
    posting = kit.ledger.only
    assert (last["done_reason"], last["eval_count"]) == ("stop", posting.completion_tokens)
    assert last["prompt_eval_count"] == posting.prompt_tokens
    assert last["total_duration"] >= last["prompt_eval_duration"] > 0
    assert (posting.key_id, last["model"]) == ("key_1", "tiny")
    _, [whole] = await ask(client, "/api/chat", {**CHAT, "stream": False})
    assert whole["message"] == {"role": "assistant", "content": "The game"}
    assert whole["done"]


async def test_a_text_with_and_without_a_template(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("The game")
    body = {"model": "tiny", "prompt": "Hello", "system": "Be brief.", "stream": False}
    _, [whole] = await ask(client, "/api/generate", body)
    assert (whole["response"], whole["done"]) == ("The game", True)
    sent = kit.dispatcher.requests[-1].request.prompt_token_ids
    assert "system\nBe brief." in kit.tokenizer.decode(sent)
    _, lines = await ask(client, "/api/generate", {"model": "tiny", "prompt": "Hello", "raw": True})
    assert "".join(line["response"] for line in lines) == "The game"
    assert kit.dispatcher.requests[-1].request.prompt_token_ids == kit.ids("Hello")


async def test_options_and_forms(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("x")
    options = {"temperature": 0.5, "num_predict": 7, "stop": ["y"], "seed": 3, "num_ctx": 4096}
    body = {**CHAT, "options": options, "format": {"type": "object"}, "keep_alive": "5m"}
    async with client.session.post(client.base + "/api/chat", json=body) as answer:
        assert answer.status == 200
        told = answer.headers["x-polyhost-ignored"]
    assert told == "options.num_ctx, keep_alive"
    request = kit.dispatcher.requests[-1].request
    assert (request.max_tokens, request.stop_strings) == (7, ("y",))
    assert (request.sampling.temperature, request.sampling.seed) == (0.5, 3)
    assert request.constraint is not None
    await ask(client, "/api/chat", {**CHAT, "options": {"num_predict": -1}, "format": "json"})
    assert kit.dispatcher.requests[-1].request.max_tokens == 32


async def test_a_loop_of_calls_without_ids(tmp_path: Path) -> None:
    kit = make_kit(tmp_path, HERMES, max_context=1024, ollama_key_id="key_1")
    kit.dispatcher.script = kit.speak(f"<think>\nhm\n</think>\n\n{CALL}")
    body = {**CHAT, "tools": [TOOL], "think": True}
    async with client_of(kit) as client:
        _, lines = await ask(client, "/api/chat", body)
        _, [whole] = await ask(client, "/api/chat", {**body, "stream": False})
        call = {"function": {"name": "f", "arguments": {"a": "x y"}}}
        assert whole["message"]["thinking"] == "hm"
        assert whole["message"]["tool_calls"] == [call]
        assert [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]]
        turns = [USER, whole["message"], {"role": "tool", "tool_name": "f", "content": "42"}]
        kit.dispatcher.script = kit.speak("It is 42.")
        _, [last] = await ask(client, "/api/chat", {**body, "messages": turns, "stream": False})
    assert last["message"]["content"] == "It is 42."
    ids = kit.dispatcher.requests[-1].request.prompt_token_ids
    prompt = kit.tokenizer.decode(ids, skip_special_tokens=False)
    assert '<tool_call>{"name": "f", "arguments": {"a": "x y"}}</tool_call>' in prompt
    assert "<|im_start|>tool\n42" in prompt


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/api/chat", {"model": "nobody", "messages": [USER]}, "nobody"),
        ("/api/chat", {**CHAT, "messages": [], "keep_alive": 0}, "keep_alive"),
        ("/api/generate", {"model": "tiny", "keep_alive": "0s"}, "keep_alive"),
        ("/api/chat", {**CHAT, "messages": [{**USER, "images": ["aGk="]}]}, "images"),
        ("/api/chat", {**CHAT, "messages": [{"role": "tool", "content": "x"}]}, "call"),
        ("/api/chat", {**CHAT, "messages": [{**USER, "role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": {}}}] * 129}]}, "tool_calls"),
        ("/api/chat", {**CHAT, "format": "xml"}, "format"),
        ("/api/chat", {**CHAT, "logprobs": True}, "logprobs"),
        ("/api/chat", {**CHAT, "options": {"temperature": 9}}, "temperature"),
        ("/api/generate", {"model": "tiny", "prompt": "x", "suffix": "y"}, "suffix"),
        ("/api/generate", {"model": "tiny", "prompt": "x", "context": [1]}, "context"),
        ("/api/generate", {"model": "tiny", "prompt": "x", "raw": True, "system": "s"}, "system"),
        ("/api/show", {}, "model"),
        ("/api/show", {"name": "m" * 257}, "name: Expected"),
    ],
)  # fmt: skip
async def test_errors_are_a_text(kit: Kit, client: Client, path: str, body: Any, word: str) -> None:
    status, [answer] = await ask(client, path, body)
    assert status in (400, 404)
    assert word in answer["error"]
    assert not kit.dispatcher.requests


async def test_a_form_that_is_nested_without_end(kit: Kit, client: Client) -> None:
    form = '{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "format": '
    body = (form + '{"a":' * 5000 + "1" + "}" * 5000 + "}").encode()
    async with client.session.post(client.base + "/api/chat", data=body) as answer:
        assert answer.status == 400


async def test_a_stream_that_fails_ends_with_an_error(kit: Kit, client: Client) -> None:
    def script(running: Any) -> None:
        running.say(kit.ids("The"))
        running.fail(WorkerLost())

    kit.dispatcher.script = script
    _, lines = await ask(client, "/api/chat", CHAT)
    assert list(lines[-1]) == ["error"]


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://evil.example", 403),
        ("null", 403),
        ("http://[", 403),
        ("http://localhost.evil.example", 403),
        ("http://localhost:3000", 200),
        ("http://127.0.0.1:8080", 200),
        ("app://obsidian.md", 200),
    ],
)
async def test_pages_of_others_spend_nobodys_key(
    kit: Kit, client: Client, origin: str, status: int
) -> None:
    kit.dispatcher.script = kit.speak("x")
    assert (await ask(client, "/api/chat", CHAT, origin=origin))[0] == status
    assert (await ask(client, "/api/show", {"model": "tiny"}, origin=origin))[0] == status
    bearer = {"authorization": "Bearer other-key-for-tests"}
    kit.use_keys(key_record("other-key-for-tests", "key_2"))
    assert (await ask(client, "/api/chat", CHAT, origin=origin, **bearer))[0] == 200


async def test_whose_request_it_is(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("x")
    other = key_record("other-key-for-tests", "key_2")
    kit.use_keys(key_record(limits=Limits(requests_per_minute=1)), other)
    await ask(client, "/api/chat", CHAT)
    assert (await ask(client, "/api/chat", CHAT))[0] == 429
    bearer = {"authorization": "Bearer other-key-for-tests"}
    assert (await ask(client, "/api/chat", CHAT, **bearer))[0] == 200
    assert [posting.key_id for posting in kit.ledger.posted] == ["key_1", "key_2"]
    assert (await ask(client, "/api/chat", CHAT, authorization="Bearer wrong"))[0] == 401
    kit.use_keys(other)
    assert (await ask(client, "/api/chat", CHAT))[0] == 401
    json_type = {"content-type": "application/json"}
    status, _ = await ask(client, "/v1/chat/completions", CHAT, **json_type)
    assert status == 401


async def test_models(kit: Kit, client: Client) -> None:
    [tiny] = (await get(client, "/api/tags"))["models"]
    assert (tiny["name"], tiny["modified_at"]) == ("tiny", "2023-11-14T22:13:20Z")
    [loaded] = (await get(client, "/api/ps"))["models"]
    assert loaded["name"] == "tiny"
    _, [shown] = await ask(client, "/api/show", {"model": "tiny:latest"})
    assert shown["capabilities"] == ["completion"]
    assert shown["model_info"]["polyhost.context_length"] == 256
    assert "version" in await get(client, "/api/version")
    async with client.session.get(client.base + "/") as answer:
        assert (answer.status, await answer.text()) == (200, "Ollama is running")
    async with client.session.head(client.base + "/") as answer:
        assert answer.status == 200
    headers = {"authorization": f"Bearer {KEY}x"}
    async with client.session.get(client.base + "/api/tags", headers=headers) as answer:
        assert answer.status == 401


async def test_who_asks_for_a_model_must_send_all_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kit = make_kit(tmp_path / "tiny", ollama_key_id="key_1", receive_timeout_s=0.2)
    begun = b"POST /api/show HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    async with client_of(kit) as client:
        port = int(client.base.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begun)
        await asyncio.sleep(0.05)
        writer.close()  # goes away
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begun)  # and this one waits
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_embeddings(tmp_path: Path) -> None:
    kit = make_encoder_kit(tmp_path, ollama_key_id="key_1", max_encode_inputs=8)
    async with client_of(kit) as client:
        _, [body] = await ask(client, "/api/embed", {"model": "embed", "input": ["the cat", "a"]})
        rows = rows_of(kit.dispatcher.requests[-1].request)
        np.testing.assert_allclose(body["embeddings"], rows, rtol=1e-6)
        assert (body["model"], body["prompt_eval_count"]) == ("embed", 4 + 3)
        status, _ = await ask(client, "/api/embed", {"model": "embed", "input": ["x"] * 9})
        assert status == 400
        long = {"model": "embed", "input": "the cat " * 40}
        assert (await ask(client, "/api/embed", long))[0] == 200
        assert (await ask(client, "/api/embed", {**long, "truncate": False}))[0] == 400


async def test_the_older_route_for_one_vector(tmp_path: Path) -> None:
    kit = make_encoder_kit(tmp_path, ollama_key_id="key_1")
    async with client_of(kit) as client:
        body = {"model": "embed", "prompt": "the cat", "options": {"num_ctx": 1}}
        status, [told] = await ask(client, "/api/embeddings", body)
        [row] = rows_of(kit.dispatcher.requests[-1].request)
        assert (status, list(told)) == (200, ["embedding"])
        np.testing.assert_allclose(told["embedding"], row, rtol=1e-6)
        for wrong in ({"model": "embed"}, {**body, "input": "a"}, {**body, "model": "nobody"}):
            status, [told] = await ask(client, "/api/embeddings", wrong)
            assert (status in (400, 404), list(told)) == (True, ["error"])


@pytest.mark.parametrize("stream", [True, False])
async def test_without_a_prompt_the_model_is_loaded(kit: Kit, client: Client, stream: bool) -> None:
    kit.dispatcher.script = kit.speak("x")
    body = {"model": "tiny:latest", "keep_alive": "5m", "stream": stream}
    status, [told] = await ask(client, "/api/generate", body)
    assert (status, told["response"]) == (200, "")
    status, [said] = await ask(client, "/api/chat", {**body, "messages": []})
    assert (status, said["message"]) == (200, {"role": "assistant", "content": ""})
    for line in (told, said):
        assert (line["model"], line["done"], line["done_reason"]) == ("tiny", True, "load")
    assert [(p.prompt_tokens, p.completion_tokens) for p in kit.ledger.posted] == [(1, 0)] * 2
    assert (await ask(client, "/api/generate", {"model": "nobody"}))[0] == 404


def test_an_open_server_is_told_about() -> None:
    assert not [line for line in exposure(Settings(host="0.0.0.0")) if "Ollama" in line]
    found = exposure(Settings(host="0.0.0.0", ollama_key_id="key_1"))
    assert [line for line in found if "Ollama" in line]
    assert not exposure(Settings(host="127.0.0.1", ollama_key_id="key_1"))
