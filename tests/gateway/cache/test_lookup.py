"""Questions of kept entries are remembered within bounds, and compared in turn with others."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.protocol import Submit
from gateway.cache import question_score
from gateway.cache.embedder import Meaning
from gateway.cache.lookup import ReadingCache
from gateway.cache.question_score import PROBE
from gateway.cache.types import Neighbour
from registry.accounts.key_terms import KeyCache
from tests.gateway.cache.answers_kit import MIB, entry_of, scope_of
from tests.gateway.cache.embed_kit import ScriptedWorker, make_cached
from tests.gateway.cache.reading_kit import reading_of
from tests.gateway.edge_kit import Kit, client_of, key_record

URL = "/v1/chat/completions"
ASK, OTHERWISE = "How do I reset my password?", "Please how do I reset my password?"


def test_what_is_kept_is_known_by_its_entry_and_its_question() -> None:
    remembered = ReadingCache(MIB)
    entry = replace(entry_of(scope_of(), "Is it 7?", b""), entry_id="e")
    assert remembered.of(entry) is None
    reading = reading_of("Is it 7?")
    remembered.keep("e", reading, remembered.num_forgotten)
    assert remembered.of(entry) is reading
    assert remembered.of(replace(entry, question="Is it 8?")) is None
    assert remembered.of(replace(entry, entry_id="f")) is None, "another entry's, same words"


def test_a_purge_leaves_no_words_and_nothing_found_before_it_is_kept_after_it() -> None:
    remembered = ReadingCache(MIB)
    before = remembered.num_forgotten
    remembered.keep("e", reading_of("Is it 7?"), before)
    remembered.forget()
    assert remembered.num_bytes == 0
    remembered.keep("e", reading_of("Is it 7?"), before)
    assert remembered.num_bytes == 0


@pytest.mark.parametrize("max_bytes", [0, 1000, 20_000])
def test_what_is_remembered_is_bounded(max_bytes: int) -> None:
    remembered = ReadingCache(max_bytes)
    for number in range(50):
        remembered.keep(f"e{number}", reading_of(f"What is {number} and {number}?"), 0)
        assert remembered.num_bytes <= max_bytes
    assert (remembered.num_bytes > 0) == (max_bytes > 1000)


async def asked(kit: Kit, *questions: str) -> list[str | None]:
    """What the cache said of each."""
    found = []
    async with client_of(kit) as client:
        for question in questions:
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": question}],
                "temperature": 0,
            }
            async with client.post(URL, body) as answer:
                found.append(answer.headers.get("x-polyhost-cache"))
                await answer.read()
            await asyncio.sleep(0.02)
    return found


@pytest.fixture
async def setting(tmp_path: Path) -> tuple[Kit, ScriptedWorker]:
    kit, worker = make_cached(tmp_path)
    kit.edge.cache._draw = lambda: 0.99
    kit.dispatcher.script = kit.speak("The game is afoot!")
    kit.use_keys(key_record(cache=KeyCache("semantic")))
    return kit, worker


def embedded(worker: ScriptedWorker) -> list[int]:
    """Of each request to the embedder, how many texts."""
    sent = [message for message in worker.sent if isinstance(message, Submit)]
    return [len(message.encode.lengths) for message in sent if message.encode is not None]


async def test_a_neighbours_question_is_embedded_once_and_again_when_it_is_forgotten(
    setting: tuple[Kit, ScriptedWorker],
) -> None:
    kit, worker = setting
    await asked(kit, ASK)
    assert embedded(worker) == [2], "with the first question goes the probe"
    await asked(kit, OTHERWISE)
    assert embedded(worker)[1:2] == [1], "the entry's own is remembered from when it was asked"
    kit.edge.cache._readings.forget()
    before = len(embedded(worker))
    await asked(kit, "how do I reset my password please")
    assert embedded(worker)[before : before + 2] == [1, 2], "both neighbours in one go"


@pytest.mark.parametrize("is_known", [False, True])
async def test_another_embedder_than_the_weights_know_starts_with_nothing(
    setting: tuple[Kit, ScriptedWorker], monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    kit, _ = setting
    known = replace(question_score.fitted(), values=(0.0,) * 7, bias=5.0)
    monkeypatch.setattr(question_score, "fitted", lambda: known)
    probes: list[Any] = []

    def know(_: Any, vector: Any) -> bool:
        probes.append(vector)
        return is_known

    monkeypatch.setattr(type(known), "know", know)
    assert await asked(kit, ASK, OTHERWISE, OTHERWISE.lower()) == [
        "miss",
        "hit" if is_known else "miss",
        "hit",  # the same words need no score
    ]
    found = await kit.edge.cache.embedder.embed([PROBE])
    assert found is not None
    assert len(probes) == 1
    assert np.allclose(probes[0], found[0])


async def test_neighbours_that_cannot_be_read_in_time_are_a_miss(
    setting: tuple[Kit, ScriptedWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, _ = setting
    await asked(kit, ASK)
    kit.edge.cache._readings.forget()
    cache = kit.edge.cache
    read = cache.embedder.read

    async def only_what_is_asked(texts: Sequence[str]) -> list[Meaning] | None:
        return None if ASK in texts else await read(texts)

    monkeypatch.setattr(cache.embedder, "read", only_what_is_asked)
    assert await asked(kit, ASK.lower()) == ["miss"]
    monkeypatch.undo()
    assert await asked(kit, ASK.lower() + "!") == ["hit"]


async def test_others_have_their_turn_between_long_questions(
    setting: tuple[Kit, ScriptedWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, _ = setting
    cache = kit.edge.cache
    turns: list[int] = []
    compared: list[int] = []
    view = question_score.view

    def noted(*given: Any) -> Any:
        compared.append(1)
        return view(*given)

    async def beside() -> None:
        while True:
            turns.append(len(compared))
            await asyncio.sleep(0)

    monkeypatch.setattr(question_score, "view", noted)
    long = reading_of("word " * 100)
    near = []
    for number in range(6):
        entry = replace(entry_of(scope_of(), long.text, b""), entry_id=f"e{number}")
        cache._readings.keep(entry.entry_id, long, 0)
        near.append(Neighbour(entry, 0.9))
    other = asyncio.create_task(beside())
    await asyncio.sleep(0)
    candidates = await cache._candidates(long, near, 0)
    other.cancel()
    assert candidates is not None
    assert len(candidates) == 6
    steps = [after - before for before, after in zip(turns, [*turns[1:], 6], strict=True)]
    assert max(steps) == 1
