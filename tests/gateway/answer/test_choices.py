"""Requests for several answers, for scores and for echoes, from HTTP to the ledger and back."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.protocol import FinishReason
from gateway.errors import QUEUE_FULL, UNAVAILABLE, ApiError, WorkerLost
from registry.accounts.quotas import Limits
from tests.gateway.edge_kit import KEY, Client, Kit, Running, client_of, key_record, make_kit

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
TEXTS = ("The game is afoot!", "naïve café 😀", "x")


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return make_kit(tmp_path / "tiny", max_choices=4)


def index_of(running: Running) -> int:
    """Which choice it is."""
    return int(running.request.request_id.partition("#")[2] or 0)


def each_its_own(kit: Kit) -> None:
    """Choice i says TEXTS[i]; they go on side by side, a token at a time."""

    def script(running: Running) -> None:
        kit.speak_slowly(TEXTS[index_of(running)], 0.001)(running)

    kit.dispatcher.script = script


async def test_choices_are_submits_of_their_own_and_one_posting(kit: Kit, client: Client) -> None:
    each_its_own(kit)
    status, body = await client.chat(n=3, seed=41, max_tokens=30)
    assert status == 200
    texts = [(c["index"], c["message"]["content"], c["finish_reason"]) for c in body["choices"]]
    assert texts == [(i, text, "stop") for i, text in enumerate(TEXTS)]
    asked = [running.request for running in kit.dispatcher.requests]
    assert [r.request_id for r in asked] == [f"{body['id']}#{i}" for i in range(3)]
    assert [r.sampling.seed for r in asked] == [41, 42, 43]
    assert len({tuple(r.prompt_token_ids) for r in asked}) == 1
    posting = kit.ledger.only
    assert kit.ledger.opened[0].request_id == posting.request_id == body["id"]
    num_made = sum(len(kit.ids(text)) + 1 for text in TEXTS)
    assert posting.completion_tokens == body["usage"]["completion_tokens"] == num_made
    assert posting.prompt_tokens == len(asked[0].prompt_token_ids)
    assert posting.service_s == 3 * 0.25


async def test_choices_are_streamed_side_by_side(kit: Kit, client: Client) -> None:
    each_its_own(kit)
    options = {"n": 3, "stream_options": {"include_usage": True}}
    events = await client.events(CHAT, {**ASK, **options})
    chunks = [event["choices"][0] for event in events[:-2]]
    for index, text in enumerate(TEXTS):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in mine) == text
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
    assert events[-2]["usage"]["completion_tokens"] == kit.ledger.only.completion_tokens
    order = [chunk["index"] for chunk in chunks]
    assert len([key for key, _ in itertools.groupby(order)]) > 6, "they are not interleaved"


@pytest.mark.parametrize("stream", [True, False])
async def test_one_choice_that_fails_fails_the_request(
    kit: Kit, client: Client, stream: bool
) -> None:
    def script(running: Running) -> None:
        running.say(kit.ids("The"))
        if index_of(running) == 1:
            asyncio.get_running_loop().call_later(0.05, running.fail, WorkerLost("gone"))

    kit.dispatcher.script = script
    if stream:
        events = await client.events(CHAT, {**ASK, "n": 3})
        assert events[-1]["error"]["code"] == "service_unavailable"
    else:
        assert (await client.chat(n=3))[0] == 503
    assert [running.aborted for running in kit.dispatcher.requests] == [True, False, True]
    await kit.settled()
    assert (kit.ledger.only.outcome, kit.ledger.only.cost_nanos) == ("failed", 0)


async def test_one_choice_that_is_out_of_time_fails_the_request(kit: Kit, client: Client) -> None:
    def script(running: Running) -> None:
        running.say(kit.ids("The"))
        if index_of(running) == 1:
            asyncio.get_running_loop().call_later(0.05, running.end, "timeout")

    kit.dispatcher.script = script
    events = await client.events(CHAT, {**ASK, "n": 3})
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert [running.aborted for running in kit.dispatcher.requests] == [True, False, True]
    await kit.settled()
    posting = kit.ledger.only  # what was sent of each is billed
    assert (posting.outcome, posting.completion_tokens) == ("disconnected", 3 * len(kit.ids("The")))


async def test_choices_that_are_out_of_time_before_any_token(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = lambda running: running.end("timeout")
    status, body = await client.chat(n=3)
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
    await kit.settled()
    assert (kit.ledger.posted, len(kit.ledger.voided)) == ([], 1)


async def test_a_choice_that_cannot_be_queued(kit: Kit, client: Client) -> None:
    kit.use_keys(key_record(limits=Limits(max_concurrency=1)))

    def script(running: Running) -> None:
        del running
        kit.dispatcher.refusal = ApiError(QUEUE_FULL, "full", retry_after_s=1)

    kit.dispatcher.script = script
    async with client.post(CHAT, {**ASK, "n": 3}) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (429, "queue_full")
    assert [running.aborted for running in kit.dispatcher.requests] == [True]
    await kit.settled()
    assert (kit.ledger.posted, len(kit.ledger.voided)) == ([], 1)
    kit.dispatcher.refusal = None
    kit.dispatcher.script = kit.speak("x")
    assert (await client.chat())[0] == 200


async def test_a_client_that_leaves_ends_all_choices(kit: Kit) -> None:
    kit.dispatcher.script = lambda running: running.say(kit.ids("The game"))
    async with client_of(kit) as client:
        task = asyncio.create_task(client.chat(n=3))
        while len(kit.dispatcher.requests) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await kit.settled()
    assert all(running.aborted for running in kit.dispatcher.requests)
    num_sent = sum(running.num_sent for running in kit.dispatcher.requests)
    assert (kit.ledger.only.outcome, kit.ledger.only.completion_tokens) == (
        "disconnected",
        num_sent,
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_choices_stop_each_for_itself(kit: Kit, client: Client, stream: bool) -> None:
    reasons: list[FinishReason] = ["length", "stop", "stop"]

    def script(running: Running) -> None:
        running.say(kit.ids(("one", "two END more", "three")[index_of(running)]))
        if index_of(running) != 1:
            running.end(reasons[index_of(running)])

    kit.dispatcher.script = script
    body = {**ASK, "n": 3, "stop": "END"}
    if stream:
        chunks = [e["choices"][0] for e in (await client.events(CHAT, body))[:-1]]
        found = [
            ("".join(c["delta"].get("content", "") for c in chunks if c["index"] == i),
             next(c["finish_reason"] for c in reversed(chunks) if c["index"] == i))
            for i in range(3)
        ]  # fmt: skip
    else:
        _, answer = await client.chat(n=3, stop="END")
        found = [(c["message"]["content"], c["finish_reason"]) for c in answer["choices"]]
    assert found == [("one", "length"), ("two ", "stop"), ("three", "stop")]
    assert kit.dispatcher.requests[1].aborted
    assert kit.ledger.only.outcome == "finished"


async def test_limits_count_every_choice(kit: Kit, client: Client) -> None:
    kit.use_keys(key_record(limits=Limits(tokens_per_minute=100)))
    kit.dispatcher.script = kit.speak("x")
    status, body = await client.chat(n=4, max_tokens=30)
    assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
    assert (await client.chat(n=2, max_tokens=30))[0] == 200


async def test_more_choices_than_the_server_makes(kit: Kit, client: Client) -> None:
    status, body = await client.chat(n=5)
    assert (status, body["error"]["param"]) == (400, "n")
    assert kit.dispatcher.requests == []


async def test_what_is_more_than_a_text_is_not_kept(kit: Kit, client: Client) -> None:
    kit.use_keys(key_record(cache_mode="exact"))
    kit.dispatcher.script = kit.speak("x")
    fields: list[dict[str, Any]] = [{"n": 2}, {"logprobs": True}]
    for more in fields:
        async with client.post(CHAT, {**ASK, "temperature": 0, **more}) as answer:
            assert answer.headers["x-polyhost-cache"] == "bypass"


async def test_scores_in_a_chat(kit: Kit, client: Client) -> None:
    text = "The game is 😀 afoot! END more"
    kit.dispatcher.script = kit.speak(text)
    ask = {**ASK, "logprobs": True, "top_logprobs": 2, "stop": "END"}
    _, body = await client.chat(logprobs=True, top_logprobs=2, stop="END")
    choice = body["choices"][0]
    content = choice["logprobs"]["content"]
    spelled = b"".join(bytes(entry["bytes"]) for entry in content).decode()
    assert choice["message"]["content"] == "The game is 😀 afoot! "
    # The token that the stop string cuts in two is told whole.
    assert spelled.removeprefix(choice["message"]["content"]) in ("", "E", "EN", "END")
    first = kit.ids(text)[0]
    assert content[0]["logprob"] == pytest.approx(-0.01 * first)
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert any(entry["token"] == "\ufffd" for entry in content), "no token is half a character"
    events = await client.events(CHAT, ask)
    streamed = [
        entry
        for event in events[:-1]
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content


async def test_scores_in_a_completion(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak(" the game")
    body: dict[str, Any] = {"model": "tiny", "prompt": "The é", "logprobs": 1, "echo": True}
    async with client.post(COMPLETION, body) as answer:
        choice = (await answer.json())["choices"][0]
    scores = choice["logprobs"]
    assert choice["text"] == "The é the game"
    assert "".join(t for t in scores["tokens"]) == choice["text"]
    places = zip(scores["tokens"], scores["text_offset"], strict=True)
    assert all(choice["text"].startswith(token, at) for token, at in places)
    num_prompt = len(kit.ids("The é"))
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    assert None not in scores["token_logprobs"][1:]
    assert len(scores["tokens"]) == num_prompt + len(kit.ids(" the game"))
    assert kit.dispatcher.requests[0].request.prompt_logprobs == 1
    events = await client.events(COMPLETION, body)
    parts = [event["choices"][0] for event in events[:-1]]
    assert "".join(part["text"] for part in parts) == choice["text"]
    for name, whole in scores.items():
        assert [v for part in parts if part["logprobs"] for v in part["logprobs"][name]] == whole


async def test_a_prompt_scored_and_nothing_generated(kit: Kit, client: Client) -> None:
    def script(running: Running) -> None:
        assert running.request.max_tokens == 1
        running.say([kit.ids("x")[0]])
        running.end("length")

    kit.dispatcher.script = script
    body = {"model": "tiny", "prompt": kit.ids("The game"), "echo": True, "max_tokens": 0}
    for stream in (False, True):
        if stream:
            events = await client.events(COMPLETION, {**body, "logprobs": 0})
            text = "".join(e["choices"][0]["text"] for e in events[:-1])
            reason = events[-2]["choices"][0]["finish_reason"]
        else:
            async with client.post(COMPLETION, {**body, "logprobs": 0}) as answer:
                value = await answer.json()
            choice = value["choices"][0]
            text, reason = choice["text"], choice["finish_reason"]
            assert len(choice["logprobs"]["tokens"]) == len(kit.ids("The game"))
            assert value["usage"]["completion_tokens"] == 0
        assert (text, reason) == ("The game", "length")
        assert kit.ledger.posted[-1].completion_tokens == 0


@pytest.mark.parametrize("error", [ApiError(UNAVAILABLE, "no worker"), WorkerLost("gone")])
async def test_failure_of_all_before_any_token(kit: Kit, client: Client, error: Exception) -> None:
    kit.dispatcher.script = lambda running: running.fail(error)
    assert (await client.chat(n=3))[0] == 503
    await kit.settled()
    assert (kit.ledger.posted, len(kit.ledger.voided)) == ([], 1)


async def test_everything_of_sampling_reaches_the_worker(kit: Kit, client: Client) -> None:
    kit.dispatcher.script = kit.speak("x")
    await client.chat(
        top_k=5, min_p=0.1, frequency_penalty=0.5, presence_penalty=-0.5, repetition_penalty=1.5,
        logit_bias={"7": -100}, min_tokens=2, ignore_eos=True, max_tokens=9, seed=3,
    )  # fmt: skip
    request = kit.dispatcher.requests[0].request
    sampling = request.sampling
    assert (sampling.top_k, sampling.min_p, sampling.min_tokens) == (5, 0.1, 2)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.5, {7: -100.0})
    assert (request.stop_token_ids, request.max_tokens) == ([], 9)


async def test_an_openai_client_reads_it_all(kit: Kit, client: Client) -> None:
    each_its_own(kit)
    async with openai.AsyncOpenAI(api_key=KEY, base_url=f"{client.base}/v1") as sdk:
        chat = await sdk.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], n=2,
            logprobs=True, top_logprobs=1,
        )  # fmt: skip
        assert [choice.message.content for choice in chat.choices] == list(TEXTS[:2])
        assert chat.choices[1].logprobs is not None
        async with sdk.chat.completions.stream(
            model="tiny", messages=[{"role": "user", "content": "x"}], n=2, logprobs=True
        ) as stream:
            final = await stream.get_final_completion()
        assert [choice.message.content for choice in final.choices] == list(TEXTS[:2])
        first = chat.choices[0].logprobs
        again = final.choices[0].logprobs
        assert first is not None
        assert again is not None
        assert [t.token for t in first.content or []] == [t.token for t in again.content or []]
        text = await sdk.completions.create(model="tiny", prompt="x", logprobs=2, echo=True)
        assert text.choices[0].text == "x" + TEXTS[0]
