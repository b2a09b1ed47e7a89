"""How requests to encoders end: pieces in their order, one posting or none, nothing held after."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.protocol import FinishReason
from gateway.errors import MODEL_FAILED, QUEUE_FULL, UNAVAILABLE, ApiError
from registry.quotas import Limits
from tests.gateway.edge_kit import Client, Kit, Running, client_of, key_record
from tests.gateway.encoder_kit import answering, make_encoder_kit, rows_of

# Inputs of one to five tokens; pieces of eight tokens at most.
INPUTS = [[5 + n] * (1 + n % 5) for n in range(12)]
SPANS = [[1, 2, 3], [4], [5, 1, 2], [3, 4], [5, 1, 2]]


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return make_encoder_kit(tmp_path, encode_piece_tokens=8)


@pytest.fixture
async def client(kit: Kit) -> AsyncIterator[Client]:
    async with client_of(kit) as client:
        yield client


async def embed(client: Client, inputs: Any = INPUTS) -> tuple[int, dict[str, Any]]:
    async with client.post("/v1/embeddings", {"model": "embed", "input": inputs}) as answer:
        return answer.status, await answer.json()


async def settled(kit: Kit) -> None:
    """Wait until the only request has ended in the ledger."""
    async with asyncio.timeout(5):
        while not kit.ledger.posted and not kit.ledger.voided:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    kit.check_closed()


def silent(running: Running) -> None:
    """A worker that says nothing until the test does."""
    del running


async def waiting(kit: Kit, num: int) -> list[Running]:
    """Wait until so many pieces have been queued."""
    async with asyncio.timeout(5):
        while len(kit.dispatcher.requests) < num:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return kit.dispatcher.requests


async def test_pieces_are_whole_inputs_and_come_back_in_order(kit: Kit, client: Client) -> None:
    status, body = await embed(client)
    assert status == 200
    pieces = [running.request for running in kit.dispatcher.requests]
    assert [piece.encode.lengths for piece in pieces if piece.encode] == SPANS
    assert [piece.continues for piece in pieces] == [False, True, True, True, True]
    assert [piece.request_id for piece in pieces] == [f"{body['id']}#{n}" for n in range(5)]
    given = np.array([item["embedding"] for item in body["data"]], dtype=np.float32)
    np.testing.assert_array_equal(given, np.concatenate([rows_of(piece) for piece in pieces]))
    posting = kit.ledger.only
    assert posting.prompt_tokens == sum(map(len, INPUTS)) == body["usage"]["prompt_tokens"]
    assert (posting.cost_nanos, posting.service_s) == (3 * posting.prompt_tokens, 5 * 0.25)
    assert [record.request_id for record in kit.ledger.opened] == [posting.request_id]
    kit.check_closed()


async def test_few_pieces_are_queued_at_a_time(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = silent
    task = asyncio.create_task(embed(client))
    for number in range(5):
        running = await waiting(kit, min(5, number + 2))
        await asyncio.sleep(0.01)
        assert len(running) == min(5, number + 2)
        answering(running[number])
    assert (await task)[0] == 200


async def test_an_input_longer_than_a_piece_goes_alone(kit: Kit, client: Client) -> None:
    assert (await embed(client, [[5], [6] * 12, [7]]))[0] == 200
    pieces = [running.request.encode for running in kit.dispatcher.requests]
    assert [piece.lengths for piece in pieces if piece] == [[1], [12], [1]]


async def test_the_second_piece_may_be_done_first(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = silent
    task = asyncio.create_task(embed(client, [[5] * 8, [6] * 7]))
    running = await waiting(kit, 2)
    answering(running[1])
    await asyncio.sleep(0)
    answering(running[0])
    _, body = await task
    rows = np.concatenate([rows_of(piece.request) for piece in running])
    assert [item["embedding"] for item in body["data"]] == rows.tolist()


BAD_ROWS = [
    np.array([[1, 2, 3, np.nan]], dtype=np.float32),
    np.array([[1, np.inf, 3, 4]], dtype=np.float32),
    np.array([[1, 2, 3]], dtype=np.float32),
    np.array([[1, 2, 3, 4]] * 2, dtype=np.float32),
    b"",
    b"odd",
]


@pytest.mark.parametrize("rows", BAD_ROWS)
async def test_rows_that_are_no_answer(kit: Kit, client: Client, rows: Any) -> None:
    kit.dispatcher.script = lambda running: running.answer(rows)
    status, body = await embed(client, [5, 6])
    assert (status, body["error"]["code"]) == (500, "server_error")
    await settled(kit)
    assert not kit.ledger.posted


ENDS: list[tuple[FinishReason, int, str]] = [
    ("error", 500, "server_error"),
    ("timeout", 504, "deadline_exceeded"),
    ("abort", 503, "service_unavailable"),
]


@pytest.mark.parametrize("number", [0, 1, 4])
@pytest.mark.parametrize(("reason", "status", "code"), ENDS)
async def test_a_piece_that_fails_fails_all_at_no_cost(
    kit: Kit, client: Client, number: int, reason: FinishReason, status: int, code: str
) -> None:
    kit.use_keys(key_record(limits=Limits(requests_per_minute=1, tokens_per_minute=100)))

    def script(running: Running) -> None:
        if len(kit.dispatcher.requests) > number:
            running.end(reason, error="boom")
        else:
            answering(running)

    kit.dispatcher.script = script
    for _ in range(2):  # limits were given back
        kit.dispatcher.requests.clear()
        got, body = await embed(client)
        assert (got, body["error"]["code"]) == (status, code)
        await asyncio.sleep(0.01)
    await settled(kit)
    assert (len(kit.ledger.voided), kit.ledger.posted) == (2, [])


@pytest.mark.parametrize("kind", [QUEUE_FULL, UNAVAILABLE, MODEL_FAILED])
async def test_a_first_piece_that_is_refused_leaves_nothing(
    kit: Kit, client: Client, kind: Any
) -> None:
    kit.dispatcher.refusal = ApiError(kind, "no", retry_after_s=2.0)
    status, body = await embed(client)
    assert (status, body["error"]["code"]) == (kind.status, kind.code)
    assert not kit.ledger.opened
    kit.check_closed()


async def test_a_later_piece_that_is_refused_ends_the_others(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = silent
    task = asyncio.create_task(embed(client))
    running = await waiting(kit, 2)
    kit.dispatcher.refusal = ApiError(UNAVAILABLE, "replaced")
    answering(running[0])
    status, body = await task
    assert (status, body["error"]["message"]) == (503, "replaced")
    await settled(kit)
    assert running[1].aborted


async def test_workers_lost_too_often_are_a_clean_503(kit: Kit, client: Client) -> None:
    error = ApiError(UNAVAILABLE, "2 workers ended", retry_after_s=5.0)
    kit.dispatcher.script = lambda running: running.fail(error)
    async with client.post("/v1/embeddings", {"model": "embed", "input": "the"}) as answer:
        assert (answer.status, answer.headers["retry-after"]) == (503, "5")
    await settled(kit)
    assert not kit.ledger.posted


async def test_a_client_that_leaves_stops_the_workers(kit: Kit, client: Client) -> None:
    kit.use_keys(key_record(limits=Limits(requests_per_minute=1, tokens_per_minute=100)))
    kit.dispatcher.script = silent
    task = asyncio.create_task(embed(client))
    running = await waiting(kit, 2)
    answering(running[0])
    await waiting(kit, 3)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await settled(kit)
    assert [piece.aborted for piece in running] == [False, True, True]
    assert not kit.ledger.posted
    # Its tokens were given back; that it was a request stays.
    status, body = await embed(client)
    assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_a_client_that_leaves_once_all_is_there_pays(kit: Kit, client: Client) -> None:
    kit.ledger.delay_s = 0.1  # the open record takes its time
    task = asyncio.create_task(embed(client, [5, 6]))
    await waiting(kit, 1)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await settled(kit)
    assert kit.ledger.only.outcome == "finished"


async def test_a_ledger_that_is_behind_refuses(kit: Kit, client: Client) -> None:
    kit.ledger.open_error = ApiError(UNAVAILABLE, "the ledger is behind")
    status, body = await embed(client)
    assert (status, body["error"]["message"]) == (503, "the ledger is behind")
    await settled(kit)
    assert not kit.ledger.posted


async def test_all_pieces_together_have_the_time_of_one_request(tmp_path: Path) -> None:
    kit = make_encoder_kit(tmp_path, encode_piece_tokens=8, request_timeout_s=0.05)
    kit.dispatcher.script = silent
    async with client_of(kit) as client:
        status, body = await embed(client)
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        await settled(kit)
    assert all(running.aborted for running in kit.dispatcher.requests)


async def test_answers_in_the_making_are_bounded_by_tenant(tmp_path: Path) -> None:
    kit = make_encoder_kit(tmp_path, encode_piece_tokens=8, max_encode_answer_bytes=200)
    kit.use_keys(key_record(), key_record("another-key-of-another", "key_2", tenant_id="ten_2"))
    kit.dispatcher.script = silent
    async with client_of(kit) as client:
        first = asyncio.create_task(embed(client, [[5]] * 20))  # 320 bytes: one always may
        await waiting(kit, 1)
        status, body = await embed(client, [5])
        assert (status, body["error"]["code"]) == (429, "queue_full")
        kit.dispatcher.script = answering
        request = {"model": "embed", "input": [5]}
        async with client.post("/v1/embeddings", request, "another-key-of-another") as answer:
            assert answer.status == 200
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        async with asyncio.timeout(5):
            while (await embed(client, [5]))[0] != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_limits_take_what_was_asked(kit: Kit, client: Client) -> None:
    kit.use_keys(key_record(limits=Limits(tokens_per_minute=40)))
    async with client.post("/v1/embeddings", {"model": "embed", "input": INPUTS}) as answer:
        assert answer.status == 200
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(40 - sum(map(len, INPUTS)))
    status, body = await embed(client)
    assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
    assert len(kit.ledger.posted) == 1
