"""instructor: structured output in its modes, with a second try after a wrong answer."""

from collections.abc import Callable
from typing import Any

import anthropic
import instructor
import openai
import pytest
from pydantic import BaseModel

from tests.compat.loops.kit import KEY, MODEL, URL, call, script


class City(BaseModel):
    name: str
    people: int


OSLO = City(name="Oslo", people=12)


def by_openai(mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY), mode=mode)


def by_anthropic(mode: instructor.Mode) -> Any:
    return instructor.from_anthropic(anthropic.Anthropic(base_url=URL, api_key=KEY), mode=mode)


TOOL = {"calls": [call("City", name="Oslo", people=12)]}
WRONG_TOOL = {"calls": [call("City", name="Oslo", people="many")]}
TEXT, WRONG_TEXT = ({"text": f'{{"name": "Oslo", "people": {n}}}'} for n in ("12", '"many"'))
FENCED, WRONG_FENCED = ({"text": f"```json\n{t['text']}\n```"} for t in (TEXT, WRONG_TEXT))
CASES: list[tuple[Callable[[instructor.Mode], Any], instructor.Mode, Any, Any]] = [
    (by_openai, instructor.Mode.TOOLS, TOOL, WRONG_TOOL),
    (by_openai, instructor.Mode.TOOLS_STRICT, TOOL, WRONG_TOOL),
    (by_openai, instructor.Mode.JSON, TEXT, WRONG_TEXT),
    (by_openai, instructor.Mode.JSON_SCHEMA, TEXT, WRONG_TEXT),
    (by_openai, instructor.Mode.MD_JSON, FENCED, WRONG_FENCED),
    (by_openai, instructor.Mode.RESPONSES_TOOLS, TOOL, None),
    (by_anthropic, instructor.Mode.ANTHROPIC_TOOLS, TOOL, WRONG_TOOL),
    (by_anthropic, instructor.Mode.ANTHROPIC_JSON, TEXT, None),
]

"""Without a wrong one where instructor does not send the wrong answer back, so that the script does
not see that it is asked again."""


@pytest.mark.parametrize(("client", "mode", "right", "wrong"), CASES)
def test_a_model_and_a_second_try(client: Any, mode: Any, right: Any, wrong: Any) -> None:
    for turns in [(right,), (wrong, right)] if wrong else [(right,)]:
        answer = client(mode).create(
            model=MODEL,
            max_tokens=500,
            messages=[{"role": "user", "content": script(*turns)}],
            response_model=City,
            max_retries=2,
        )
        assert answer.model_dump() == OSLO.model_dump()


def test_a_partial_stream() -> None:
    partial = {"calls": [call("PartialCity", name="Oslo", people=12)]}
    stream = by_openai(instructor.Mode.TOOLS).create_partial(
        model=MODEL,
        messages=[{"role": "user", "content": script(partial)}],
        response_model=City,
    )
    cities = [city.model_dump() for city in stream]
    assert cities[-1] == OSLO.model_dump()
    assert len(cities) > 1
