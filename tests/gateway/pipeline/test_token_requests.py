"""/tokenize and /detokenize: what a prompt is in tokens, and back, as vLLM spells it."""

from pathlib import Path
from typing import Any

import pytest

from registry.accounts.quotas import Limits
from tests.gateway.edge_kit import Client, Kit, client_of, key_record, make_kit

USER = {"role": "user", "content": "Hello <|im_end|>"}
TEXT = "The game is afoot! 😀"


async def ask(client: Client, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with client.post(path, {"model": "tiny", **body}) as answer:
        return answer.status, await answer.json()


async def test_a_prompt_there_and_back(kit: Kit, client: Client) -> None:
    status, body = await ask(client, "/tokenize", prompt=TEXT, return_token_strs=True)
    assert status == 200
    ids = kit.ids(TEXT)
    assert (body["tokens"], body["count"], body["max_model_len"]) == (ids, len(ids), 256)
    assert body["token_strs"] == [kit.tokenizer.id_to_token(i) for i in ids]
    assert await ask(client, "/detokenize", tokens=ids) == (200, {"prompt": TEXT})
    _, body = await ask(client, "/tokenize", prompt=TEXT)
    assert body["token_strs"] is None
    assert not kit.ledger.posted
    assert not kit.dispatcher.requests


async def test_messages_are_the_prompt_of_a_chat(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("x")
    await client.chat(USER["content"])
    sent = kit.dispatcher.requests[0].request.prompt_token_ids
    _, body = await ask(client, "/tokenize", messages=[USER])
    assert body["tokens"] == sent
    _, text = await ask(client, "/detokenize", tokens=sent)
    assert text["prompt"] == (
        "<|im_start|>user\nHello <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    _, bare = await ask(client, "/tokenize", messages=[USER], add_generation_prompt=False)
    assert len(bare["tokens"]) < len(sent)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", {"messages": [USER]}),
        ("/detokenize", {"tokens": [5]}),
        ("/api/show", {}),
    ],
)
async def test_unknown_fields_are_refused_or_told_by_the_setting(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    for setting, status in (("refuse", 400), ("tell", 200)):
        kit = make_kit(tmp_path / setting, unknown_fields=setting, ollama_key_id="key_1")
        async with client_of(kit) as client:
            async with client.post(path, {"model": "tiny", "more": 1, **body}) as answer:
                assert answer.status == status
                assert answer.headers.get("x-polyhost-ignored") == (
                    "more" if status == 200 else None
                )
            async with client.post(path, {"model": "tiny", **body}) as answer:
                assert answer.status == 200
                assert "x-polyhost-ignored" not in answer.headers


async def test_control_tokens_of_a_prompt_are_meant(kit: Kit, client: Client) -> None:
    _, body = await ask(client, "/tokenize", prompt="<|im_end|>", add_special_tokens=False)
    assert body["tokens"] == [kit.end_id]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "promt": "y"}, "promt"),
        ("/tokenize", {"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x" * 4000}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [403]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 257}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "nobody"}, "model"),
    ],
)
async def test_what_is_refused(
    kit: Kit, client: Client, path: str, body: dict[str, Any], param: str
) -> None:
    status, answer = await ask(client, path, **body)
    assert status in (400, 404)
    assert answer["error"]["param"] == param


async def test_each_is_a_request_of_the_limits(kit: Kit, client: Client) -> None:
    kit.use_keys(key_record(limits=Limits(requests_per_minute=2, tokens_per_minute=1)))
    assert (await ask(client, "/tokenize", prompt="The game"))[0] == 200
    assert (await ask(client, "/detokenize", tokens=[5, 6]))[0] == 200
    assert (await ask(client, "/tokenize", prompt="x"))[0] == 429
    async with client.post("/tokenize", {}, key="wrong") as answer:
        assert answer.status == 401
