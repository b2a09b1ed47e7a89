"""The embedder's worker and what becomes of a text: rows, none, and none in time."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.protocol import LoadModel, Refused, SetCatalog, Submit
from gateway.cache.embedder import MAX_IN_FLIGHT, EmbeddingWorker, HostedEmbedder, NoEmbedder
from gateway.text.codecs import Codecs
from gateway.types import HostedModel
from tests.gateway.cache.embed_kit import DIM, NAME, VOCAB, ScriptedWorker, write_bag
from tests.gateway.prepare_kit import InlinePool

VOCAB_AT = {word: at for at, word in enumerate(dict.fromkeys(VOCAB))}


class Rig:
    def __init__(self, folder: Path, timeout_s: float = 5.0) -> None:
        self.model = write_bag(folder)
        self.client = ScriptedWorker()
        self.worker = EmbeddingWorker(self.client, NAME)
        codecs = Codecs(InlinePool(), 2)
        self.embedder = HostedEmbedder(codecs, self.worker, timeout_s)

    def start(self, model: HostedModel | None = None) -> "Rig":
        self.host(model or self.model)
        self.worker.start()
        return self

    def host(self, *models: HostedModel) -> None:
        self.worker.set_models(models)


async def test_a_vector_has_length_one_and_texts_of_the_same_words_are_one(tmp_path: Path) -> None:
    rig = Rig(tmp_path).start()
    vectors = await rig.embedder.embed(["reset my password", "my password reset", "hours"])
    assert vectors is not None
    assert [v.shape for v in vectors] == [(DIM,)] * 3
    assert np.allclose([np.linalg.norm(v) for v in vectors], 1)
    assert vectors[0] @ vectors[1] == pytest.approx(1)
    assert vectors[0] @ vectors[2] == 0
    assert rig.client.num_unacked == 0
    assert rig.embedder.revision == "rev-bag"


async def test_a_text_is_read_by_its_words(tmp_path: Path) -> None:
    rig = Rig(tmp_path).start()
    meanings = await rig.embedder.read(["Reset my password?", "hours"])
    vectors = await rig.embedder.embed(["Reset my password?", "hours"])
    assert meanings is not None
    assert vectors is not None
    for meaning, vector in zip(meanings, vectors, strict=True):
        assert np.allclose(meaning.vector, vector)
    first, second = (meaning.reading for meaning in meanings)
    assert (first.words, second.words) == (("reset", "my", "password"), ("hours",))
    assert first.states.shape == (3, DIM)
    assert [int(row.argmax()) for row in first.states] == [
        VOCAB_AT[word] for word in ("reset", "my", "password")
    ]
    assert rig.client.num_unacked == 0
    assert await rig.embedder.read(["hours " * 33]) is None
    assert await rig.embedder.read([""]) is None
    assert await NoEmbedder().read(["x"]) is None


async def test_without_a_model_there_is_none(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.worker.start()
    assert await rig.embedder.embed(["x"]) is None
    assert rig.embedder.revision == ""
    rig.host(replace(rig.model, task="generate"))
    assert rig.embedder.revision == ""
    assert await rig.embedder.embed(["x"]) is None
    assert await NoEmbedder().embed(["x"]) is None


async def test_a_new_revision_is_told_and_waited_for(tmp_path: Path) -> None:
    rig = Rig(tmp_path).start()
    assert rig.client.count(SetCatalog) == 1
    rig.client.state = "loading"
    rig.host(replace(rig.model, revision="rev-2"))
    assert rig.client.count(SetCatalog) == 2
    assert await rig.embedder.embed(["hours"]) is None
    rig.client.state = "resident"
    rig.client.tell(NAME)
    assert await rig.embedder.embed(["hours"]) is not None
    rig.client.state = "cold"
    num_loads = rig.client.count(LoadModel)
    rig.client.answers = False
    rig.client.state = "failed"
    rig.client.tell(NAME)
    assert await rig.embedder.embed(["hours"]) is None
    assert rig.client.count(LoadModel) == num_loads


async def test_one_that_does_not_answer_in_time_is_none(tmp_path: Path) -> None:
    rig = Rig(tmp_path, timeout_s=0.02).start()
    rig.client.answers = False
    assert await rig.embedder.embed(["hours"]) is None
    late = rig.client.sent[-1]
    assert isinstance(late, Submit)
    rig.client.answer(late)  # nobody waits: acknowledged all the same
    assert rig.client.num_unacked == 0
    rig.client.answers = True
    assert await rig.embedder.embed(["hours"]) is not None


async def test_a_worker_that_is_lost_ends_what_waits(tmp_path: Path) -> None:
    rig = Rig(tmp_path).start()
    rig.client.answers = False
    waiting = asyncio.create_task(rig.embedder.embed(["hours"]))
    while not rig.client.count(Submit):  # noqa: ASYNC110
        await asyncio.sleep(0)
    rig.worker.lose("killed", "process")
    assert await waiting is None
    rig.client.answers = True
    rig.client.listener.on_connected("w", "e2")
    assert await rig.embedder.embed(["hours"]) is not None
    rig.client.is_connected = False
    assert await rig.embedder.embed(["hours"]) is None


async def test_what_waits_is_bounded_and_a_refusal_is_none(tmp_path: Path) -> None:
    rig = Rig(tmp_path).start()
    rig.client.answers = False
    waiting = [asyncio.create_task(rig.worker.rows([[1]])) for _ in range(MAX_IN_FLIGHT)]
    await asyncio.sleep(0)
    assert await rig.worker.rows([[1]]) is None
    first = next(m for m in rig.client.sent if isinstance(m, Submit))
    refused = Refused("e1", first.request_id, 1, "overloaded", "full", True)
    rig.client.listener.on_refused("w", refused)
    assert await waiting[0] is None
    for task in waiting[1:]:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    rig.client.answers = True
    assert await rig.worker.rows([[1]]) is not None


@pytest.mark.parametrize(
    "vectors", [b"", b"1234", np.zeros(DIM, "<f4").tobytes(), np.full(DIM, np.nan, "<f4").tobytes()]
)
async def test_rows_that_are_no_vectors_are_none(tmp_path: Path, vectors: bytes) -> None:
    rig = Rig(tmp_path).start()
    rig.client.answers = False
    waiting = asyncio.create_task(rig.embedder.embed(["hours"]))
    while not rig.client.count(Submit):  # noqa: ASYNC110
        await asyncio.sleep(0)
    sent = rig.client.sent[-1]
    assert isinstance(sent, Submit)
    rig.client.answer(sent, vectors)
    assert await waiting is None


async def test_a_text_that_is_too_long_or_empty_has_none(tmp_path: Path) -> None:
    rig = Rig(tmp_path).start()
    assert await rig.embedder.embed(["hours " * 33]) is None
    assert await rig.embedder.embed([""]) is None
    assert await rig.embedder.embed(["hours " * 32]) is not None
