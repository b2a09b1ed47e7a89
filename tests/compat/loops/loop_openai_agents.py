"""openai-agents, by Responses (its default) and by chats."""

import asyncio
from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel

from tests.compat.loops.kit import KEY, MODEL, TEXT, URL, call, script

set_tracing_disabled(True)


class City(BaseModel):
    name: str
    people: int


@function_tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@pytest.fixture(params=[OpenAIResponsesModel, OpenAIChatCompletionsModel])
def model(request: pytest.FixtureRequest) -> Any:
    return request.param(MODEL, AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY))


LOOP = script(
    {"reasoning": "Two sums.", "calls": [call("add", a=1, b=2), call("add", a=3, b=4)]},
    {"calls": [call("add", a=3, b=7)]},
    {"text": TEXT},
)


def test_a_loop(model: Any) -> None:
    agent = Agent(name="adder", instructions="Add.", model=model, tools=[add])
    result = asyncio.run(Runner.run(agent, LOOP))
    assert result.final_output == TEXT
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert [str(output) for output in outputs] == ["3", "7", "10"]


def test_a_streamed_loop(model: Any) -> None:
    async def run() -> tuple[str, set[str]]:
        agent = Agent(name="adder", model=model, tools=[add])
        result = Runner.run_streamed(agent, LOOP)
        kinds = {event.type async for event in result.stream_events()}
        return result.final_output, kinds

    output, kinds = asyncio.run(run())
    assert output == TEXT
    assert {"raw_response_event", "run_item_stream_event"} <= kinds


def test_an_output_type(model: Any) -> None:
    agent = Agent(name="reader", model=model, output_type=City)
    result = asyncio.run(Runner.run(agent, "'Oslo' has 12."))
    assert result.final_output == City(name="Oslo", people=12)


def test_a_handoff(model: Any) -> None:
    other = Agent(name="other", model=model, tools=[add])
    agent = Agent(name="first", model=model, handoffs=[other])
    turns = ({"calls": [call("transfer_to_other")]}, {"calls": [call("add", a=1, b=1)]})
    result = asyncio.run(Runner.run(agent, script(*turns, {"text": TEXT})))
    assert result.last_agent.name == "other"
    assert result.final_output == TEXT


def test_a_second_turn_from_the_first_ones_items(model: Any) -> None:
    async def run() -> Any:
        agent = Agent(name="adder", model=model, tools=[add])
        first = await Runner.run(agent, LOOP)
        items = [*first.to_input_list(), {"role": "user", "content": script({"text": "again"})}]
        return (await Runner.run(agent, items)).final_output

    assert asyncio.run(run()) == "again"


def test_settings(model: Any) -> None:
    settings = ModelSettings(
        temperature=0.5,
        top_p=0.9,
        max_tokens=200,
        tool_choice="auto",
        parallel_tool_calls=True,
        truncation="auto",
        reasoning=Reasoning(effort="low"),
        verbosity="low",
        store=False,
        prompt_cache_retention="in_memory",
        metadata={"a": "b"},
    )
    agent = Agent(name="adder", model=model, tools=[add], model_settings=settings)
    assert asyncio.run(Runner.run(agent, LOOP)).final_output == TEXT
