"""Batches that are in the way of others: bounds, limits, stops, keys and retention."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import select

from gateway.batches import batch_run
from gateway.batches.batch_input import MAX_LINES, MAX_MESSAGE_CHARS, InputCheck
from gateway.batches.batch_input import lines_of as lines_of_file
from gateway.batches.batch_store import BatchStore
from gateway.errors import MODEL_NOT_FOUND, ApiError
from registry.accounts import api_keys, tenants
from registry.accounts.quotas import Limits
from registry.session import make_engine, reading, writing
from registry.state.batches import Batch
from tests.gateway.batches.conftest import batch_kit
from tests.gateway.batches.lines_kit import (
    CHATS,
    begun,
    ended,
    line,
    lines_of,
    shown,
    speak_back,
)
from tests.gateway.edge_kit import PRICES, Client, Kit, client_of, silent, until
from tests.gateway.files.file_kit import (
    OTHER_KEY,
    file_keys,
)


async def test_a_file_of_empty_lines_is_not_read_to_its_end(kit: Kit, client: Client) -> None:
    batch = await ended(client, (await begun(client, ["\n" * (MAX_LINES + 1)]))["id"])
    assert batch["errors"]["data"][0]["code"] == "too_many_empty_lines"
    read = 0

    def pieces() -> Iterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield b"\n" * 10_000

    check = InputCheck(pieces(), 100, CHATS)
    num_steps = 1
    while check.step():
        num_steps += 1
    assert num_steps == read == MAX_LINES // 10_000 + 1, "a step reads a piece"


async def test_heartbeats_do_not_wait_for_files(tmp_path: Path) -> None:
    kit = batch_kit(tmp_path, file_threads=1)
    kit.dispatcher.script = silent
    engine = make_engine(kit.edge.services.settings.registry_url)

    def beat_at() -> float:
        with reading(engine) as session:
            return session.scalars(select(Batch.heartbeat_at)).one() or 0.0

    async with client_of(kit) as client:
        batch = await begun(client, [line("a")])
        running = await kit.begun()
        is_over, threads = threading.Event(), kit.edge.batches._runner._parts.threads
        busy = asyncio.create_task(threads.write(is_over.wait))
        last_at = beat_at()
        await until(lambda: beat_at() > last_at)
        assert not busy.done()
        is_over.set()
        kit.speak("The game")(running)
        await ended(client, batch["id"])
    engine.dispose()


@pytest.mark.parametrize("state", ["validating", "finalizing"])
async def test_a_stop_does_not_wait_for_a_long_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Of a file that has no end, read or written."""
    kit = batch_kit(tmp_path)
    speak_back(kit)

    def pieces(*_: object) -> Iterator[bytes]:
        while True:
            yield b"x"

    name = "input_pieces" if state == "validating" else "segment_pieces"
    monkeypatch.setattr(BatchStore, name, pieces)
    engine = make_engine(kit.edge.services.settings.registry_url)
    async with client_of(kit) as client:
        batch = await begun(client, [line("a")])
        async with asyncio.timeout(5):
            while (await shown(client, batch["id"]))["status"] != state:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await until(lambda: kit.edge.batches._runner._running != {})
    with reading(engine) as session:
        assert session.execute(select(Batch.state, Batch.heartbeat_at)).one() == (state, None)
    engine.dispose()


async def test_long_errors_are_cut(
    kit: Kit, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ApiError(MODEL_NOT_FOUND, "x" * 10_000)

    monkeypatch.setattr(batch_run, "find_model", refuse)
    batch = await ended(client, (await begun(client, [line("a")]))["id"])
    assert batch["errors"]["data"][0]["message"] == "x" * MAX_MESSAGE_CHARS


@pytest.mark.parametrize("has_time", [True, False])
async def test_what_a_stop_breaks_off_is_not_posted(tmp_path: Path, has_time: bool) -> None:
    """Lines that run may end; those that do not are made again, under the same id."""
    kit = batch_kit(tmp_path, batch_lines=2)
    kit.dispatcher.script = lambda running: running.say(kit.ids("The"))
    async with client_of(kit) as client:
        batch = await begun(client, [line(f"id-{n}") for n in range(5)])
        await until(lambda: len(kit.dispatcher.requests) == 2)
        [run] = kit.edge.batches._runner._running.values()
        closing = asyncio.create_task(kit.edge.batches.close(5.0 if has_time else 0.0))
        await until(lambda: run._lines.is_stopping)
        for running in kit.dispatcher.requests if has_time else ():
            running.say([kit.end_id])
            running.end("stop")
        await closing
        found = await shown(client, batch["id"])
        num_answered = 2 if has_time else 0
        assert (found["status"], found["request_counts"]["completed"]) == (
            "in_progress",
            num_answered,
        )
        assert [running.aborted for running in kit.dispatcher.requests] == [not has_time] * 2
        await until(lambda: len(kit.ledger.posted) + len(kit.ledger.voided) == 2)
        assert [posting.outcome for posting in kit.ledger.posted] == ["finished"] * num_answered


@pytest.mark.parametrize("has_expired", [False, True])
async def test_a_line_that_is_too_long_by_now_is_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_expired: bool
) -> None:
    """`max_body_bytes` was lowered after the file was checked."""
    kit = batch_kit(tmp_path, batch_lines=1)
    kit.dispatcher.script = silent
    monkeypatch.setattr(batch_run, "lines_of", lambda pieces, _: lines_of_file(pieces, 250))
    long = [{**line('b "\u00e9"'), "more": "x" * 300}, {"more": "x" * 300, **line("c")}]
    async with client_of(kit) as client:
        batch = await begun(client, [line("a"), *long])
        running = await kit.begun()
        if has_expired:
            [run] = kit.edge.batches._runner._running.values()
            run.batch = run._lines._batch = replace(run.batch, expires_at=0.0)
        kit.speak("The game")(running)
        done = await ended(client, batch["id"])
        assert done["status"] == ("expired" if has_expired else "completed")
        errors = await lines_of(client, done["error_file_id"])
        assert errors.keys() - {"a"} == {'b "\u00e9"', ""}
        code = "batch_expired" if has_expired else "invalid_json_line"
        assert {each["error"]["code"] for each in errors.values()} == {code}


async def test_a_line_that_alone_exceeds_a_limit_is_answered(tmp_path: Path) -> None:
    kit = batch_kit(tmp_path)
    mine, *others = file_keys()
    kit.use_keys(replace(mine, limits=Limits(tokens_per_minute=20)), *others)
    async with client_of(kit) as client:
        large = line("a")
        large["body"]["max_tokens"] = 100
        done = await ended(client, (await begun(client, [large]))["id"])
        assert done["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
        error = (await lines_of(client, done["error_file_id"]))["a"]["response"]
        assert error["status_code"] == 429
        assert error["body"]["error"]["code"] == "rate_limit_exceeded"


async def test_a_budget_that_running_lines_hold_is_waited_for(tmp_path: Path) -> None:
    """It covers what one line may cost and what some do cost, and never two at a time."""
    kit = batch_kit(tmp_path, batch_lines=4)
    kit.dispatcher.script = kit.speak_slowly("The game")
    mine, *others = file_keys()
    kit.use_keys(replace(mine, limits=Limits(day_budget_nanos=700)), *others)
    lines = [line(f"id-{n}") for n in range(12)]
    for each in lines:
        each["body"]["max_tokens"] = 90
    async with client_of(kit) as client:
        done = await ended(client, (await begun(client, lines))["id"])
        cost = kit.ledger.posted[0].cost_nanos
        num_covered = sum(posting.outcome == "finished" for posting in kit.ledger.posted)
        assert 1 < num_covered == done["request_counts"]["completed"] < 12
        assert (num_covered + 1) * cost + 90 * PRICES.completion_nanos > 700, "all that it covers"
        errors = await lines_of(client, done["error_file_id"])
        codes = {each["response"]["body"]["error"]["code"] for each in errors.values()}
        assert codes == {"insufficient_quota"}


async def test_one_tenant_does_not_hold_all_that_run(tmp_path: Path) -> None:
    kit = batch_kit(tmp_path)
    kit.dispatcher.script = silent
    async with client_of(kit) as client:
        first = [await begun(client, [line("a")]) for _ in range(4)]
        await kit.begun()
        speak_back(kit)
        other = await begun(client, [line("b")], OTHER_KEY)
        assert (await ended(client, other["id"], OTHER_KEY))["status"] == "completed"
        running = kit.edge.batches._runner._running.values()
        assert [run.batch.tenant_id for run in running].count("ten_1") == 1
        kit.speak("The game")(kit.dispatcher.requests[0])
        for batch in first:
            await ended(client, batch["id"])


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_key_that_is_not_read_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    kit = batch_kit(tmp_path, batch_lines=1, max_batches_running=int(has_begun))
    kit.dispatcher.script = silent
    engine = make_engine(kit.edge.services.settings.registry_url)
    with writing(engine, "test") as session:
        owner = tenants.create_tenant(session, "acme", now_at=1.0).id
        own_id = api_keys.create_key(session, owner, "key", now_at=1.0)[0].id
    engine.dispose()
    mine = replace(file_keys()[0], id=own_id, tenant_id=owner)
    kit.use_keys(mine)
    runner = kit.edge.batches._runner
    async with client_of(kit) as client:
        batch = await begun(client, [line("a"), line("b")])
        first = await kit.begun() if has_begun else None
        kit.use_keys()
        speak_back(kit)
        if first is not None:
            kit.speak("The game")(first)
        runner._max_running, unread = 1, asyncio.Event()
        monkeypatch.setattr(batch_run.log, "warning", lambda *_: unread.set())
        async with asyncio.timeout(5):
            await unread.wait()
        kit.use_keys(mine)
        done = await ended(client, batch["id"])
        assert (done["status"], done["request_counts"]["completed"]) == ("completed", 2)


async def test_zero_retention_cancels_a_batch(tmp_path: Path) -> None:
    kit = batch_kit(tmp_path, batch_lines=1)
    kit.dispatcher.script = silent
    async with client_of(kit) as client:
        batch = await begun(client, [line(f"id-{n}") for n in range(3)])
        running = await kit.begun()
        mine, *others = file_keys()
        kit.use_keys(replace(mine, response_retention_days=0), *others)
        kit.speak("The game")(running)
        await until(lambda: not kit.edge.batches._runner._running)
        kit.use_keys(mine, *others)
        done = await ended(client, batch["id"])
        assert (done["status"], done["request_counts"]["completed"]) == ("cancelled", 1)
