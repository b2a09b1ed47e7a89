"""openai: chats and Responses with its helpers for streams, tools and structured output."""

import asyncio
import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.compat.loops.kit import EMBED, KEY, MODEL, TEXT, URL, call, script

CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY)
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD: Any = {"name": "add", "description": "Adds.", "parameters": PARAMETERS, "strict": True}
CHAT_TOOL: Any = {"type": "function", "function": ADD}
RESPONSE_TOOL: Any = {"type": "function", **ADD}
LOOP = script(
    {"reasoning": "Two sums.", "calls": [call("add", a=1, b=2), call("add", a=3, b=4)]},
    {"text": TEXT},
)


class City(BaseModel):
    name: str
    people: int


def test_a_loop_of_chats() -> None:
    messages: list[Any] = [{"role": "user", "content": LOOP}]
    answer = CLIENT.chat.completions.create(model=MODEL, messages=messages, tools=[CHAT_TOOL])
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    messages.append(message)
    for one in message.tool_calls:
        assert one.type == "function"
        given = json.loads(one.function.arguments)
        result = {"role": "tool", "tool_call_id": one.id, "content": str(given["a"] + given["b"])}
        messages.append(result)
    assert [one["content"] for one in messages[2:]] == ["3", "7"]
    answer = CLIENT.chat.completions.create(model=MODEL, messages=messages, tools=[CHAT_TOOL])
    assert answer.choices[0].message.content == TEXT


def test_the_helper_for_streams_of_chats() -> None:
    messages: Any = [{"role": "user", "content": LOOP}]
    asked = {"model": MODEL, "messages": messages, "tools": [CHAT_TOOL]}
    with CLIENT.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [one.function.parsed_arguments for one in calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]


def test_chats_are_parsed() -> None:
    answer = CLIENT.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "'Oslo' has 700000 people."}],
        response_format=City,
    )
    assert answer.choices[0].message.parsed == City(name="Oslo", people=700_000)


def test_a_loop_of_responses_with_reasoning_sent_back() -> None:
    items: Any = [{"role": "user", "content": LOOP}]
    answer = CLIENT.responses.create(model=MODEL, input=items, tools=[RESPONSE_TOOL], store=False)
    kinds = [item.type for item in answer.output]
    assert kinds == ["reasoning", "function_call", "function_call"]
    items += answer.output
    for item in answer.output:
        if item.type == "function_call":
            given = json.loads(item.arguments)
            result = {"type": "function_call_output", "call_id": item.call_id}
            items.append({**result, "output": str(given["a"] + given["b"])})
    answer = CLIENT.responses.create(model=MODEL, input=items, tools=[RESPONSE_TOOL], store=False)
    assert answer.output_text == TEXT
    assert answer.status == "completed"


def test_a_loop_of_responses_with_reasoning_sealed() -> None:
    """As agents do that keep nothing here: the text of the reasoning is left out."""
    asked: Any = {"model": MODEL, "tools": [RESPONSE_TOOL], "store": False}
    asked["include"] = ["reasoning.encrypted_content"]
    answer = CLIENT.responses.create(input=[{"role": "user", "content": LOOP}], **asked)
    reasoning, *calls = answer.output
    assert reasoning.type == "reasoning"
    assert reasoning.encrypted_content
    kept = reasoning.model_dump(exclude={"content", "status"})
    items: Any = [{"role": "user", "content": LOOP}, kept, *calls]
    for item in calls:
        assert item.type == "function_call"
        items.append({"type": "function_call_output", "call_id": item.call_id, "output": "0"})
    assert CLIENT.responses.create(input=items, **asked).output_text == TEXT
    items[1]["encrypted_content"] = items[1]["encrypted_content"][:-8] + "AAAAAAA="
    with pytest.raises(openai.BadRequestError, match="encrypted_content does not open"):
        CLIENT.responses.create(input=items, **asked)


def test_a_background_stream_is_taken_up_again() -> None:
    turn = script({"reasoning": "Think.", "text": TEXT})
    stream = CLIENT.responses.create(model=MODEL, input=turn, background=True, stream=True)
    first = next(iter(stream))
    stream.close()
    assert first.type == "response.created"
    begun = first.response.id
    with CLIENT.responses.stream(response_id=begun, starting_after=0) as again:
        events = list(again)
        final = again.get_final_response()
    assert [event.sequence_number for event in events] == list(range(1, len(events) + 1))
    assert final.output_text == CLIENT.responses.retrieve(begun).output_text == TEXT


def test_the_helper_for_streams_of_responses() -> None:
    turn = {"reasoning": "Think.", "text": TEXT}
    with CLIENT.responses.stream(model=MODEL, input=script(turn)) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == TEXT
    assert len(deltas) > 1


def test_responses_are_parsed() -> None:
    answer = CLIENT.responses.parse(model=MODEL, input="'Oslo' has 12.", text_format=City)
    assert answer.output_parsed == City(name="Oslo", people=12)


def test_a_cut_response_is_incomplete() -> None:
    turn = script({"text": "word ", "goes_on": True})
    answer = CLIENT.responses.create(model=MODEL, input=turn, max_output_tokens=16)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_asynchronous_streams_side_by_side() -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        turn = script({"text": f"{TEXT} {number}", "pace_s": 0.001})
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": turn}], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def several() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY) as client:
            return await asyncio.gather(*(one(client, number) for number in range(8)))

    assert asyncio.run(several()) == [f"{TEXT} {number}" for number in range(8)]


def test_a_worker_that_dies_is_not_seen_in_a_stream() -> None:
    turn = script({"text": TEXT, "pace_s": 0.01, "die": 1})
    stream = CLIENT.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": turn}], stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == TEXT


def test_embeddings_come_in_base64_by_default() -> None:
    plain = CLIENT.embeddings.create(model=EMBED, input=["a", "b"], encoding_format="float")
    packed = CLIENT.embeddings.create(model=EMBED, input=["a", "b"])
    for one, other in zip(plain.data, packed.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, rel=1e-6)


def test_errors_are_the_sdks_classes() -> None:
    with pytest.raises(openai.AuthenticationError):
        CLIENT.with_options(api_key="sk-none").models.list()
    with pytest.raises(openai.NotFoundError):
        CLIENT.models.retrieve("none")
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        CLIENT.responses.create(model=MODEL, input="word " * 20_000)
