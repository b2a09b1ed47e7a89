"""A real server with an embedding model and a cross-encoder: answers held to transformers'."""

from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import torch
from transformers import BertForSequenceClassification, BertModel

from bench.servers import Server
from tests.e2e.conftest import Prepared
from tests.e2e.folders import NUM_POSITIONS
from tests.e2e.server import polyhost_json
from tests.gateway.encoder_kit import WORDS, bert_like_tokenizer

pytestmark = pytest.mark.e2e

TEXTS = [" ".join(WORDS[:n]) for n in (1, 5, 13, 2)] + ["A red MOON", "the [SEP] cat"]
QUERY = "is the moon red"


@dataclass(frozen=True, slots=True)
class Hosted:
    """The server, and the models it was given."""

    server: Server
    key: str
    embed: BertModel
    cross: BertForSequenceClassification

    async def ask(self, route: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and body of a POST."""
        headers = {"authorization": f"Bearer {self.key}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.server.url}/v1/{route}", json=body, headers=headers) as answer,
        ):
            return answer.status, await answer.json()


@pytest.fixture
def hosted(prepared: Prepared, server: Server) -> Hosted:
    listed = {row["name"]: row for row in polyhost_json(server.data_dir, "models", "list")}
    assert (listed["embed"]["task"], listed["embed"]["dim"]) == ("embed", 32)
    assert (listed["cross"]["task"], listed["cross"]["labels"]) == ("classify", ["LABEL_0"])
    return Hosted(
        server,
        prepared.key,
        BertModel.from_pretrained(prepared.sources["embed"]).eval(),
        BertForSequenceClassification.from_pretrained(prepared.sources["cross"]).eval(),
    )


@torch.no_grad()
def embedded(model: BertModel, texts: list[str]) -> np.ndarray[Any, Any]:
    """One at a time: nothing padded, so nothing to mask."""
    rows = []
    for text in texts:
        ids = torch.tensor([bert_like_tokenizer().encode(text).ids])
        row = model(ids).last_hidden_state[0].mean(dim=0)
        rows.append((row / row.norm()).numpy())
    return np.stack(rows)


@torch.no_grad()
def logit(model: BertForSequenceClassification, text: str, document: str | None = None) -> float:
    tokenizer = bert_like_tokenizer()
    tokenizer.enable_truncation(NUM_POSITIONS, strategy="only_second")
    encoding = tokenizer.encode(text, document)
    types = torch.tensor([encoding.type_ids])
    return float(model(torch.tensor([encoding.ids]), token_type_ids=types).logits[0, 0])


def sigmoid(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).sigmoid())


async def test_embeddings_are_those_of_transformers(hosted: Hosted) -> None:
    wanted = embedded(hosted.embed, TEXTS)
    async with openai.AsyncOpenAI(base_url=hosted.server.url + "/v1", api_key=hosted.key) as sdk:
        packed = await sdk.embeddings.create(model="embed", input=TEXTS)  # base64 on the wire
        plain = await sdk.embeddings.create(model="embed", input=TEXTS, encoding_format="float")
        ids = [bert_like_tokenizer().encode(text).ids for text in TEXTS]
        by_ids = await sdk.embeddings.create(model="embed", input=ids)
        short = await sdk.embeddings.create(model="embed", input=TEXTS[0], dimensions=8)
    for answer in (packed, plain, by_ids):
        given = np.array([item.embedding for item in answer.data])
        np.testing.assert_allclose(given, wanted, atol=1e-5)
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    cut = wanted[0, :8] / np.linalg.norm(wanted[0, :8])
    np.testing.assert_allclose(short.data[0].embedding, cut, atol=1e-5)


async def test_classes_and_ranks_are_those_of_transformers(hosted: Hosted) -> None:
    status, body = await hosted.ask("classify", model="cross", input=TEXTS)
    assert status == 200, body
    for text, item in zip(TEXTS, body["data"], strict=True):
        assert item["probs"] == [pytest.approx(sigmoid(logit(hosted.cross, text)), abs=1e-5)]
    documents = [*TEXTS, " ".join(WORDS * 8)]  # the last is cut
    status, body = await hosted.ask("rerank", model="cross", query=QUERY, documents=documents)
    assert status == 200, body
    logits = [logit(hosted.cross, QUERY, document) for document in documents]
    scores = {item["index"]: item["relevance_score"] for item in body["results"]}
    assert scores == {n: pytest.approx(sigmoid(value), abs=1e-5) for n, value in enumerate(logits)}
    assert list(scores.values()) == sorted(scores.values(), reverse=True)


async def test_models_are_asked_for_what_they_are_for(hosted: Hosted) -> None:
    status, body = await hosted.ask("completions", model="embed", prompt="the")
    assert (status, body["error"]["code"]) == (400, "wrong_task")
    status, body = await hosted.ask("embeddings", model="cross", input="the")
    assert (status, body["error"]["code"]) == (400, "wrong_task")
    status, body = await hosted.ask("embeddings", model="embed", input="the " * NUM_POSITIONS)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
