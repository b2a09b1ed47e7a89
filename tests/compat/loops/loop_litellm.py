"""LiteLLM's SDK: chats, Messages, Responses, embeddings, reranking, its errors."""

import asyncio
import json
from typing import Any

import litellm
import pytest

from tests.compat.loops.kit import CROSS, EMBED, KEY, MODEL, TEXT, URL, call, script

CHAT: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY}
MESSAGES: dict[str, Any] = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": KEY}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
LOOP = script(
    {"reasoning": "Sum.", "text": "Well. ", "calls": [call("add", a=1, b=2)]}, {"text": TEXT}
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture(params=[CHAT, MESSAGES], ids=["chat", "messages"])
def where(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_with_its_own_messages_sent_back(where: dict[str, Any], stream: bool) -> None:
    messages: list[Any] = [user(LOOP)]
    for _ in range(3):
        answer = litellm.completion(**where, messages=messages, tools=[ADD], stream=stream)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for one in message.tool_calls:
            given = json.loads(one.function.arguments)
            result = str(given["a"] + given["b"])
            messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
    assert [message["content"] for message in messages[2:]] == ["3", TEXT]
    assert messages[1].reasoning_content == "Sum."


def test_asynchronous_streams(where: dict[str, Any]) -> None:
    async def run() -> str:
        messages = [user(script({"text": TEXT}))]
        stream = await litellm.acompletion(**where, messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(run()) == TEXT


def test_usage_of_a_stream() -> None:
    usage = {"include_usage": True}
    messages = [user(script({"reasoning": "Hm.", "text": TEXT}))]
    chunks = list(litellm.completion(**CHAT, messages=messages, stream=True, stream_options=usage))
    (last,) = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert last.completion_tokens > last.completion_tokens_details.reasoning_tokens > 0


def test_structured_output(where: dict[str, Any]) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "people": {"type": "integer"}},
        "required": ["name", "people"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    turn = script({"text": '{"name": "Oslo", "people": 12}'})
    answer = litellm.completion(**where, messages=[user(turn)], response_format=form)
    assert json.loads(answer.choices[0].message.content) == {"name": "Oslo", "people": 12}


def test_reasoning_effort_is_taken() -> None:
    turn = script({"reasoning": "Hm.", "text": TEXT})
    effort: Any = "none"
    answer = litellm.completion(
        **CHAT,
        messages=[user(turn)],
        reasoning_effort=effort,
        allowed_openai_params=["reasoning_effort"],
    )
    assert answer.choices[0].message.content == TEXT
    assert not getattr(answer.choices[0].message, "reasoning_content", None)


@pytest.mark.parametrize("stream", [False, True])
def test_responses(stream: bool) -> None:
    turn = script({"reasoning": "Hm.", "text": TEXT})
    answer = litellm.responses(**CHAT, input=turn, stream=stream)
    if stream:
        events = list(answer)
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == TEXT
        answer = events[-1].response
    texts = [part.text for item in answer.output if item.type == "message" for part in item.content]
    assert texts == [TEXT]


def test_messages() -> None:
    answer: Any = asyncio.run(
        litellm.anthropic.messages.acreate(
            **MESSAGES, max_tokens=200, messages=[user(script({"text": TEXT}))]
        )
    )
    assert answer["content"][0]["text"] == TEXT


def test_embeddings() -> None:
    answer = litellm.embedding(
        model=f"openai/{EMBED}", api_base=f"{URL}/v1", api_key=KEY, input=["a", "b"]
    )
    assert [len(row["embedding"]) for row in answer.data] == [32, 32]
    assert answer.usage.prompt_tokens > 0


@pytest.mark.parametrize(
    ("provider", "base"), [("cohere", f"{URL}/v1/rerank"), ("hosted_vllm", URL), ("cohere", URL)]
)
def test_reranking(provider: str, base: str) -> None:
    answer = litellm.rerank(
        model=f"{provider}/{CROSS}",
        api_base=base,
        api_key=KEY,
        query="a",
        documents=["b", "c c"],
        top_n=1,
    )
    assert len(answer.results) == 1


def test_text_completions() -> None:
    asked = {**CHAT, "model": f"text-completion-openai/{MODEL}"}
    answer = litellm.text_completion(**asked, prompt=script({"text": TEXT}))
    assert answer.choices[0].text.endswith(TEXT)


def test_its_errors_are_of_their_kinds(where: dict[str, Any]) -> None:
    messages = [user("Hello")]
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**where, "api_key": "none"}, messages=messages)
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**where, "model": where["model"] + "x"}, messages=messages)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**where, messages=[user("word " * 20_000)])
