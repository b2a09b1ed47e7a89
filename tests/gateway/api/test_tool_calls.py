"""Tool calls, reasoning and forms from HTTP to the worker and back, read by OpenAI's own client."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from tests.gateway.edge_kit import CHAT_TEMPLATE, KEY, Client, Kit, client_of, make_kit

HERMES = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{% endfor %}"
)
THINKS = "{% if add_generation_prompt %}{{ '<think>\n' }}{% else %}{{ '</think>' }}{% endif %}"


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


class Answer(BaseModel):
    value: int


TOOLS = [openai.pydantic_function_tool(Weather, name="weather")]
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}\n'
    '</tool_call>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zwolle", "days": 1}}\n'
    "</tool_call>"
)


def kit_with(folder: Path, text: str, template: str) -> Kit:
    kit = make_kit(folder / "tiny", template, max_context=4096, default_max_tokens=512)
    kit.dispatcher.script = kit.speak(text)
    return kit


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return kit_with(tmp_path, CALLS, HERMES + CHAT_TEMPLATE)


def sdk_of(client: Client) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key=KEY, base_url=f"{client.base}/v1", max_retries=0)


async def test_parse_reads_calls(client: Client) -> None:
    async with sdk_of(client) as sdk:
        parsed = await sdk.chat.completions.parse(model="tiny", messages=MESSAGES, tools=TOOLS)
    choice = parsed.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    calls = choice.message.tool_calls or []
    found = [call.function.parsed_arguments for call in calls]
    assert found == [Weather(city="Zürich", days=2), Weather(city="Zwolle", days=1)]
    assert len({call.id for call in calls}) == 2


async def test_the_streaming_helper_accumulates_calls(client: Client) -> None:
    seen: list[str] = []
    async with (
        sdk_of(client) as sdk,
        sdk.chat.completions.stream(model="tiny", messages=MESSAGES, tools=TOOLS) as stream,
    ):
        async for event in stream:
            seen.append(event.type)
        final = await stream.get_final_completion()
    choice = final.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    found = [call.function.parsed_arguments for call in choice.message.tool_calls or []]
    assert found == [Weather(city="Zürich", days=2), Weather(city="Zwolle", days=1)]
    assert seen.count("tool_calls.function.arguments.done") == 2
    assert seen.count("tool_calls.function.arguments.delta") >= 2


async def test_a_plain_stream_accumulates_to_the_same(client: Client) -> None:
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    async with sdk_of(client) as sdk:
        options: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS}
        whole = await sdk.chat.completions.create(**options)
        async for chunk in await sdk.chat.completions.create(stream=True, **options):
            state.handle_chunk(chunk)
    streamed = state.get_final_completion().choices[0].message
    assert streamed.content == whole.choices[0].message.content
    for one, other in zip(
        streamed.tool_calls or [], whole.choices[0].message.tool_calls or [], strict=True
    ):
        assert (one.function.name, one.function.arguments) == (
            other.function.name,
            other.function.arguments,
        )


async def test_the_worker_is_bound_by_the_choice(kit: Kit, client: Client) -> None:
    ask: dict[str, Any] = {"tools": TOOLS}
    for choice, binds in (("auto", True), ("required", True), ("none", False)):
        await client.chat(tool_choice=choice, **ask)
        constraint = kit.dispatcher.requests[-1].request.constraint
        assert (constraint is not None) == binds
    await client.chat()
    assert kit.dispatcher.requests[-1].request.constraint is None


async def test_without_tools_the_same_text_is_content(client: Client) -> None:
    _, body = await client.chat()
    assert body["choices"][0]["message"]["content"] == CALLS
    assert body["choices"][0]["finish_reason"] == "stop"
    assert "tool_calls" not in body["choices"][0]["message"]


async def test_an_answer_and_its_results_can_be_sent_back(kit: Kit, client: Client) -> None:
    async with sdk_of(client) as sdk:
        options: Any = {"model": "tiny", "tools": TOOLS}
        first = await sdk.chat.completions.create(messages=MESSAGES, **options)
        message = first.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "rain"}
            for call in message.tool_calls or []
        ]
        sent: Any = [*MESSAGES, message, *results]
        await sdk.chat.completions.create(messages=sent, **options)
    ids = kit.dispatcher.requests[-1].request.prompt_token_ids
    assert '{"city": "Zürich", "days": 2}' in kit.tokenizer.decode(ids)


async def test_parse_reads_a_form(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak('{"value": 42}')
    async with sdk_of(client) as sdk:
        parsed = await sdk.chat.completions.parse(
            model="tiny", messages=MESSAGES, response_format=Answer
        )
    assert parsed.choices[0].message.parsed == Answer(value=42)
    constraint = kit.dispatcher.requests[-1].request.constraint
    assert constraint is not None
    assert json.loads(constraint.text)["properties"] == {"value": {"type": "integer"}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 1}}},
            "response_format.json_schema.schema",
        ),
    ],
)
async def test_bad_requests_reach_nobody(
    kit: Kit, client: Client, body: dict[str, Any], param: str
) -> None:
    status, answer = await client.chat(**body)
    assert status == 400
    assert str(answer["error"]["param"]).startswith(param)
    assert not kit.dispatcher.requests


async def test_reasoning_is_a_field_of_its_own(tmp_path: Path) -> None:
    text = f"I should ask.\n</think>\n\n{CALLS}"
    kit = kit_with(tmp_path, text, HERMES + CHAT_TEMPLATE + THINKS)
    async with client_of(kit) as client:
        _, body = await client.chat(tools=TOOLS)
        message = body["choices"][0]["message"]
        assert message["reasoning_content"] == "I should ask."
        assert message["content"] == "Let me see."
        assert len(message["tool_calls"]) == 2
        ask = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS}
        events = await client.events("/v1/chat/completions", ask)
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == "I should ask."
        assert "".join(d.get("content") or "" for d in deltas) == "Let me see."


async def test_a_template_without_calls_takes_no_tools(tmp_path: Path) -> None:
    kit = kit_with(tmp_path, "x", CHAT_TEMPLATE)
    async with client_of(kit) as client:
        status, body = await client.chat(tools=TOOLS)
    assert (status, body["error"]["param"]) == (400, "tools")
    assert body["error"]["code"] == "unsupported_parameter"


async def test_marks_that_are_control_tokens_reach_the_parser(tmp_path: Path) -> None:
    template = CHAT_TEMPLATE + "{% for m in [] %}{{ '[TOOL_CALLS][' }}{% endfor %}"
    kit = kit_with(tmp_path, "", template)
    kit.tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    kit.tokenizer.save(str(tmp_path / "tiny" / "tokenizer.json"))
    text = 'Well.[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Ghent", "days": 3}}]'
    kit.dispatcher.script = kit.speak(text)
    async with client_of(kit) as client:
        _, body = await client.chat(tools=TOOLS)
        message = body["choices"][0]["message"]
        [call] = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Ghent", "days": 3}
        assert message["content"] == "Well."
        assert len(call["id"]) == 9
        constraint = kit.dispatcher.requests[-1].request.constraint
        assert constraint is not None
        assert f"<[{kit.tokenizer.token_to_id('[TOOL_CALLS]')}]>" in constraint.text
        _, body = await client.chat()
        assert "[TOOL_CALLS]" not in body["choices"][0]["message"]["content"]
