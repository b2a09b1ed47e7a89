"""Rows to what clients see: probabilities, shorter vectors, and turns for others between."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gateway.answer.encode_answer import answer, probabilities, shortened
from gateway.policy.cache_rule import CachePlan
from gateway.prepare.encode_prepare import EncodePrepared
from gateway.prepare.encode_wire import EncodeAsk
from gateway.types import HostedModel
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
