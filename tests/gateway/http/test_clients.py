"""What client libraries send and look for, over HTTP."""

from typing import Any

from tests.gateway.edge_kit import KEY, Client, Kit

USER = {"role": "user", "content": "Hello"}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [USER]}
URL = "/v1/chat/completions"


async def metrics_of(client: Client) -> str:
    """The page as Prometheus reads it."""
    async with client.session.get(client.base + "/metrics") as answer:
        text: str = await answer.text()
        return text


async def test_an_answer_says_which_fields_had_no_effect(kit: Kit, client: Client) -> None:
    """LiteLLM sends our own message back with `provider_specific_fields`."""
    kit.dispatcher.script = kit.speak("Hi")
    said = {"role": "assistant", "content": "b", "provider_specific_fields": {"refusal": None}}
    body = {**CHAT, "messages": [USER, said, {**USER, "zzz": 1}], "store": True}
    async with client.post(URL, body) as answer:
        assert answer.status == 200
        told = answer.headers["x-polyhost-ignored"]
    assert told == "messages[].provider_specific_fields, messages[].zzz, store"
    async with client.post(URL, {**body, "stream": True}) as answer:
        assert answer.headers["x-polyhost-ignored"] == told
    async with client.post(URL, CHAT) as answer:
        assert "x-polyhost-ignored" not in answer.headers
    page = await metrics_of(client)
    assert 'polyhost_ignored_fields_total{field="store"} 2.0' in page
    assert 'polyhost_ignored_fields_total{field="other"} 2.0' in page
    assert "zzz" not in page


async def test_a_key_is_never_repeated(client: Client) -> None:
    async with client.post(URL, CHAT, key=KEY + "x") as answer:
        assert KEY not in await answer.text()
