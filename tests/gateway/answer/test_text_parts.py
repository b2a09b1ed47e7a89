"""Completions of several prompts: choices of each, in their order, and one posting for all."""

from pathlib import Path
from typing import Any

import openai
import pytest

from registry.accounts.quotas import Limits
from tests.gateway.edge_kit import KEY, Client, Kit, Running, client_of, key_record, make_kit

URL = "/v1/completions"
PROMPTS = ["The game", "naive", "x = 1"]


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return make_kit(tmp_path / "tiny", max_choices=4, max_prompts=6)


def index_of(running: Running) -> int:
    return int(running.request.request_id.partition("#")[2] or 0)


def each_its_number(kit: Kit, cached: tuple[int, ...] = ()) -> None:
    """Choice i says its number; of its prompt so much was cached."""

    def script(running: Running) -> None:
        index = index_of(running)
        running.say([*kit.ids(f"answer {index}"), kit.end_id])
        running.end("stop", cached_tokens=cached[index] if cached else 0)

    kit.dispatcher.script = script


async def ask(client: Client, **fields: Any) -> tuple[int, dict[str, Any]]:
    async with client.post(URL, {"model": "tiny", "prompt": PROMPTS, **fields}) as answer:
        return answer.status, await answer.json()


async def test_each_prompt_has_its_choices_in_order(kit: Kit, client: Client) -> None:
    each_its_number(kit, cached=(1, 0, 2, 3, 0, 0))
    status, body = await ask(client, n=2, seed=7, echo=True)
    assert status == 200
    expected = [(i, f"{PROMPTS[i // 2]}answer {i}", "stop") for i in range(6)]
    assert [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]] == expected
    sent = [running.request for running in kit.dispatcher.requests]
    ids = [kit.ids(prompt) for prompt in PROMPTS for _ in range(2)]
    assert [request.prompt_token_ids for request in sent] == ids
    assert [request.sampling.seed for request in sent] == [7, 8] * 3
    posting = kit.ledger.only
    num_prompt = sum(len(kit.ids(prompt)) for prompt in PROMPTS)
    assert (posting.prompt_tokens, posting.cached_tokens) == (num_prompt, 0 + 2 + 0)
    made = sum(len(kit.ids(f"answer {i}")) + 1 for i in range(6))
    assert posting.completion_tokens == made
    assert body["usage"]["prompt_tokens"] == num_prompt
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert body["usage"]["completion_tokens"] == made


async def test_token_ids_and_streams(kit: Kit, client: Client) -> None:
    each_its_number(kit)
    body = {"model": "tiny", "prompt": [kit.ids("a"), kit.ids("b")]}
    events = await client.events(URL, {**body, "stream_options": {"include_usage": True}})
    texts = {0: "", 1: ""}
    for event in events[:-2]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {0: "answer 0", 1: "answer 1"}
    assert events[-2]["usage"]["prompt_tokens"] == 2


async def test_prompts_are_scored_each_by_itself(kit: Kit, client: Client) -> None:
    """As lm-eval asks, with batch_size above 1."""
    each_its_number(kit)
    _, body = await ask(client, echo=True, logprobs=1, max_tokens=0)
    for choice, prompt in zip(body["choices"], PROMPTS, strict=True):
        assert choice["text"] == prompt
        assert "".join(choice["logprobs"]["tokens"]) == prompt
        assert choice["logprobs"]["text_offset"][0] == 0
        assert choice["logprobs"]["token_logprobs"][0] is None


async def test_offsets_begin_behind_each_prompt_s_echo(kit: Kit, client: Client) -> None:
    each_its_number(kit)
    _, body = await ask(client, echo=True, logprobs=0)
    for choice, prompt in zip(body["choices"], PROMPTS, strict=True):
        at = choice["logprobs"]["text_offset"]
        assert at[len(kit.ids(prompt))] == len(prompt)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3}, "prompt"),
        ({"prompt": ["x"] * 7}, "prompt"),
        ({"prompt": ["x", "y" * 4000]}, "prompt"),
        ({"prompt": [[1], [403]]}, "prompt"),
        ({"prompt": ["x", ""]}, "prompt"),
        ({"max_tokens": 0, "echo": True, "n": 2}, "n"),
    ],
)
async def test_what_cannot_be_answered_is_refused_before_anything_runs(
    kit: Kit, client: Client, fields: dict[str, Any], param: str
) -> None:
    status, body = await ask(client, **fields)
    assert (status, body["error"]["param"]) == (400, param)
    assert not kit.dispatcher.requests


async def test_limits_hold_all_of_it(kit: Kit, client: Client) -> None:
    num_prompt = sum(len(kit.ids(prompt)) for prompt in PROMPTS)
    kit.use_keys(key_record(limits=Limits(tokens_per_minute=num_prompt + 3 * 5)))
    each_its_number(kit)
    assert (await ask(client, max_tokens=6))[0] == 429
    assert (await ask(client, max_tokens=5))[0] == 200


async def test_one_that_fails_fails_the_request(kit: Kit, client: Client) -> None:
    def script(running: Running) -> None:
        if index_of(running) == 1:
            running.end("error", error="boom")
        else:
            kit.speak("fine")(running)

    kit.dispatcher.script = script
    assert (await ask(client))[0] == 500
    await kit.settled()
    assert {p.outcome for p in kit.ledger.posted} <= {"failed"}


async def test_openais_client_sends_lists(tmp_path: Path) -> None:
    kit = make_kit(tmp_path / "other")
    each_its_number(kit)
    async with (
        client_of(kit) as client,
        openai.AsyncOpenAI(api_key=KEY, base_url=f"{client.base}/v1") as sdk,
    ):
        answer = await sdk.completions.create(model="tiny", prompt=PROMPTS)
    assert [choice.text for choice in answer.choices] == [f"answer {i}" for i in range(3)]
