"""Responses in the background over HTTP: queued, made without a connection, polled, cancelled."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.errors import QUEUE_FULL, UNAVAILABLE, ApiError, WorkerLost
from gateway.limits.limits import Limiter
from gateway.state import background
from gateway.state.response_store import ResponseStore
from registry.accounts.quotas import Limits
from registry.session import appending, make_engine, reading
from registry.state import responses
from tests.gateway.dialects.test_responses import ASK, URL, ask
from tests.gateway.edge_kit import (
    KEY,
    Client,
    Kit,
    Running,
    client_of,
    key_record,
    make_kit,
    silent,
    until,
)
from tests.gateway.state.test_responses import call, prompt_of, rows
from tests.migrated import migrated


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "BEAT_S", 0.02)
    monkeypatch.setattr(background, "FINISH_PAUSES_S", (0.01, 0.01))


async def queued(client: Client, **fields: Any) -> dict[str, Any]:
    status, body = await ask(client, background=True, **fields)
    assert (status, body["status"], body["background"]) == (200, "queued", True), body
    return body


async def ended(client: Client, response_id: str, *states: str) -> dict[str, Any]:
    """The response once it is in one of the states."""
    async with asyncio.timeout(5):
        while True:
            status, body = await call(client, "GET", f"{URL}/{response_id}")
            assert status == 200, body
            if body["status"] in states:
                return dict(body)
            await asyncio.sleep(0.01)


async def test_it_is_made_without_a_connection(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = silent
    told = await queued(client, metadata={"a": "b"})
    assert (told["output"], told["usage"], told["store"]) == ([], None, True)
    running = await kit.begun()
    _, body = await call(client, "GET", f"{URL}/{told['id']}")
    assert body["status"] == "queued"
    running.say(kit.ids("The"))
    assert (await ended(client, told["id"], "in_progress"))["output"] == []
    running.say([*kit.ids(" game"), kit.end_id])
    running.end("stop")
    body = await ended(client, told["id"], "completed")
    assert body["output"][0]["content"][0]["text"] == "The game"
    assert (body["background"], body["metadata"], body["error"]) == (True, {"a": "b"}, None)
    assert body["usage"]["output_tokens"] == kit.ledger.only.completion_tokens
    assert kit.ledger.only.request_id == told["id"]
    kit.dispatcher.script = kit.speak("on")
    await ask(client, previous_response_id=told["id"], input="Go on")
    assert "The game<|im_end|>\n<|im_start|>user\nGo on" in prompt_of(kit)


async def test_one_that_is_cut_is_incomplete(kit: Kit, client: Client) -> None:
    def script(running: Running) -> None:
        running.say(kit.ids("The"))
        running.end("length")

    kit.dispatcher.script = script
    told = await queued(client)
    body = await ended(client, told["id"], "incomplete")
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_one_that_fails_says_why(kit: Kit, client: Client) -> None:
    def script(running: Running) -> None:
        running.say(kit.ids("The"))
        running.fail(WorkerLost())

    kit.dispatcher.script = script
    told = await queued(client)
    body = await ended(client, told["id"], "failed")
    assert body["error"]["code"] == "service_unavailable"

    kit.dispatcher.script = lambda running: running.fail(ApiError(UNAVAILABLE, "no worker"))
    told = await queued(client)
    body = await ended(client, told["id"], "failed")
    assert body["error"] == {"code": "service_unavailable", "message": "no worker"}
    status, body = await ask(client, previous_response_id=told["id"])
    assert (status, body["error"]["code"]) == (404, "previous_response_not_found")
    assert "is failed" in body["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"model": "nobody"}, 404, "model_not_found"),
        ({"input": "a " * 3000}, 400, "context_length_exceeded"),
        ({"store": False}, 400, "invalid_request"),
    ],
)
async def test_what_is_wrong_is_told_at_once_and_leaves_nothing(
    kit: Kit, client: Client, fields: dict[str, Any], status: int, code: str
) -> None:
    found, body = await ask(client, background=True, **fields)
    assert (found, body["error"]["code"]) == (status, code)
    assert rows(kit) == 0
    assert not kit.dispatcher.requests


async def test_a_key_stands_for_what_is_not_refused_any_more(
    kit: Kit, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the row and the refusal a second request must not be told of a response that is gone
    in a moment."""
    reserved, go_on = asyncio.Event(), asyncio.Event()
    reserve = Limiter.reserve

    async def waiting(limiter: Limiter, *about: Any) -> Any:
        reserved.set()
        await go_on.wait()
        return await reserve(limiter, *about)

    async def send() -> tuple[int, Any]:
        async with client.post(URL, {**ASK, "background": True}, idempotency_key="k") as answer:
            return answer.status, await answer.json()

    monkeypatch.setattr(Limiter, "reserve", waiting)
    kit.dispatcher.refusal = ApiError(QUEUE_FULL, "full", retry_after_s=1.0)
    first = asyncio.create_task(send())
    await asyncio.wait_for(reserved.wait(), 5)
    status, body = await send()
    assert (status, body["error"]["code"]) == (409, "idempotency_in_progress")
    go_on.set()
    assert (await first)[0] == 429
    assert rows(kit) == 0
    kit.dispatcher.refusal, kit.dispatcher.script = None, kit.speak("The game")
    status, told = await send()
    assert status == 200
    status, again = await send()
    assert (status, again["id"], len(kit.dispatcher.requests)) == (200, told["id"], 1)
    await ended(client, told["id"], "completed")


async def test_limits_and_a_full_queue_refuse_at_once(kit: Kit, client: Client) -> None:
    kit.use_keys(key_record(limits=Limits(max_concurrency=1)))
    kit.dispatcher.script = silent
    first = await queued(client)
    running = await kit.begun()
    async with client.post(URL, {**ASK, "background": True}, idempotency_key="k") as answer:
        assert (answer.status, rows(kit)) == (429, 1)
    kit.speak("The game")(running)
    await ended(client, first["id"], "completed")
    kit.dispatcher.refusal = ApiError(QUEUE_FULL, "full", retry_after_s=1.0)
    status, body = await ask(client, background=True)
    assert (status, body["error"]["code"], rows(kit)) == (429, "queue_full", 1)
    kit.dispatcher.refusal = None
    kit.dispatcher.script = kit.speak("The game")
    async with client.post(URL, {**ASK, "background": True}, idempotency_key="k") as answer:
        assert answer.status == 200, "the refused one left no key"


Stop = Callable[[Client, str], Awaitable[tuple[int, Any]]]


async def cancel(client: Client, response_id: str) -> tuple[int, Any]:
    return await call(client, "POST", f"{URL}/{response_id}/cancel")


async def delete(client: Client, response_id: str) -> tuple[int, Any]:
    return await call(client, "DELETE", f"{URL}/{response_id}")


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("stop", [cancel, delete])
async def test_it_is_stopped(kit: Kit, client: Client, stop: Stop, has_tokens: bool) -> None:
    kit.dispatcher.script = silent
    told = await queued(client)
    running = await kit.begun()
    if has_tokens:
        running.say(kit.ids("The"))
        await ended(client, told["id"], "in_progress")
    status, body = await stop(client, told["id"])
    assert status == 200
    await kit.settled()
    assert running.aborted
    assert [posting.outcome for posting in kit.ledger.posted] == ["disconnected"] * has_tokens
    if stop is cancel:
        assert body["status"] == "cancelled"
        assert await cancel(client, told["id"]) == (200, body), "again changes nothing"
        assert (await ended(client, told["id"], "cancelled"))["output"] == []
    else:
        assert (await call(client, "GET", f"{URL}/{told['id']}"))[0] == 404


async def test_one_that_has_ended_is_not_cancelled(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("The game")
    told = await queued(client)
    body = await ended(client, told["id"], "completed")
    assert await cancel(client, told["id"]) == (200, body)


async def test_another_process_cancels_it(tmp_path: Path) -> None:
    one = make_kit(tmp_path / "tiny")
    migrated(one.edge.services.settings.registry_url)
    two = make_kit(tmp_path / "tiny")
    one.dispatcher.script = silent
    async with client_of(one) as first, client_of(two) as second:
        told = await queued(first)
        running = await one.begun()
        assert (await cancel(second, told["id"]))[1]["status"] == "cancelled"
        await one.settled()
        assert running.aborted
        assert (await ended(first, told["id"], "cancelled"))["output"] == []


async def test_the_end_is_stored_when_the_database_is_back(
    kit: Kit, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, tries = ResponseStore.finish, 0

    def flaky(*about: Any) -> bool:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError("away")
        return finish(*about)

    monkeypatch.setattr(ResponseStore, "finish", flaky)
    kit.dispatcher.script = kit.speak("The game")
    told = await queued(client)
    await ended(client, told["id"], "completed")
    assert tries == 3


async def test_one_whose_end_was_not_stored_is_not_kept_alive_by_others(
    kit: Kit, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*about: Any) -> bool:
        raise OSError("away")

    monkeypatch.setattr(ResponseStore, "finish", fail)
    kit.dispatcher.script = kit.speak("The game")
    given_up = (await queued(client))["id"]
    await until(lambda: not kit.edge.responses._background.num_running)
    kit.dispatcher.script = silent
    running = (await queued(client))["id"]
    engine = make_engine(kit.edge.services.settings.registry_url)
    viewer = responses.Viewer("ten_1", None, 0.0)

    def beats(*ids: str) -> list[float | None]:
        with reading(engine) as session:
            return [responses.get(session, viewer, each).heartbeat_at for each in ids]

    before = beats(given_up, running)
    await until(lambda: beats(running) != before[1:])
    assert beats(given_up) == before[:1]
    engine.dispose()


async def test_at_a_shutdown_what_cannot_end_has_failed(tmp_path: Path) -> None:
    kit = make_kit(tmp_path / "tiny", shutdown_timeout_s=0.1)
    migrated(kit.edge.services.settings.registry_url)
    kit.dispatcher.script = silent
    async with client_of(kit) as client:
        told = await queued(client)
        running = await kit.begun()
    assert running.aborted
    engine = make_engine(kit.edge.services.settings.registry_url)
    with appending(engine, "test") as session:
        found = responses.get(session, responses.Viewer("ten_1", None, 0.0), told["id"])
    engine.dispose()
    assert (found.state, found.error_code) == ("failed", "server_error")


async def test_the_next_life_of_a_process_fails_what_it_was_making(tmp_path: Path) -> None:
    kit = make_kit(tmp_path / "tiny", owner="server/gateway-0")
    url = kit.edge.services.settings.registry_url
    migrated(url)
    kit.dispatcher.script = kit.speak("The game")
    engine = make_engine(url)
    async with client_of(kit) as client:
        told = await queued(client)
        await ended(client, told["id"], "completed")
        for other in ("server/gateway-0", "server/gateway-1"):
            lost = responses.ResponseRecord(
                id=f"resp_{other[-1]}",
                tenant_id="ten_1",
                parent_id=None,
                model="tiny",
                state="in_progress",
                depth=0,
                object_name=f"ten_1/responses/{other[-1]}",
                sha256="",
                items_bytes=0,
                created_at=1e9,
                owner=other,
                heartbeat_at=1e9,
            )
            with appending(engine, "test") as session:
                assert responses.add(session, lost, 100)
    again = make_kit(tmp_path / "tiny", owner="server/gateway-0")
    async with client_of(again) as client:
        assert (await call(client, "GET", f"{URL}/{told['id']}"))[1]["status"] == "completed"
    viewer = responses.Viewer("ten_1", None, 0.0)
    with appending(engine, "test") as session:
        states = [responses.get(session, viewer, f"resp_{n}").state for n in (0, 1)]
    engine.dispose()
    assert states == ["failed", "in_progress"]


async def test_openais_own_client_polls(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = silent
    async with openai.AsyncOpenAI(
        api_key=KEY, base_url=f"{client.base}/v1", max_retries=0, _strict_response_validation=True
    ) as sdk:
        told = await sdk.responses.create(model="tiny", input="Hi", background=True)
        assert told.status == "queued"
        running = await kit.begun()
        kit.speak("Yes.")(running)
        async with asyncio.timeout(5):
            while told.status in ("queued", "in_progress"):
                await asyncio.sleep(0.01)
                told = await sdk.responses.retrieve(told.id)
        assert told.output_text == "Yes."
        kit.dispatcher.script = silent
        other = await sdk.responses.create(model="tiny", input="Hi", background=True)
        assert (await sdk.responses.cancel(other.id)).status == "cancelled"
        await kit.settled(2)
