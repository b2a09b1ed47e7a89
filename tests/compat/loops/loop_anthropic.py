"""anthropic: Messages with its helpers for streams, tools and structured output."""

from typing import Any

import anthropic
import pytest
from anthropic import beta_tool
from pydantic import BaseModel

from tests.compat.loops.kit import KEY, MODEL, TEXT, URL, call, script

CLIENT = anthropic.Anthropic(base_url=URL, api_key=KEY)
ADD: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    },
}
CALLS = {"reasoning": "Sum.", "text": "Well. ", "calls": [call("add", a=1, b=2)]}
LOOP = script(CALLS, {"text": TEXT})


class City(BaseModel):
    name: str
    people: int


def user(text: str) -> Any:
    return {"role": "user", "content": text}


@beta_tool
def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: One.
        b: The other.
    """
    return str(a + b)


def test_a_loop_with_thinking_sent_back() -> None:
    messages = [user(LOOP)]
    answer = CLIENT.messages.create(model=MODEL, max_tokens=500, messages=messages, tools=[ADD])
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    assert answer.stop_reason == "tool_use"
    use = answer.content[-1]
    assert use.type == "tool_use"
    assert use.input == {"a": 1, "b": 2}
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "3"}
    messages += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    answer = CLIENT.messages.create(model=MODEL, max_tokens=500, messages=messages, tools=[ADD])
    assert answer.stop_reason == "end_turn"
    assert [block.text for block in answer.content if block.type == "text"] == [TEXT]


def test_the_helper_for_streams() -> None:
    asked: Any = {"model": MODEL, "max_tokens": 500, "messages": [user(LOOP)], "tools": [ADD]}
    with CLIENT.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.usage.output_tokens > 0
    with CLIENT.messages.stream(
        model=MODEL, max_tokens=500, messages=[user(script({"text": TEXT}))]
    ) as stream:
        assert "".join(stream.text_stream) == TEXT


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner(stream: bool) -> None:
    runner = CLIENT.beta.messages.tool_runner(
        model=MODEL, max_tokens=500, messages=[user(LOOP)], tools=[add], stream=stream
    )
    final = runner.until_done()
    assert [block.text for block in final.content if block.type == "text"] == [TEXT]


def test_messages_are_parsed() -> None:
    answer = CLIENT.messages.parse(
        model=MODEL, max_tokens=200, messages=[user("'Oslo' has 12.")], output_format=City
    )
    assert answer.parsed_output == City(name="Oslo", people=12)


def test_tokens_are_counted_and_a_cut_is_told() -> None:
    counted = CLIENT.messages.count_tokens(model=MODEL, messages=[user("Hello")], tools=[ADD])
    goes_on = user(script({"text": "word ", "goes_on": True}))
    answer = CLIENT.messages.create(model=MODEL, max_tokens=9, messages=[goes_on])
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 9
    assert counted.input_tokens > 9


def test_models_and_errors() -> None:
    assert MODEL in [model.id for model in CLIENT.models.list()]
    with pytest.raises(anthropic.AuthenticationError):
        CLIENT.with_options(api_key="none").models.list()
    with pytest.raises(anthropic.NotFoundError):
        CLIENT.messages.create(model="none", max_tokens=9, messages=[user("Hello")])
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        CLIENT.messages.create(model=MODEL, max_tokens=9, messages=[user("word " * 20_000)])
