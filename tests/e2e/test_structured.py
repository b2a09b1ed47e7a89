"""Forms and tool calls from a real server, through the OpenAI SDK's own helpers.

The demo model cannot write JSON and its template knows no tools: a copy of it gets one that does.
All its answers have are the masks.
"""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
import torch
from openai.lib.streaming.chat import ChatCompletionStreamState
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.servers import Server
from tests.e2e.conftest import Prepared
from tests.e2e.server import polyhost, usage_rows

pytestmark = pytest.mark.e2e


class Order(BaseModel):
    """What the answer has to be."""

    paid: bool
    color: Literal["red", "green", "dark blue"]
    sizes: tuple[Literal["S", "M", "L"], Literal["S", "M", "L"]]


class Weather(BaseModel):
    """A function's arguments."""

    unit: Literal["celsius", "fahrenheit"]
    days: Literal[1, 2, 3]


class Alarm(BaseModel):
    """Those of another one."""

    hour: Literal[6, 7, 8]
    loud: bool


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "paid": {"type": "boolean"},
        "color": {"enum": ["red", "green", "dark blue"]},
        "sizes": {"type": "array", "items": {"enum": ["S", "M"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["paid", "color", "sizes"],
    "additionalProperties": False,
}
ASK: dict[str, Any] = {
    "model": "caller",
    "messages": [{"role": "user", "content": "What now?"}],
    "max_completion_tokens": 150,
    "seed": 3,
}
TOOLS = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Alarm)]
ARGUMENTS: dict[str, type[BaseModel]] = {"Weather": Weather, "Alarm": Alarm}


@dataclass(frozen=True, slots=True)
class Caller:
    """A server with the model, the model's folder, and a client."""

    server: Server
    folder: Path
    key: str
    client: openai.AsyncOpenAI


@pytest.fixture(name="caller")
async def _caller(prepared: Prepared, server: Server) -> AsyncIterator[Caller]:
    url, key = f"{server.url}/v1", prepared.key
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=60) as client:
        yield Caller(server, prepared.sources["caller"], key, client)


def form(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


async def test_parsed_answers_and_their_streams(caller: Caller) -> None:
    completions = caller.client.chat.completions
    bodies = [{**ASK, "seed": seed} for seed in range(4)]
    answers = await asyncio.gather(
        *(completions.create(**body, response_format=form(SCHEMA)) for body in bodies)
    )
    for answer in answers:
        assert answer.choices[0].finish_reason == "stop"
        told = json.loads(answer.choices[0].message.content)
        assert set(told) == {"paid", "color", "sizes"}
        assert 1 <= len(told["sizes"]) <= 2
    parsed = await completions.parse(**ASK, response_format=Order)
    order = parsed.choices[0].message.parsed
    assert isinstance(order, Order)
    assert parsed.usage is not None
    async with completions.stream(**ASK, response_format=Order) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == order
    free = {**ASK, "temperature": 1.0, "max_completion_tokens": 40}
    mixed = await asyncio.gather(
        completions.create(**free),
        completions.create(**ASK, response_format=form(SCHEMA), n=3),
        completions.create(**free),
    )
    alone = await completions.create(**free)
    assert mixed[0].choices[0].message == mixed[2].choices[0].message == alone.choices[0].message
    for choice in mixed[1].choices:
        assert json.loads(choice.message.content)["color"] in ("red", "green", "dark blue")


async def test_forced_calls_and_their_accumulators(caller: Caller) -> None:
    completions = caller.client.chat.completions
    choices: list[Any] = [
        "required",
        {"type": "function", "function": {"name": "Alarm"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "Weather"}}],
            },
        },
    ]
    for choice in choices:
        body = {**ASK, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
        answer = await completions.parse(**body)
        calls: list[Any] = list(answer.choices[0].message.tool_calls or ())
        (call,) = calls
        assert isinstance(call.function.parsed_arguments, ARGUMENTS[call.function.name])
        state = ChatCompletionStreamState(input_tools=TOOLS)
        async for chunk in await completions.create(**body, stream=True):
            state.handle_chunk(chunk)
        streamed: list[Any] = list(state.get_final_completion().choices[0].message.tool_calls or ())
        (again,) = streamed
        assert again.function.name == call.function.name
        assert again.function.arguments == call.function.arguments
    assert call.function.name == "Weather"
    short = {**ASK, "max_completion_tokens": 60}
    many, unforced = await asyncio.gather(
        completions.create(**short, tools=TOOLS, tool_choice="required"),
        completions.create(**short, tools=TOOLS),
    )
    assert many.choices[0].message.tool_calls
    assert unforced.choices[0].finish_reason in ("stop", "length", "tool_calls")


async def test_objects_patterns_and_grammars(caller: Caller) -> None:
    create: Any = caller.client.chat.completions.create
    pattern = r"[A-Z]{3}-\d{4}"
    found = await create(**ASK, response_format={"type": "regex", "pattern": pattern})
    assert re.fullmatch(pattern, found.choices[0].message.content)
    grammar = 'start: WORD (", " WORD)*\nWORD: "ja" | "nein"'
    limited = {**ASK, "logit_bias": {"1": 5}}
    found = await create(**limited, response_format={"type": "grammar", "grammar": grammar})
    text = found.choices[0].message.content
    whole = found.choices[0].finish_reason == "stop"
    assert re.fullmatch(r"(ja|nein)(, (ja|nein))*", text) if whole else text[:1] in "jn"
    found = await create(**ASK, response_format={"type": "json_object"})
    assert found.choices[0].message.content.startswith("{")


async def test_what_cannot_be_enforced_is_400_and_counted(caller: Caller) -> None:
    create: Any = caller.client.chat.completions.create
    refusals: list[tuple[Any, str]] = [
        (form({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}), "not"),
        ({"type": "regex", "pattern": "(?=a)b"}, "look-ahead"),
        ({"type": "grammar", "grammar": "start: nobody"}, "nobody"),
        (form({"$ref": "#/$defs/a"}), "no schema at"),
    ]
    metrics = caller.server.metrics
    name = 'request_errors_total{code="invalid_constraint"}'
    before = metrics().get(name, 0.0)
    for response_format, why in refusals:
        for stream in (False, True, False):  # the second time it is known to be refused
            with pytest.raises(openai.BadRequestError) as caught:
                await create(**ASK, response_format=response_format, stream=stream)
            assert caught.value.code == "invalid_constraint"
            assert why in str(caught.value), str(caught.value)
    assert metrics()[name] == before + 12

    def refused_by_workers() -> float:
        return sum(v for k, v in metrics().items() if "constraints_refused_total" in k)

    caller.server.wait_until(lambda: refused_by_workers() == 6)
    whole = await create(**ASK, response_format=form(SCHEMA))
    assert whole.choices[0].finish_reason == "stop"


async def test_scores_of_an_echoed_prompt(caller: Caller) -> None:
    create: Any = caller.client.completions.create
    prompt = "def quicksort(items):\n    return"
    tokenizer = AutoTokenizer.from_pretrained(caller.folder)
    model = AutoModelForCausalLM.from_pretrained(caller.folder, dtype=torch.float32).eval()
    ids = tokenizer(prompt)["input_ids"]
    with torch.no_grad():
        logs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    want = [float(logs[i, token]) for i, token in enumerate(ids[1:])]
    body = {"model": "caller", "prompt": prompt, "echo": True, "logprobs": 2, "temperature": 0}
    for _ in range(2):  # the second time its KV is in the prefix cache
        scored = await create(**body, max_tokens=0)
        told = scored.choices[0].logprobs
        assert told.token_logprobs[0] is None
        assert told.token_logprobs[1:] == pytest.approx(want, abs=1e-3)
        assert "".join(told.tokens[1:]) == prompt or "".join(told.tokens) == prompt
        assert scored.choices[0].text == prompt
        assert scored.usage.completion_tokens == 0
    stream = await create(**body, max_tokens=3, stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    values = [v for c in chunks if c.logprobs for v in c.logprobs.token_logprobs]
    assert values[1 : len(ids)] == pytest.approx(want, abs=1e-3)
    assert len(values) == len(ids) + 3
    assert all(math.isfinite(value) for value in values[1:])


async def test_a_form_that_gets_too_dear_is_billed_counted_and_known(caller: Caller) -> None:
    """42 bytes that blocked all structured output for 99 s, for nothing and as often as wanted."""
    data_dir = caller.server.data_dir
    assert polyhost(data_dir, "tenants", "add", "dear").returncode == 0
    made = polyhost(data_dir, "keys", "create", "--tenant", "dear", "--rpm", "2", "--name", "x")
    form = {"type": "grammar", "grammar": "start: e\ne: e e | e e e | C\nC: /[a-z \\n]/\n"}
    ask = {**ASK, "model": "python", "max_completion_tokens": 200}
    async with openai.AsyncOpenAI(
        base_url=f"{caller.server.url}/v1", api_key=made.stdout.strip(), max_retries=0
    ) as client:
        create: Any = client.chat.completions.create

        async def refused() -> str:
            with pytest.raises(openai.BadRequestError) as caught:
                await create(**ask, response_format=form)
            assert caught.value.code == "invalid_constraint"
            return str(caught.value)

        while True:  # until the server knows the key
            try:
                assert "became too expensive" in await refused()
                break
            except openai.AuthenticationError:
                await asyncio.sleep(0.05)
        assert "too expensive to enforce before" in await refused()
        answer = await create(**{**ask, "max_completion_tokens": 2})
        with pytest.raises(openai.RateLimitError):
            await create(**{**ask, "max_completion_tokens": 2})
    caller.server.wait_until(caller.server.has_posted)
    rows = usage_rows(data_dir, tenant="dear")
    plain, dear = sorted(rows, key=lambda row: int(row["completion_tokens"]))
    assert (dear["outcome"], plain["outcome"]) == ("finished", "finished")
    assert answer.usage.completion_tokens == plain["completion_tokens"]
    assert int(dear["cost_nanos"]) > int(plain["cost_nanos"])
    restarts = (v for k, v in caller.server.metrics().items() if "constraint_restarts" in k)
    assert sum(restarts) == 0
