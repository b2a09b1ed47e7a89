"""What client libraries send and look for, over HTTP."""

import asyncio
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import Constraint
from tests.gateway.edge_kit import CHAT_TEMPLATE, KEY, Client, Kit, client_of, make_kit

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
    values = {f"v{n}": n for n in range(32)}
    many = {**USER, **{f"f{n}": n for n in range(40)}}
    async with client.post(URL, {**CHAT, "messages": [many], "chat_template_kwargs": values}) as a:
        assert a.headers["x-polyhost-ignored"].count(",") == 31
    page = await metrics_of(client)
    assert 'polyhost_ignored_fields_total{field="store"} 2.0' in page
    assert 'polyhost_ignored_fields_total{field="other"} 34.0' in page
    assert "zzz" not in page


async def message_of(answer: Any) -> str:
    """Of an error."""
    text: str = (await answer.json())["error"]["message"]
    return text


async def test_a_wrong_key_is_told_in_the_words_that_litellm_looks_for(client: Client) -> None:
    async with client.post(URL, CHAT, key=KEY + "x") as answer:
        assert answer.status == 401
        message = await message_of(answer)
    assert message.startswith("Incorrect API key provided")
    assert KEY not in message


async def test_an_overflow_is_told_in_the_words_that_clients_look_for(client: Client) -> None:
    """LiteLLM: the beginning. LangChain: the code, in the message. Both then fall back."""
    bodies = [{**CHAT, "max_tokens": 300}, {**CHAT, "messages": [{**USER, "content": "x" * 9999}]}]
    for body in bodies:
        async with client.post(URL, body) as answer:
            assert answer.status == 400
            message = await message_of(answer)
        assert message.startswith("This model's maximum context length is 256 tokens. However, ")
        assert "(context_length_exceeded)" in message


async def test_health_by_the_names_that_others_have_for_it(kit: Kit, client: Client) -> None:
    for path in ("/health", "/ping"):
        async with client.session.get(client.base + path) as answer:
            assert answer.status == 200
    kit.dispatcher.is_ready = False
    for path in ("/health", "/ping"):
        async with client.session.get(client.base + path) as answer:
            assert (answer.status, (await answer.json())["status"]) == (503, "not_ready")
    async with client.session.get(client.base + "/version") as answer:
        assert (await answer.json()) == {"version": metadata.version("polyhost")}


async def test_usage_with_every_event(kit: Kit, client: Client) -> None:
    """guidellm asks for it."""
    kit.dispatcher.script = kit.speak_slowly("The game")
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await client.events(URL, {**CHAT, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == kit.ledger.only.completion_tokens == len(kit.ids("The game")) + 1
    assert events[-2]["choices"] == []


THINKING = CHAT_TEMPLATE + "{# </think> #}"


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_reasoning_has_both_names_and_its_tokens_are_counted(
    tmp_path: Path, stream: bool, one_by_one: bool
) -> None:
    """`vllm bench serve` looks for `reasoning`; cost trackers for `reasoning_tokens`."""
    kit = make_kit(tmp_path, THINKING)
    kit.dispatcher.script = kit.speak("<think>\nhm, well\n</think>\n\nThe game", one_by_one)
    reasoned = len(kit.ids("<think>\nhm, well\n</think>"))
    async with client_of(kit) as client:
        if stream:
            body = {**CHAT, "stream_options": {"include_usage": True}}
            events = await client.events(URL, body)
            deltas = [event["choices"][0]["delta"] for event in events[:-2]]
            said = {
                name: "".join(delta.get(name, "") for delta in deltas)
                for name in ("reasoning", "reasoning_content", "content")
            }
            usage = events[-2]["usage"]
        else:
            _, answer = await client.chat()
            said, usage = answer["choices"][0]["message"], answer["usage"]
    assert (said["reasoning"], said["reasoning_content"]) == ("hm, well", "hm, well")
    assert said["content"] == "The game"
    found = usage["completion_tokens_details"]["reasoning_tokens"]
    # The mark's last token may hold what comes behind it.
    assert reasoned <= found <= reasoned + 1
    assert usage["completion_tokens"] == kit.ledger.only.completion_tokens


async def test_models_say_how_long_their_context_is(client: Client) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    async with client.session.get(client.base + "/v1/models/tiny", headers=headers) as answer:
        assert (await answer.json())["max_model_len"] == 256


async def test_a_completion_is_held_to_its_form(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("yes")
    body = {"model": "tiny", "prompt": "x", "guided_choice": ["yes", "no"]}
    async with client.post("/v1/completions", body) as answer:
        assert (await answer.json())["choices"][0]["text"] == "yes"
    sent = kit.dispatcher.requests[0].request
    assert sent.constraint == Constraint("regex", "yes|no")


async def test_token_ids_that_stop(kit: Kit, client: Client) -> None:
    [stop] = kit.ids("!")
    kit.dispatcher.script = kit.speak("The game!", one_by_one=False)
    status, body = await client.chat(stop_token_ids=[stop])
    assert status == 200
    assert kit.dispatcher.requests[0].request.stop_token_ids == [kit.end_id, stop]
    assert body["choices"][0]["message"]["content"] == "The game"
    await client.chat(stop_token_ids=[stop], ignore_eos=True)
    assert kit.dispatcher.requests[1].request.stop_token_ids == [stop]
    status, body = await client.chat(stop_token_ids=[403])
    assert (status, body["error"]["param"]) == (400, "stop_token_ids")


async def test_scores_of_the_prompt_as_vllm_spells_them(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("x")
    _, body = await client.chat(prompt_logprobs=2)
    prompt = kit.dispatcher.requests[0].request.prompt_token_ids
    found = body["prompt_logprobs"]
    assert (len(found), found[0]) == (len(prompt), None)
    own = found[1][str(prompt[1])]
    text = kit.tokenizer.decode(prompt[1:2])
    expected = {"logprob": pytest.approx(-0.01 * prompt[1]), "rank": None, "decoded_token": text}
    assert own == expected
    assert {entry["rank"] for entry in found[1].values()} == {1, 2, None}
    assert body["choices"][0]["logprobs"] is None
    ask = {"model": "tiny", "prompt": ["ab", "c"], "prompt_logprobs": 0}
    async with client.post("/v1/completions", ask) as answer:
        choices = (await answer.json())["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [len(kit.ids("ab")), 1]
    both = {**ask, "prompt": "ab", "prompt_logprobs": 3, "echo": True, "logprobs": 1}
    async with client.post("/v1/completions", both) as answer:
        choice = (await answer.json())["choices"][0]
    assert len(choice["prompt_logprobs"][1]) == 4
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2


async def test_what_is_no_http_has_a_request_id_too(client: Client) -> None:
    host, port = client.base.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"nonsense\r\n\r\n")
    head = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")[0]
    writer.close()
    assert head.startswith(b"HTTP/1.1 400 ")
    assert re.search(rb"\r\nx-request-id: [0-9a-f]{32}(\r\n|$)", head)
