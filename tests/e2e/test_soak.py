"""The soak's arithmetic and its callers: who saw what, what was posted, what memory did."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.e2e import soak
from tests.e2e.soak_clients import Ask, Callers, Mix, Seen, ask

STREAM = Ask("m", "Hello", 8, -1, "stream", 0.5)


def seen(request_id: str = "a", **change: Any) -> Seen:
    values: dict[str, Any] = {
        "end": "done",
        "chunks": 3,
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "cached_tokens": 0,
    }
    return Seen(STREAM, "t", request_id=request_id, **(values | change))


def row(request_id: str = "a", **change: Any) -> dict[str, Any]:
    values = {
        "request_id": request_id,
        "outcome": "finished",
        "tenant_name": "t",
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "cached_tokens": 0,
    }
    return values | change


def test_a_request_with_its_posting_is_no_problem() -> None:
    assert soak.settle([seen(), seen("b", end="left")], [row(), row("b", outcome="x")]) == []
    assert soak.settle([seen("", end="refused", chunks=0)], []) == []
    # Whoever left before a token may have a posting or none.
    assert soak.settle([seen("c", end="left", chunks=0)], []) == []


@pytest.mark.parametrize(
    ("clients", "postings", "problem"),
    [
        ([seen()], [], "has no posting"),
        ([seen(end="left")], [], "has no posting"),
        ([seen()], [row(), row()], "posted 2 times"),
        ([seen()], [row(completion_tokens=4)], "the client saw"),
        ([seen()], [row(cached_tokens=16)], "the client saw"),
        ([seen()], [row(outcome="failed")], "failed"),
        ([seen()], [row(tenant_name="u")], "billed to u"),
        ([seen()], [row(), row("b")], "requests nobody made"),
        ([seen("", end="refused")], [row("b")], "requests nobody made"),
    ],
)
def test_what_does_not_add_up_is_told(
    clients: list[Seen], postings: list[dict[str, Any]], problem: str
) -> None:
    (told,) = soak.settle(clients, postings)
    assert problem in told


def test_one_who_gave_up_early_may_have_a_posting_without_a_name() -> None:
    assert soak.settle([seen("", end="left", chunks=0)], [row("b")]) == []


def sample(at_s: float, mib: float, resting: bool = True) -> soak.Sample:
    return soak.Sample(at_s, resting, mib, 2 * mib, 0.0, 0.0, 0)


def test_trend_looks_at_rest_only_and_past_the_start() -> None:
    samples = [sample(t, 100 + t if t < 40 else 140) for t in range(0, 120, 10)]
    samples += [sample(t + 5, 999, resting=False) for t in range(0, 120, 10)]
    flat = soak.trend(samples, "gateway_mib")
    assert flat["growth_mib"] == 0
    assert flat["slope_mib_per_hour"] == 0
    rising = soak.trend([sample(t, t / 36) for t in range(0, 3600, 60)], "worker_mib")
    assert rising["slope_mib_per_hour"] == pytest.approx(200)
    assert rising["growth_mib"] == pytest.approx(200 / 3, rel=0.01)
    assert soak.trend([sample(1.0, 5)], "gateway_mib")["last_mib"] == 5


def test_mix_repeats_and_shares_prefixes() -> None:
    first, second = Mix(["a", "b"], 3), Mix(["a", "b"], 3)
    drawn = [first.draw() for _ in range(300)]
    assert drawn == [second.draw() for _ in range(300)]
    greedy = [one.repeats_as for one in drawn if one.seed < 0]
    assert len(set(greedy)) < len(greedy)
    assert {one.way for one in drawn} == {"stream", "leave", "json", "give_up"}
    starts = [one.content[:100] for one in drawn if len(one.content) > 200]
    assert len(set(starts)) == 8


@contextlib.asynccontextmanager
async def scripted(events: list[Any], status: int = 200) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.StreamResponse:
        if status != 200:
            return web.json_response({"error": {"code": "queue_full"}}, status=status)
        if not (await request.json()).get("stream"):
            return web.json_response(events[0])
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            text = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {text}\n\n".encode())
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = runner.addresses[0]
    try:
        yield f"http://{address[0]}:{address[1]}"
    finally:
        await runner.cleanup()


def chunk(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"id": "chat-1", "choices": [{"delta": {"content": text}, "finish_reason": finish}]}


USAGE = {
    "id": "chat-1",
    "choices": [],
    "usage": {
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
    },
}


@pytest.mark.parametrize(
    ("way", "events", "status", "end", "code"),
    [
        ("stream", [chunk("a"), chunk("b", "stop"), USAGE, "[DONE]"], 200, "done", ""),
        ("stream", [chunk("a"), chunk("b", "stop")], 200, "broken", "stream ended without [DONE]"),
        ("stream", [chunk("a"), "[DONE]"], 200, "broken", "stream ended without finish_reason"),
        ("stream", [chunk("a"), {"error": {"code": "x"}}], 200, "error", "x"),
        ("leave", [chunk("a") for _ in range(20)], 200, "left", ""),
        ("stream", [], 429, "refused", "queue_full"),
        ("json", [], 503, "refused", "queue_full"),
    ],
)
async def test_each_request_has_one_outcome(
    way: Any, events: list[Any], status: int, end: str, code: str
) -> None:
    what = Ask("m", "Hello", 8, -1, way, 0.5)
    async with scripted(events, status) as url:
        async with aiohttp.ClientSession() as session:
            one = await ask(session, url, "t", "key", what)
        assert (one.end, one.code, one.status) == (end, code, status)
        if end == "done":
            assert (one.text, one.prompt_tokens, one.cached_tokens) == ("ab", 9, 4)


async def until(reached: Callable[[], bool]) -> None:
    for _ in range(1000):
        if reached():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("never reached")


async def test_callers_rest_when_held_and_compare_greedy_answers() -> None:
    # Good for a stream's event and for a whole answer alike.
    said = {"delta": {"content": "same"}, "message": {"content": "same"}, "finish_reason": "stop"}
    async with scripted([{**USAGE, "choices": [said]}, "[DONE]"]) as url:
        callers = Callers(url, {"t": "k", "u": "k"}, Mix(["m"], 1))
        running = asyncio.create_task(callers.run(4))
        await until(lambda: len(callers.seen) >= 40)
        await callers.hold()
        count = len(callers.seen)
        await asyncio.sleep(0.05)
        assert len(callers.seen) == count
        callers.release()
        await until(lambda: len(callers.seen) > count)
        callers.stop()
        await running
    assert {one.tenant for one in callers.seen} == {"t", "u"}
    assert callers.num_compared
    callers.answers = dict.fromkeys(callers.answers, "other")
    last = next(one for one in callers.seen if one.end == "done" and one.ask.seed < 0)
    last.text = "same"
    callers._compare(last)
    assert callers.differing == [last.ask.repeats_as]


@pytest.mark.e2e
@pytest.mark.soak
def test_ten_minutes_change_nothing(tmp_path: Path) -> None:
    result = soak.run(tmp_path, 10.0)
    assert not result["problems"]
    assert result["swaps"] > 10
