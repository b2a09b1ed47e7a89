"""What a request owes and counts whose time was up, and one that we failed."""

import asyncio
import contextlib
import functools
from collections.abc import Callable

import aiohttp
import pytest

from gateway.errors import WorkerLost
from registry.accounts.quotas import Limits
from tests.gateway.edge_kit import Client, Kit, Running, key_record
from tests.gateway.pipeline.test_pipeline import CHAT, URL


def late(kit: Kit, text: str) -> Callable[[Running], None]:
    """So much is made; then its time is up."""

    def script(running: Running) -> None:
        if text:
            running.say(kit.ids(text))
        end = functools.partial(running.end, "timeout")
        asyncio.get_running_loop().call_later(0.05, end)

    return script


async def test_what_a_client_was_sent_when_its_time_was_up_is_billed(
    kit: Kit, client: Client
) -> None:
    """Or whoever asks for more than the time allows has all of it for nothing, for ever."""
    limits = Limits(requests_per_minute=2, output_tokens_per_minute=40)
    kit.use_keys(key_record(limits=limits))
    kit.dispatcher.script = late(kit, "The game is")
    made = len(kit.ids("The game is"))
    asked = {**CHAT, "max_tokens": 8, "n": 2}
    for num in (1, 2):
        events = await client.events(URL, asked)
        assert events[-1]["error"]["code"] == "deadline_exceeded"
        await kit.settled(num)
        posting = kit.ledger.posted[-1]
        assert (posting.outcome, posting.completion_tokens) == ("disconnected", 2 * made)
        assert posting.cost_nanos == 2 * posting.prompt_tokens + 5 * 2 * made
    async with client.post(URL, asked) as answer:
        assert answer.status == 429
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    async with client.post(URL, {**asked, "stream": True}) as answer:
        assert answer.status == 429


async def test_what_was_made_and_not_sent_is_not_billed(kit: Kit, client: Client) -> None:
    """It comes together with the end of its time: an error is sent in its place."""

    def script(running: Running) -> None:
        def last() -> None:
            running.say(kit.ids(" afoot!"))
            running.end("timeout")

        running.say(kit.ids("The game is"))
        asyncio.get_running_loop().call_later(0.05, last)

    kit.dispatcher.script = script
    events = await client.events(URL, {**CHAT, "n": 2})
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])
    assert text == "The game is" * 2
    await kit.settled()
    posting = kit.ledger.only
    assert posting.outcome == "disconnected"
    assert posting.completion_tokens == 2 * len(kit.ids("The game is"))


@pytest.mark.parametrize("text", ["", "The game is"])
async def test_an_answer_that_was_not_sent_in_time_is_free_and_counts(
    kit: Kit, client: Client, text: str
) -> None:
    """Its tokens in the limits, too: they were made."""
    limits = Limits(requests_per_minute=9, tokens_per_minute=1000)
    kit.use_keys(key_record(limits=limits))
    kit.dispatcher.script = late(kit, text)
    async with client.post(URL, CHAT) as answer:
        assert answer.status == 504
        error = (await answer.json())["error"]
        assert (error["code"], error["type"]) == ("deadline_exceeded", "server_error")
    await kit.settled()
    told = [(posting.outcome, posting.cost_nanos) for posting in kit.ledger.posted]
    assert told == ([("failed", 0)] if text else [])
    kit.dispatcher.script = kit.speak("!")
    async with client.post(URL, CHAT | {"max_tokens": 10}) as answer:
        assert answer.headers["x-ratelimit-remaining-requests"] == "7"
        left = int(answer.headers["x-ratelimit-remaining-tokens"])
    num_prompt = kit.dispatcher.requests[0].request.num_prompt_tokens
    used = num_prompt + len(kit.ids(text)) if text else 0
    assert left == 1000 - used - num_prompt - 10


@pytest.mark.parametrize("error", [WorkerLost, RuntimeError])
async def test_what_failed_by_our_fault_is_free_and_does_not_count(
    kit: Kit, client: Client, error: type[Exception]
) -> None:
    kit.use_keys(key_record(limits=Limits(requests_per_minute=2)))

    def script(running: Running) -> None:
        running.say(kit.ids("The game is"))
        asyncio.get_running_loop().call_later(0.05, running.fail, error("gone"))

    kit.dispatcher.script = script
    for num in (1, 2, 3):
        async with client.post(URL, {**CHAT, "stream": True}) as answer:
            assert answer.status == 200
            with contextlib.suppress(aiohttp.ClientPayloadError):
                await answer.read()
        await kit.settled(num)
        assert (kit.ledger.posted[-1].outcome, kit.ledger.posted[-1].cost_nanos) == ("failed", 0)
