"""Requests that ask the same while the first is being answered, and what becomes of them."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.errors import SERVER_ERROR, UNAVAILABLE, ApiError
from gateway.limits.policy.rate_limit import Spend
from gateway.limits.store import MemoryStore
from registry.accounts.quotas import Limits
from tests.gateway.edge_kit import KEY, Client, Kit, Running, client_of, key_record, make_kit, until

URL = "/v1/chat/completions"
OTHER = "another-key-of-another-tenant"
ASK = {"temperature": 0}


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    kit = make_kit(tmp_path / "tiny")
    kit.dispatcher.script = lambda running: None
    kit.use_keys(
        key_record(cache_mode="exact"),
        key_record(OTHER, "key_2", cache_mode="exact", tenant_id="ten_2"),
    )
    return kit


def say(kit: Kit, running: Running, text: str) -> None:
    running.say([*kit.ids(text), kit.end_id])
    running.end("stop")


async def ask(client: Client, content: str = "Hello", key: str = KEY, **body: Any) -> Any:
    request = {"model": "tiny", "messages": [{"role": "user", "content": content}], **ASK, **body}
    async with client.post(URL, request, key) as answer:
        return answer.status, answer.headers.get("x-polyhost-cache"), await answer.json()


def asking(client: Client, count: int, **options: Any) -> "list[asyncio.Task[Any]]":
    return [asyncio.create_task(ask(client, **options)) for _ in range(count)]


async def test_the_same_is_answered_once_and_billed_as_a_hit(kit: Kit, client: Client) -> None:
    tasks = asking(client, 4)
    await until(lambda: kit.edge.store.num_open == 4)
    assert len(kit.dispatcher.requests) == 1
    say(kit, kit.dispatcher.requests[0], "The game is afoot!")
    answers = await asyncio.gather(*tasks)
    texts = {body["choices"][0]["message"]["content"] for _, _, body in answers}
    assert texts == {"The game is afoot!"}
    assert len({body["id"] for _, _, body in answers}) == 4
    assert sorted(result for _, result, _ in answers) == ["hit"] * 3 + ["miss"]
    outcomes = sorted(posting.outcome for posting in kit.ledger.posted)
    assert outcomes == ["cache_hit"] * 3 + ["finished"]
    assert len(kit.dispatcher.requests) == 1


@pytest.mark.parametrize(
    "options",
    [{"content": "Bye"}, {"key": OTHER}, {"max_tokens": 7}, {"temperature": 1}, {"n": 2}],
    ids=str,
)
async def test_what_differs_goes_its_own_way(
    kit: Kit, client: Client, options: dict[str, Any]
) -> None:
    tasks = [*asking(client, 1), *asking(client, 1, **options)]
    await until(lambda: len(kit.dispatcher.requests) == 1 + options.get("n", 1))
    for running in kit.dispatcher.requests:
        say(kit, running, "x")
    assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200, 200]
    assert {posting.outcome for posting in kit.ledger.posted} == {"finished"}


async def test_who_is_of_another_class_does_not_wait_for_class_batch(
    kit: Kit, client: Client
) -> None:
    leader = asking(client, 1, service_tier="flex")
    await until(lambda: len(kit.dispatcher.requests) == 1)
    assert kit.dispatcher.requests[0].request.is_batch
    like = asking(client, 1, service_tier="flex")
    await until(lambda: kit.edge.store.num_open == 2)
    other = asking(client, 1)
    await until(lambda: len(kit.dispatcher.requests) == 2)
    assert not kit.dispatcher.requests[1].request.is_batch
    for running in kit.dispatcher.requests:
        say(kit, running, "x")
    answers = await asyncio.gather(*leader, *like, *other)
    assert [result for _, result, _ in answers] == ["miss", "hit", "miss"]
    assert [body["service_tier"] for _, _, body in answers[:2]] == ["flex", "flex"]


async def test_who_did_not_ask_for_the_cache_is_not_coalesced(kit: Kit, client: Client) -> None:
    kit.use_keys(key_record())
    tasks = asking(client, 3)
    await until(lambda: len(kit.dispatcher.requests) == 3)
    for running in kit.dispatcher.requests:
        say(kit, running, "x")
    assert {result for _, result, _ in await asyncio.gather(*tasks)} == {None}


async def test_nobody_is_hurt_by_a_leader_that_leaves(kit: Kit, client: Client) -> None:
    leader = asyncio.create_task(ask(client))
    await until(lambda: len(kit.dispatcher.requests) == 1)
    followers = asking(client, 2)
    await until(lambda: kit.edge.store.num_open == 3)
    leader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leader
    await until(lambda: len(kit.dispatcher.requests) == 3)
    assert kit.dispatcher.requests[0].aborted
    for running in kit.dispatcher.requests[1:]:
        say(kit, running, "x")
    assert [status for status, _, _ in await asyncio.gather(*followers)] == [200, 200]
    assert sorted(posting.outcome for posting in kit.ledger.posted) == ["finished", "finished"]


def spent_of(kit: Kit) -> list[int]:
    """What budgets count, reserved amounts too."""
    store = kit.edge.store
    assert isinstance(store, MemoryStore)
    return [count.total for count in store._counts.values() if isinstance(count, Spend)]


async def test_a_hit_that_the_ledger_refuses_is_not_paid_for(
    kit: Kit, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.use_keys(key_record(cache_mode="exact", limits=Limits(day_budget_nanos=10_000)))
    leader = asyncio.create_task(ask(client))
    await until(lambda: len(kit.dispatcher.requests) == 1)
    say(kit, kit.dispatcher.requests[0], "x")
    assert (await leader)[0] == 200
    spent = spent_of(kit)

    async def refuse(posting: object) -> None:
        raise ApiError(UNAVAILABLE, "behind", retry_after_s=5)

    with monkeypatch.context() as patch:
        patch.setattr(kit.ledger, "post", refuse)
        assert (await ask(client))[:2] == (503, "hit")
    assert spent_of(kit) == spent
    assert (await ask(client))[:2] == (200, "hit")
    assert spent_of(kit) != spent
    assert kit.edge.store.num_open == 0


async def test_nobody_gets_anothers_failure(kit: Kit, client: Client) -> None:
    tasks = asking(client, 2)
    await until(lambda: kit.edge.store.num_open == 2)
    kit.dispatcher.requests[0].fail(ApiError(SERVER_ERROR, "no"))
    await until(lambda: len(kit.dispatcher.requests) == 2)
    say(kit, kit.dispatcher.requests[1], "x")
    statuses = sorted(status for status, _, _ in await asyncio.gather(*tasks))
    assert statuses == [200, 500]


async def test_a_follower_that_leaves_holds_nothing(kit: Kit, client: Client) -> None:
    leader = asyncio.create_task(ask(client))
    await until(lambda: len(kit.dispatcher.requests) == 1)
    follower = asyncio.create_task(ask(client))
    await until(lambda: kit.edge.store.num_open == 2)
    follower.cancel()
    await until(lambda: kit.edge.store.num_open == 1)
    say(kit, kit.dispatcher.requests[0], "x")
    assert (await leader)[0] == 200
    assert len(kit.ledger.posted) == 1


async def test_a_follower_waits_no_longer_than_a_request_may_take(tmp_path: Path) -> None:
    kit = make_kit(tmp_path / "tiny", request_timeout_s=0.1)
    kit.dispatcher.script = lambda running: None
    kit.use_keys(key_record(cache_mode="exact"))
    async with client_of(kit) as client:
        leader = asyncio.create_task(ask(client))
        await until(lambda: len(kit.dispatcher.requests) == 1)
        status, _, body = await ask(client)
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        assert kit.edge.store.num_open == 1
        say(kit, kit.dispatcher.requests[0], "x")
        assert (await leader)[0] == 200
    assert len(kit.ledger.posted) == 1
    kit.check_closed()


async def test_a_stream_leads_and_does_not_follow(kit: Kit, client: Client) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": "tiny", "messages": messages, **ASK, "stream": True}
    leader = asyncio.create_task(client.events(URL, body))
    await until(lambda: len(kit.dispatcher.requests) == 1)
    other = asyncio.create_task(client.events(URL, body))
    await until(lambda: len(kit.dispatcher.requests) == 2)
    follower = asyncio.create_task(ask(client))
    await until(lambda: kit.edge.store.num_open == 3)
    say(kit, kit.dispatcher.requests[0], "x")
    assert (await follower)[1] == "hit"
    assert (await leader)[-1] == "[DONE]"
    say(kit, kit.dispatcher.requests[1], "x")
    await other
    assert len(kit.dispatcher.requests) == 2


async def test_a_leader_that_is_cut_off_in_mid_stream_leads_nobody(
    kit: Kit, client: Client
) -> None:
    """A connection that breaks in the midst of a stream."""
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": "tiny", "messages": messages, **ASK, "stream": True}
    async with aiohttp.ClientSession() as session:
        headers = {"authorization": f"Bearer {KEY}"}
        answer = asyncio.create_task(session.post(client.base + URL, json=body, headers=headers))
        await until(lambda: len(kit.dispatcher.requests) == 1)
        kit.dispatcher.requests[0].say(kit.ids("The"))
        (await answer).close()
    await until(lambda: kit.edge.store.num_open == 0)
    task = asyncio.create_task(ask(client))
    await until(lambda: len(kit.dispatcher.requests) == 2)
    say(kit, kit.dispatcher.requests[1], "x")
    assert (await task)[1] == "miss"
