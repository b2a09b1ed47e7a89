"""pydantic-ai by chats, Responses and Anthropic's Messages."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.compat.loops.kit import KEY, MODEL, TEXT, URL, call, script


class City(BaseModel):
    name: str
    people: int


def openai_provider() -> Any:
    return OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)


MODELS: dict[str, Callable[[], Any]] = {
    "chat": lambda: OpenAIChatModel(MODEL, provider=openai_provider()),
    "responses": lambda: OpenAIResponsesModel(MODEL, provider=openai_provider()),
    "messages": lambda: AnthropicModel(
        MODEL,
        provider=AnthropicProvider(base_url=URL, api_key=KEY),
        profile=ModelProfile(supports_json_schema_output=True),
    ),
}
LOOP = script(
    {"reasoning": "Two sums.", "calls": [call("add", a=1, b=2), call("add", a=3, b=4)]},
    {"calls": [call("add", a=3, b=7)]},
    {"text": TEXT},
)


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


def adder(model: Any, **options: Any) -> Any:
    agent = Agent(model, instructions="Add.", **options)

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    return agent


def test_a_loop(model: Any) -> None:
    result = adder(model).run_sync(LOOP)
    assert result.output == TEXT
    assert result.usage.requests == 3
    assert result.usage.tool_calls == 3


def test_a_second_turn(model: Any) -> None:
    agent = adder(model)
    first = agent.run_sync(LOOP)
    again = agent.run_sync(script({"text": "again"}), message_history=first.all_messages())
    assert again.output == "again"


def test_a_streamed_loop(model: Any) -> None:
    async def run() -> list[str]:
        async with adder(model).run_stream(LOOP) as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    pieces = asyncio.run(run())
    assert "".join(pieces) == TEXT
    assert len(pieces) > 1


@pytest.mark.parametrize("output", [ToolOutput, NativeOutput, PromptedOutput])
def test_structured_output(model: Any, output: Any) -> None:
    by_tool = {"calls": [call("final_result", name="Oslo", people=12)]}
    by_text = {"text": '{"name": "Oslo", "people": 12}'}
    agent = Agent(model, output_type=output(City))
    turn = by_tool if output is ToolOutput else by_text
    assert agent.run_sync(script(turn)).output == City(name="Oslo", people=12)


def test_a_wrong_output_is_asked_for_again(model: Any) -> None:
    turns = [{"calls": [call("final_result", name="Oslo", people=p)]} for p in ("many", 12)]
    agent = Agent(model, output_type=ToolOutput(City))
    assert agent.run_sync(script(*turns)).output == City(name="Oslo", people=12)


def test_settings(model: Any) -> None:
    settings = {"max_tokens": 300, "temperature": 0.2, "top_p": 0.9, "parallel_tool_calls": True}
    assert adder(model, model_settings=settings).run_sync(LOOP).output == TEXT
