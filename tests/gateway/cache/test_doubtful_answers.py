"""Answers of which the model was not sure: served to whoever asked, and kept for nobody."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.dispatch.tickets import submit_of
from gateway.types import PreparedRequest
from tests.gateway.edge_kit import Client, Kit, Running, client_of, key_record, make_kit

URL = "/v1/chat/completions"
TEXT = "The game is afoot!"


def kit_of(folder: Path, least_logprob: float) -> Kit:
    """A server that keeps no answer below that; the scripted worker's tokens score -0.01 an id."""
    kit = make_kit(folder / "tiny", cache_least_logprob=least_logprob)
    kit.use_keys(key_record(cache_mode="exact"))
    kit.dispatcher.script = kit.speak(TEXT)
    return kit


def mean_of(kit: Kit) -> float:
    """What the worker says of the answer, in the mean."""
    ids = [*kit.ids(TEXT), kit.end_id]
    return -0.01 * sum(ids) / len(ids)


async def ask(client: Client, **body: Any) -> tuple[str | None, Any]:
    """What the cache says, and the answer."""
    request = {"model": "tiny", "messages": [{"role": "user", "content": "Why?"}], "temperature": 0}
    async with client.post(URL, request | body) as answer:
        found = answer.headers.get("x-polyhost-cache")
        told = await answer.text() if body.get("stream") else await answer.json()
    await asyncio.sleep(0.02)  # what landed is kept a moment later
    return found, told


def requests(kit: Kit) -> list[PreparedRequest]:
    """Those that came to the worker."""
    return [running.request for running in kit.dispatcher.requests]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("off_by", "second"), [(-0.02, "hit"), (0.02, "miss")])
async def test_an_answer_below_the_bar_is_not_kept(
    off_by: float, second: str, stream: bool, tmp_path: Path
) -> None:
    bar = mean_of(kit_of(tmp_path / "first", 0.0)) + off_by
    kit = kit_of(tmp_path, bar)
    async with client_of(kit) as client:
        first, told = await ask(client, stream=stream)
        assert first == "miss"
        if not stream:
            assert told["choices"][0]["logprobs"] is None
            assert told["choices"][0]["message"]["content"] == TEXT
        assert (await ask(client))[0] == second
    submits = [submit_of(one, "t", 1, 0.0) for one in requests(kit)]
    assert {one.logprobs for one in submits} == {0}
    metrics = kit.edge.pipeline._hits._cache_metrics
    counted = metrics.not_kept.labels("doubtful")._value.get()
    assert counted == (0 if second == "hit" else 2)


async def test_nobody_is_asked_for_what_is_not_kept(tmp_path: Path) -> None:
    kit = kit_of(tmp_path, -1.0)
    kit.use_keys(key_record())
    async with client_of(kit) as client:
        await ask(client)
        await ask(client, logprobs=True, top_logprobs=2)
    assert [submit_of(one, "t", 1, 0.0).logprobs for one in requests(kit)] == [-1, 2]


async def test_without_the_setting_nobody_is_asked(tmp_path: Path) -> None:
    kit = kit_of(tmp_path, 0.0)
    async with client_of(kit) as client:
        assert (await ask(client))[0] == "miss"
        assert (await ask(client))[0] == "hit"
    assert [submit_of(one, "t", 1, 0.0).logprobs for one in requests(kit)] == [-1]


async def test_a_worker_that_says_nothing_is_not_trusted(tmp_path: Path) -> None:
    """One of another version, say: what is doubtful is not kept, and the client has its answer."""
    kit = kit_of(tmp_path, -1000.0)

    def mute(running: Running) -> None:
        running.stream.put([*kit.ids(TEXT), kit.end_id], [], [])
        running.end("stop")

    kit.dispatcher.script = mute
    async with client_of(kit) as client:
        assert (await ask(client))[1]["choices"][0]["message"]["content"] == TEXT
        assert (await ask(client))[0] == "miss"
