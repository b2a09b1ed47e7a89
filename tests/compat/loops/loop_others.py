"""cohere's reranking and Ollama's client."""

from typing import Any

import cohere
import ollama
import pytest

from tests.compat.loops.kit import CROSS, EMBED, KEY, MODEL, TEXT, URL, call, script

DOCUMENTS = ["one", "two words", "three words more"]


@pytest.mark.parametrize("kind", [cohere.Client, cohere.ClientV2])
def test_coheres_reranking(kind: Any) -> None:
    client = kind(api_key=KEY, base_url=URL)
    answer = client.rerank(model=CROSS, query="words", documents=DOCUMENTS, top_n=2)
    assert len(answer.results) == 2
    scores = [result.relevance_score for result in answer.results]
    assert scores == sorted(scores, reverse=True)


def test_coheres_errors() -> None:
    with pytest.raises(cohere.UnauthorizedError):
        cohere.ClientV2(api_key="none", base_url=URL).rerank(
            model=CROSS, query="a", documents=["b"]
        )


@pytest.fixture
def client() -> ollama.Client:
    return ollama.Client(host=URL, headers={"authorization": f"Bearer {KEY}"})


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def test_a_loop_of_ollama(client: ollama.Client) -> None:
    turns = script({"reasoning": "Sum.", "calls": [call("add", a=1, b=2)]}, {"text": TEXT})
    messages: list[Any] = [{"role": "user", "content": turns}]
    answer = client.chat(MODEL, messages=messages, tools=[add], think=True)
    assert answer.message.thinking == "Sum."
    assert answer.message.tool_calls
    messages.append(answer.message)
    for one in answer.message.tool_calls:
        result = str(add(**one.function.arguments))
        messages.append({"role": "tool", "tool_name": one.function.name, "content": result})
    assert client.chat(MODEL, messages=messages, tools=[add]).message.content == TEXT


def test_streams_of_ollama(client: ollama.Client) -> None:
    turn = script({"text": TEXT})
    pieces = client.chat(MODEL, messages=[{"role": "user", "content": turn}], stream=True)
    assert "".join(piece.message.content or "" for piece in pieces) == TEXT
    parts = list(client.generate(MODEL, turn, stream=True))
    assert "".join(part.response for part in parts) == TEXT
    assert parts[-1].done
    assert parts[-1].eval_count


def test_forms_and_vectors_of_ollama(client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"people": {"type": "integer"}}}
    messages = [{"role": "user", "content": "Oslo has 12."}]
    answer = client.chat(MODEL, messages=messages, format=schema)
    assert answer.message.content == '{"people": 12}'
    assert len(client.embed(EMBED, ["a", "b"]).embeddings) == 2


def test_models_of_ollama(client: ollama.Client) -> None:
    assert MODEL in [model.model for model in client.list().models]
    assert client.show(MODEL).capabilities
    assert MODEL in [model.model for model in client.ps().models]
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        client.chat("none", messages=[{"role": "user", "content": "a"}])
