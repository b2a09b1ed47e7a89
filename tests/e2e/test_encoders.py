"""A real server with an embedding model and a cross-encoder: answers held to transformers'."""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel

from gateway import service
from gateway.cli import main
from gateway.settings import Settings
from registry.session import upgrade
from tests.e2e.server import Server, serving
from tests.e2e.test_chat import exported_rows
from tests.gateway.encoder_kit import WORDS, bert_like_tokenizer

pytestmark = pytest.mark.e2e

TEXTS = [" ".join(WORDS[:n]) for n in (1, 5, 13, 2)] + ["A red MOON", "the [SEP] cat"]
QUERY = "is the moon red"
NUM_POSITIONS = 64


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


def save(folder: Path, kind: type[Any], **options: Any) -> Any:
    """A tiny random model as a Hugging Face folder, as transformers writes it."""
    tokenizer = bert_like_tokenizer()
    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=NUM_POSITIONS,
        **options,
    )
    model = kind(config).eval()
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return model


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    folder = tmp_path_factory.mktemp("encoders")
    data_dir = folder / "data"
    embed = save(folder / "embed", BertModel)
    cross = save(folder / "cross", BertForSequenceClassification, num_labels=1)
    settings = Settings(data_dir=str(data_dir))
    data_dir.mkdir()
    upgrade(settings.database_url)
    with service.open_control(settings, "tests") as control:
        service.create_tenant(control, "acme")
        _, key = service.create_key(control, "acme", "tests")
    for name in ("embed", "cross"):
        source = ("--source", str(folder / name))
        assert main(["models", "add", name, *source, "--data-dir", str(data_dir)]) == 0
    with service.open_control(settings, "tests") as control:
        listed = {model.name: model for model in service.list_models(control)}
    assert (listed["embed"].task, listed["embed"].dim) == ("embed", 32)
    assert (listed["cross"].task, listed["cross"].labels) == ("classify", ["LABEL_0"])
    with serving(data_dir, POLYHOST_ENCODE_PIECE_TOKENS="32") as server:
        yield Hosted(server, key, embed, cross)


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


async def test_a_killed_worker_costs_nobody_anything_twice(hosted: Hosted) -> None:
    answered = 0
    killed = False

    async def one(number: int) -> tuple[int, dict[str, Any]]:
        nonlocal answered, killed
        inputs = [" ".join(WORDS[: 1 + (number + n) % 13]) for n in range(40)]
        got = await hosted.ask("embeddings", model="embed", input=inputs, encoding_format="base64")
        answered += 1
        if answered == 5:
            (pid,) = hosted.server.worker_pids()
            os.kill(pid, signal.SIGKILL)
            killed = True
        return got

    gate = asyncio.Semaphore(16)

    async def gated(number: int) -> tuple[int, dict[str, Any]]:
        async with gate:
            return await one(number)

    answers = await asyncio.gather(*(gated(number) for number in range(40)))
    assert killed
    statuses = Counter(status for status, _ in answers)
    assert set(statuses) <= {200, 503}
    assert statuses[200] >= 5
    for status, body in answers:
        if status == 503:
            assert body["error"]["code"] == "service_unavailable"
        else:
            assert len(body["data"]) == 40
    hosted.server.wait_until(lambda: hosted.server.metrics()["polyhost_ledger_pending"] == 0)
    rows = exported_rows(hosted.server.data_dir)
    postings = Counter(row["request_id"] for row in rows)
    assert set(postings.values()) == {1}
    whole = {body["id"]: body["usage"] for status, body in answers if status == 200}
    posted = {row["request_id"]: row for row in rows if row["request_id"] in whole}
    assert posted.keys() == whole.keys()
    for request_id, row in posted.items():
        assert (row["kind"], row["outcome"]) == ("embedding", "finished")
        assert row["prompt_tokens"] == whole[request_id]["prompt_tokens"]
    assert {row["outcome"] for row in rows} == {"finished"}
