"""/v1/embeddings, /v1/classify and /v1/rerank over a scripted worker: answers and refusals."""

import base64
import math
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from registry.accounts.quotas import Limits
from tests.gateway.edge_kit import KEY, Client, Kit, client_of, key_record
from tests.gateway.encoder_kit import MAX_CONTEXT, WORDS, make_encoder_kit, rows_of

LONG = " ".join([*WORDS[:8], *WORDS[:8]])
WORDS_15 = " ".join(WORDS)


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return make_encoder_kit(tmp_path, max_encode_inputs=8, max_encode_tokens=100)


async def ask(client: Client, route: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with client.post(f"/v1/{route}", body) as answer:
        return answer.status, await answer.json()


def told(kit: Kit, number: int = -1) -> np.ndarray[Any, Any]:
    """The rows that the worker gave."""
    return rows_of(kit.dispatcher.requests[number].request)


async def test_embeddings_by_the_sdk_in_both_formats(kit: Kit, client: Client) -> None:
    texts = ["The cat", "a dog ran", "the moon"]
    async with openai.AsyncOpenAI(base_url=client.base + "/v1", api_key=KEY) as sdk:
        packed = await sdk.embeddings.create(model="embed", input=texts)  # asks for base64
        plain = await sdk.embeddings.create(model="embed", input=texts, encoding_format="float")
    assert [item.index for item in packed.data] == [0, 1, 2]
    for answer in (packed, plain):
        given = np.array([item.embedding for item in answer.data], dtype=np.float32)
        np.testing.assert_array_equal(given, told(kit))
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == 4 + 5 + 4
        assert (answer.object, answer.model) == ("list", "embed")
    kit.check_closed()


async def test_an_encoder_has_no_series_of_times_between_tokens(kit: Kit, client: Client) -> None:
    await ask(client, "embeddings", model="embed", input="the cat")
    async with client.session.get(client.base + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    of_model = [line for line in lines if 'model_name="embed"' in line]
    assert of_model
    assert not [line for line in of_model if "token_latency" in line or "inter_token" in line]


async def test_an_embedding_as_json(kit: Kit, client: Client) -> None:
    status, body = await ask(client, "embeddings", model="embed", input="the cat")
    assert status == 200
    assert body["data"][0]["object"] == "embedding"
    assert body["data"][0]["embedding"] == told(kit)[0].tolist()
    posting = kit.ledger.only
    assert body["id"] == posting.request_id
    assert (posting.kind, posting.outcome, posting.model) == ("embedding", "finished", "embed")
    assert (posting.prompt_tokens, posting.completion_tokens, posting.cost_nanos) == (4, 0, 12)
    assert (posting.service_s, posting.queue_s, posting.ttft_s) == (0.25, 0.125, 0.0)


async def test_base64_is_little_endian_float32(kit: Kit, client: Client) -> None:
    _, body = await ask(
        client, "embeddings", model="embed", input="the cat", encoding_format="base64"
    )
    raw = base64.b64decode(body["data"][0]["embedding"])
    assert raw == told(kit).astype("<f4").tobytes()


async def test_token_ids_are_taken_as_they_are(kit: Kit, client: Client) -> None:
    for given, lengths in (([5, 6, 7], [3]), ([[5], [6, 7]], [1, 2])):
        status, body = await ask(client, "embeddings", model="embed", input=given)
        assert status == 200
        encode = kit.dispatcher.requests[-1].request.encode
        assert encode is not None
        assert (encode.lengths, body["usage"]["prompt_tokens"]) == (lengths, 3)
        assert kit.dispatcher.requests[-1].request.prompt_token_ids == [5, 6, 7]


async def test_dimensions_cut_and_make_unit_vectors(kit: Kit, client: Client) -> None:
    _, body = await ask(client, "embeddings", model="embed", input="the cat", dimensions=2)
    row = told(kit)[0, :2]
    given = np.array(body["data"][0]["embedding"])
    np.testing.assert_allclose(given, row / np.linalg.norm(row), rtol=1e-6)
    _, whole = await ask(client, "embeddings", model="embed", input="the cat", dimensions=4)
    assert whole["data"][0]["embedding"] == told(kit)[0].tolist()
    status, body = await ask(client, "embeddings", model="embed", input="the cat", dimensions=5)
    assert (status, body["error"]["param"]) == (400, "dimensions")


async def test_classes_that_exclude_one_another_sum_to_one(kit: Kit, client: Client) -> None:
    status, body = await ask(client, "classify", model="classes", input=["the cat", "a dog ran"])
    assert status == 200
    for item, logits in zip(body["data"], told(kit), strict=True):
        powers = np.exp(logits.astype(float))
        np.testing.assert_allclose(item["probs"], powers / powers.sum(), rtol=1e-6)
        assert item["label"] == ("no", "maybe", "yes")[int(logits.argmax())]
        assert item["num_classes"] == 3
    assert [item["index"] for item in body["data"]] == [0, 1]
    assert kit.ledger.only.kind == "classify"


async def test_classes_that_do_not_are_each_for_itself(kit: Kit, client: Client) -> None:
    _, body = await ask(client, "classify", model="tags", input="the cat")
    wanted = [1 / (1 + math.exp(-value)) for value in told(kit)[0].tolist()]
    assert body["data"][0]["probs"] == pytest.approx(wanted, rel=1e-6)
    _, body = await ask(client, "classify", model="cross", input="the cat")
    [only] = body["data"][0]["probs"]
    assert only == pytest.approx(1 / (1 + math.exp(-told(kit)[0, 0])), rel=1e-6)


async def test_rerank_sorts_by_relevance(kit: Kit, client: Client) -> None:
    documents: list[Any] = ["the cat", {"text": "red moon red moon"}, "", "a dog"]
    status, body = await ask(client, "rerank", model="cross", query="cat", documents=documents)
    assert status == 200
    logits = told(kit)[:, 0].tolist()
    order = sorted(range(4), key=lambda index: -logits[index])
    assert [result["index"] for result in body["results"]] == order
    texts = ["the cat", "red moon red moon", "", "a dog"]
    assert [result["document"]["text"] for result in body["results"]] == [texts[i] for i in order]
    for result in body["results"]:
        sure = 1 / (1 + math.exp(-logits[result["index"]]))
        assert result["relevance_score"] == pytest.approx(sure, rel=1e-6)
    encode = kit.dispatcher.requests[-1].request.encode
    assert encode is not None
    assert encode.lengths == [6, 8, 4, 6]
    assert encode.type_ids[:6] == [0, 0, 0, 1, 1, 1]
    assert kit.ledger.only.kind == "rerank"
    short: dict[str, Any] = {"model": "cross", "query": "cat", "documents": documents}
    _, body = await ask(client, "rerank", **short, top_n=2, return_documents=False)
    assert [set(result) for result in body["results"]] == [{"index", "relevance_score"}] * 2


async def test_far_out_scores_keep_their_order(kit: Kit, client: Client) -> None:
    logits = np.array([[90.0], [-200.0], [100.0], [-100.0]], dtype=np.float32)
    kit.dispatcher.script = lambda running: running.answer(logits)
    _, body = await ask(client, "rerank", model="cross", query="cat", documents=["a"] * 4)
    assert [result["index"] for result in body["results"]] == [2, 0, 3, 1]
    scores = [result["relevance_score"] for result in body["results"]]
    assert scores[0] == 1.0
    assert 0 <= scores[3] <= scores[2] < 1e-40


async def test_documents_are_cut_and_queries_are_not(kit: Kit, client: Client) -> None:
    status, _ = await ask(client, "rerank", model="cross", query="cat", documents=[LONG, "a"])
    assert status == 200
    encode = kit.dispatcher.requests[-1].request.encode
    assert encode is not None
    assert encode.lengths == [MAX_CONTEXT, 5]
    status, body = await ask(client, "rerank", model="cross", query=LONG, documents=["a"])
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert body["error"]["param"] == "query"


async def test_inputs_over_the_context_are_refused_or_cut(kit: Kit, client: Client) -> None:
    for given in (["a", LONG], [[5], [5] * 17]):
        status, body = await ask(client, "embeddings", model="embed", input=given)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert "input[1]" in body["error"]["message"]
        for cut, length in ((-1, MAX_CONTEXT), (100, MAX_CONTEXT), (6, 6)):
            status, _ = await ask(
                client, "embeddings", model="embed", input=given, truncate_prompt_tokens=cut
            )
            assert status == 200
            encode = kit.dispatcher.requests[-1].request.encode
            assert encode is not None
            assert encode.lengths[1] == length
    status, body = await ask(
        client, "embeddings", model="embed", input="a", truncate_prompt_tokens=2
    )
    assert (status, body["error"]["param"]) == (400, "truncate_prompt_tokens")


@pytest.mark.parametrize(
    ("route", "body", "code", "param"),
    [
        ("embeddings", {"model": "tiny", "input": "a"}, "wrong_task", "model"),
        ("embeddings", {"model": "cross", "input": "a"}, "wrong_task", "model"),
        ("classify", {"model": "embed", "input": "a"}, "wrong_task", "model"),
        ("rerank", {"model": "classes", "query": "a", "documents": ["a"]}, "wrong_task", "model"),
        ("rerank", {"model": "tiny", "query": "a", "documents": ["a"]}, "wrong_task", "model"),
        ("completions", {"model": "embed", "prompt": "a"}, "wrong_task", "model"),
        (
            "chat/completions",
            {"model": "cross", "messages": [{"role": "user", "content": "a"}]},
            "wrong_task",
            "model",
        ),
        ("embeddings", {"model": "embed", "input": [3, 28]}, "invalid_request", "input"),
        ("embeddings", {"model": "embed", "input": [[3], [-1]]}, "invalid_request", "input"),
        ("embeddings", {"model": "embed", "input": [10**30]}, "invalid_request", "input"),
        ("embeddings", {"model": "embed", "input": ["a"] * 9}, "invalid_request", "input"),
        ("embeddings", {"model": "embed", "input": [[5] * 15] * 7}, "invalid_request", "input"),
        ("embeddings", {"model": "embed", "input": [WORDS_15] * 8}, "invalid_request", "input"),
        ("embeddings", {"model": "embed", "input": []}, "invalid_request", "input"),
    ],
)
async def test_refusals_come_before_limits_are_touched(
    kit: Kit, client: Client, route: str, body: dict[str, Any], code: str, param: str
) -> None:
    kit.use_keys(key_record(limits=Limits(requests_per_minute=1)))
    for _ in range(2):
        status, answer = await ask(client, route, **body)
        assert (status, answer["error"]["code"]) == (400, code), answer
        assert answer["error"]["param"] == param
    assert not kit.dispatcher.requests
    assert not kit.ledger.opened
    kit.check_closed()


async def test_unknown_models_and_bad_keys(kit: Kit, client: Client) -> None:
    status, body = await ask(client, "embeddings", model="nobody", input="a")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    async with client.post("/v1/rerank", {}, key="wrong") as answer:
        assert answer.status == 401


async def test_the_cache_is_passed_by(kit: Kit, client: Client) -> None:
    body = {"model": "embed", "input": "the cat"}
    for _ in range(2):
        async with client.post("/v1/embeddings", body, x_polyhost_cache_mode="exact") as answer:
            assert answer.headers["x-polyhost-cache"] == "bypass"
    assert len(kit.dispatcher.requests) == 2


async def test_models_tell_their_task(kit: Kit, client: Client) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    async with client.session.get(client.base + "/v1/models", headers=headers) as answer:
        tasks = {model["id"]: model["task"] for model in (await answer.json())["data"]}
    assert tasks["tiny"] == "generate"
    assert (tasks["embed"], tasks["cross"]) == ("embed", "classify")


async def test_large_answers_are_whole(tmp_path: Path) -> None:
    kit = make_encoder_kit(tmp_path, max_encode_inputs=2048)
    async with client_of(kit) as client:
        given = [[5 + number % 20, 6] for number in range(2048)]
        status, body = await ask(client, "embeddings", model="embed", input=given)
    assert status == 200
    assert [item["index"] for item in body["data"]] == list(range(2048))
    rows = np.concatenate([rows_of(running.request) for running in kit.dispatcher.requests])
    given_back = np.array([item["embedding"] for item in body["data"]], dtype=np.float32)
    np.testing.assert_array_equal(given_back, rows)


async def test_a_tokenizer_that_cannot_be_read(kit: Kit, client: Client, tmp_path: Path) -> None:
    (tmp_path / "encoder" / "tokenizer.json").unlink()
    status, body = await ask(client, "embeddings", model="embed", input="a")
    assert (status, body["error"]["code"]) == (503, "model_failed")


async def test_metrics_count_them(kit: Kit, client: Client) -> None:
    await ask(client, "embeddings", model="embed", input="the cat")

    def value(name: str, **labels: str) -> float | None:
        found: float | None = kit.edge.services.metrics_registry.get_sample_value(
            f"polyhost_{name}", {"model_name": "embed", **labels}
        )
        return found

    assert value("requests_ended_total", outcome="finished") == 1
    assert value("request_success_total", finished_reason="stop") == 1
    assert value("prompt_tokens_total") == 4
    assert value("e2e_request_latency_seconds_count") == 1
    assert not value("time_to_first_token_seconds_count")


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_rerank_by_all_its_names(kit: Kit, client: Client, path: str) -> None:
    body = {"model": "cross", "query": "cat", "documents": ["a", "the moon"]}
    async with client.post(path, body) as answer:
        assert answer.status == 200
        results = (await answer.json())["results"]
    assert sorted(result["index"] for result in results) == [0, 1]


@pytest.mark.parametrize(
    ("fields", "lengths"),
    [
        ({}, [MAX_CONTEXT, 5]),
        ({"truncate_prompt_tokens": -1}, [MAX_CONTEXT, 5]),
        ({"truncate_prompt_tokens": 6}, [6, 5]),
        ({"max_tokens_per_doc": 3}, [7, 5]),
        ({"max_tokens_per_doc": 99, "truncate_prompt_tokens": 8}, [8, 5]),
    ],
)
async def test_documents_are_cut_where_the_caller_says(
    kit: Kit, client: Client, fields: dict[str, Any], lengths: list[int]
) -> None:
    documents = [WORDS_15, "a"]
    status, _ = await ask(
        client, "rerank", model="cross", query="cat", documents=documents, **fields
    )
    assert status == 200
    encode = kit.dispatcher.requests[-1].request.encode
    assert encode is not None
    assert encode.lengths == lengths


async def test_a_cut_that_leaves_no_room_is_refused(kit: Kit, client: Client) -> None:
    body = {"model": "cross", "query": "cat", "documents": ["a"]}
    status, answer = await ask(client, "rerank", **body, truncate_prompt_tokens=3)
    assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")
    status, answer = await ask(client, "rerank", **body, truncate_prompt_tokens=4)
    assert (status, answer["error"]["param"]) == (400, "query")


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
async def test_scores_of_one_text_with_several(
    kit: Kit, client: Client, path: str, names: tuple[str, str]
) -> None:
    documents = ["the dog", "a cat", ""]
    async with client.post(
        path, {"model": "cross", names[0]: "cat", names[1]: documents}
    ) as answer:
        assert answer.status == 200
        body = await answer.json()
    expected = [1 / (1 + math.exp(-logit)) for logit in told(kit)[:, 0]]
    assert [item["index"] for item in body["data"]] == [0, 1, 2]
    assert [item["object"] for item in body["data"]] == ["score"] * 3
    assert [item["score"] for item in body["data"]] == pytest.approx(expected)
    assert (body["object"], kit.ledger.only.kind) == ("list", "score")


async def test_scores_of_pairs_are_those_of_each_by_itself(kit: Kit, client: Client) -> None:
    firsts, seconds = ["cat", "the old dog", "moon"], ["a", "ran far", "red"]
    _, body = await ask(client, "score", model="cross", text_1=firsts, text_2=seconds)
    together = [item["score"] for item in body["data"]]
    sent = kit.dispatcher.requests[-1].request
    alone = []
    for first, second in zip(firsts, seconds, strict=True):
        _, one = await ask(client, "score", model="cross", text_1=first, text_2=[second])
        alone.append(one["data"][0]["score"])
    assert together == pytest.approx(alone)
    ids = [i for r in kit.dispatcher.requests[-3:] for i in r.request.prompt_token_ids]
    assert sent.prompt_token_ids == ids


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text_2": "a"}, "text_1"),
        ({"text_1": "a"}, "text_2"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ({"text_1": "a", "queries": "b", "text_2": "c"}, "queries"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": "a", "text_2": ["x"] * 9}, "text_2"),
        ({"text_1": 5, "text_2": "c"}, "text_1"),
        ({"text_1": LONG, "text_2": "a"}, "text_1"),
        ({"text_1": "a", "text_2": "a", "model": "classes"}, "model"),
    ],
)
async def test_scores_that_cannot_be(
    kit: Kit, client: Client, fields: dict[str, Any], param: str
) -> None:
    status, body = await ask(client, "score", **{"model": "cross", **fields})
    assert (status, body["error"]["param"]) == (400, param)
    assert not kit.dispatcher.requests
