"""Tool calls, forms and reasoning from HTTP to the worker and back, through the openai SDK too."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from registry.accounts.quotas import Limits
from tests.gateway.edge_kit import KEY, Client, Kit, Running, key_record, make_kit

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{{ m.content.split('</think>')[-1] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLS = (
    "<think>Two calls.</think>"
    '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(params=["plain marks", "control tokens"])
def kit(tmp_path: Path, request: pytest.FixtureRequest) -> Kit:
    """With the marks of calls as ordinary text, or as control tokens that answers leave out."""
    kit = make_kit(tmp_path / "tiny", TEMPLATE)
    if request.param == "control tokens":
        kit.tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
        kit.tokenizer.save(str(tmp_path / "tiny" / "tokenizer.json"))
    kit.dispatcher.script = kit.speak(CALLS)
    return kit


def told(calls: list[Any]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


async def test_calls_and_reasoning_in_a_whole_answer(kit: Kit, client: Client) -> None:
    _, body = await client.chat(tools=[TOOL])
    choice = body["choices"][0]
    message = choice["message"]
    assert told(message["tool_calls"]) == [("f", {"a": "é"}), ("f", {})]
    assert (message["content"], message["reasoning_content"]) == (None, "Two calls.")
    assert choice["finish_reason"] == "tool_calls"
    assert kit.ledger.only.completion_tokens == len(kit.ids(CALLS)) + 1


async def test_calls_through_the_sdks_accumulator(kit: Kit, client: Client) -> None:
    async with openai.AsyncOpenAI(api_key=KEY, base_url=f"{client.base}/v1") as sdk:
        tools: Any = [TOOL]
        async with sdk.chat.completions.stream(
            model="tiny", messages=[{"role": "user", "content": "x"}], tools=tools
        ) as stream:
            final = await stream.get_final_completion()
    choice = final.choices[0]
    calls = choice.message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": "é"}, {}]
    assert len({call.id for call in calls}) == 2
    assert choice.finish_reason == "tool_calls"


async def test_a_kept_answer_is_read_again(kit: Kit, client: Client) -> None:
    kit.use_keys(key_record(cache_mode="exact", limits=Limits()))
    answers = []
    for _ in range(2):
        _, body = await client.chat(tools=[TOOL], temperature=0)
        answers.append((told(body["choices"][0]["message"]["tool_calls"]), body["choices"][0]))
    assert answers[0][0] == answers[1][0]
    assert answers[1][1]["finish_reason"] == "tool_calls"
    assert len(kit.dispatcher.requests) == 1
    # Without the right to call, the same model's words are another request's.
    await client.chat(tools=[TOOL], temperature=0, tool_choice="required")
    assert len(kit.dispatcher.requests) == 2


async def test_calls_with_scores_and_choices(kit: Kit, client: Client) -> None:
    events = await client.events(CHAT, {**ASK, "tools": [TOOL], "n": 2, "logprobs": True})
    for index in range(2):
        mine = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == index]
        scores = [t for c in mine for t in (c["logprobs"] or {"content": []})["content"]]
        assert len(scores) == len(kit.ids(CALLS))
        assert mine[-1]["finish_reason"] == "tool_calls"


async def test_the_form_of_an_answer_reaches_the_worker(kit: Kit, client: Client) -> None:
    def script(running: Running) -> None:
        assert running.request.constraint is not None
        kit.speak('{"a": 1}')(running)

    kit.dispatcher.script = script
    status, body = await client.chat(response_format={"type": "json_object"})
    assert (status, body["choices"][0]["message"]["content"]) == (200, '{"a": 1}')
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_a_call_that_is_cut_off(kit: Kit, client: Client) -> None:
    def script(running: Running) -> None:
        running.say(kit.ids('<tool_call>\n{"name": "f", "arguments": {"a": "b'))
        running.end("length")

    kit.dispatcher.script = script
    _, body = await client.chat(tools=[TOOL])
    choice = body["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": "b'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
         "tool_choice.function.name"),
        ({"tools": [TOOL], "tool_choice": "required", "min_tokens": 3, "max_tokens": 9},
         "min_tokens"),
    ],
)  # fmt: skip
async def test_what_makes_no_sense_reserves_nothing(
    kit: Kit, client: Client, fields: dict[str, Any], param: str
) -> None:
    status, body = await client.chat(**fields)
    assert (status, body["error"]["param"]) == (400, param)
    assert kit.dispatcher.requests == []
    assert kit.ledger.opened == []
