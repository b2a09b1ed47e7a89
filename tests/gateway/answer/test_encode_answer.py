"""Answers of encoders: pieces in their order, one posting or none, and the arithmetic on rows."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.protocol import FinishReason
from gateway.answer.encode_answer import answer, probabilities, shortened
from gateway.api.encode_wire import EncodeAsk
from gateway.cache.policy.cache_rule import CachePlan
from gateway.errors import MODEL_FAILED, QUEUE_FULL, UNAVAILABLE, ApiError
from gateway.prepare.encode_prepare import EncodePrepared
from gateway.types import HostedModel
from registry.accounts.quotas import Limits
from tests.gateway.edge_kit import Client, Kit, Running, client_of, key_record, silent, until
from tests.gateway.encoder_kit import answering, make_encoder_kit, rows_of
from tests.gateway.prepare.test_encode_prepare import request_of

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(hnp.arrays(np.float32, (3, 4), elements=FINITE), st.booleans())
def test_probabilities_of_any_logits(logits: np.ndarray, multi_label: bool) -> None:
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        found = probabilities(logits, multi_label)
    assert ((found >= 0) & (found <= 1)).all()
    if not multi_label:
        np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-12)
        # The likeliest class stays the likeliest; tiny differences of logits may round away.
        rows = np.arange(len(logits))
        assert (found[rows, logits.argmax(axis=1)] == found.max(axis=1)).all()


def test_one_class_is_a_yes_or_no() -> None:
    logits = np.array([[0.0], [2.0], [-2.0], [1000.0], [-1000.0]], dtype=np.float32)
    found = probabilities(logits, False)[:, 0].tolist()
    assert found == pytest.approx([0.5, 0.8807970779778823, 0.11920292202211755, 1.0, 0.0])


def test_shorter_vectors_have_length_one_and_nulls_stay() -> None:
    rows = np.array([[3, 4, 12], [0, 0, 1], [-6, 8, 0]], dtype=np.float32)
    assert shortened(rows, 2).tolist() == [
        pytest.approx([0.6, 0.8]),
        [0, 0],
        pytest.approx([-0.6, 0.8]),
    ]
    assert shortened(rows, None) is rows
    assert shortened(rows, 3) is rows


async def test_others_get_their_turn_while_a_large_answer_is_written() -> None:
    model = HostedModel("m", "r", "p", 8, 100, 0, task="embed", dim=1024)
    request = request_of([1] * 128, types=False)
    asked = EncodeAsk("embedding", "m", ([1],) * 128)
    rows = np.ones((128, model.dim), dtype=np.float32)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    parts = await answer(EncodePrepared(asked, request, model.dim, CachePlan()), rows)
    task.cancel()
    assert turns >= 128 * 1024 // 8_192
    assert [len(item["embedding"]) for item in json.loads(b"".join(parts))["data"]] == [1024] * 128


# Inputs of one to five tokens; pieces of eight tokens at most.
INPUTS = [[5 + n] * (1 + n % 5) for n in range(12)]
SPANS = [[1, 2, 3], [4], [5, 1, 2], [3, 4], [5, 1, 2]]


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return make_encoder_kit(tmp_path, encode_piece_tokens=8)


async def embed(client: Client, inputs: Any = INPUTS) -> tuple[int, dict[str, Any]]:
    async with client.post("/v1/embeddings", {"model": "embed", "input": inputs}) as answer:
        return answer.status, await answer.json()


async def waiting(kit: Kit, num: int) -> list[Running]:
    """Wait until so many pieces have been queued."""
    await until(lambda: len(kit.dispatcher.requests) >= num)
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
    await kit.settled()
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
    """Limits are given back; a request whose time was up counts, but for its tokens."""
    rpm = 2 if reason == "timeout" else 1
    kit.use_keys(key_record(limits=Limits(requests_per_minute=rpm, tokens_per_minute=100)))

    def script(running: Running) -> None:
        if len(kit.dispatcher.requests) > number:
            running.end(reason, error="boom")
        else:
            answering(running)

    kit.dispatcher.script = script
    for _ in range(2):
        kit.dispatcher.requests.clear()
        got, body = await embed(client)
        assert (got, body["error"]["code"]) == (status, code)
        await asyncio.sleep(0.01)
    await kit.settled()
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
    await kit.settled()
    assert running[1].aborted


async def test_workers_lost_too_often_are_a_clean_503(kit: Kit, client: Client) -> None:
    error = ApiError(UNAVAILABLE, "2 workers ended", retry_after_s=5.0)
    kit.dispatcher.script = lambda running: running.fail(error)
    async with client.post("/v1/embeddings", {"model": "embed", "input": "the"}) as answer:
        assert (answer.status, answer.headers["retry-after"]) == (503, "5")
    await kit.settled()
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
    await kit.settled()
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
    await kit.settled()
    assert kit.ledger.only.outcome == "finished"


async def test_a_ledger_that_is_behind_refuses(kit: Kit, client: Client) -> None:
    kit.ledger.open_error = ApiError(UNAVAILABLE, "the ledger is behind")
    status, body = await embed(client)
    assert (status, body["error"]["message"]) == (503, "the ledger is behind")
    await kit.settled()
    assert not kit.ledger.posted


async def test_all_pieces_together_have_the_time_of_one_request(tmp_path: Path) -> None:
    kit = make_encoder_kit(tmp_path, encode_piece_tokens=8, request_timeout_s=0.05)
    kit.dispatcher.script = silent
    async with client_of(kit) as client:
        status, body = await embed(client)
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        await kit.settled()
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
