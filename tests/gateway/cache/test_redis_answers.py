"""Kept answers and a Redis that dies, hangs, forgets or has too little room."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.cache import redis_answers
from gateway.cache.codec import NO_SET
from gateway.cache.redis_answers import RedisAnswers
from gateway.cache.types import Entry, Selector, StoreUnavailable
from tests.gateway.cache.answers_kit import (
    MIB,
    PATIENT_S,
    Rig,
    entry_of,
    key_of,
    rig_of,
    scope_of,
    vector_of,
)
from tests.redis_kit import RedisServer

SHARED = ("vectors", "matrix")
SCOPE = scope_of()
KEY = key_of(SCOPE, "why?")
GIVE_UP_S = 60.0


def entry(epoch: bytes, text: str = "answer", question: str = "why?") -> Entry:
    """The answer to a question, with its vector."""
    return entry_of(SCOPE, question, epoch, vector_of(question), text=text)


async def keep(rig: Rig, text: str = "answer", question: str = "why?") -> None:
    """In the present epoch."""
    store = rig.stores[0]
    epoch = (await store.exact(SCOPE, key_of(SCOPE, question))).epoch
    await store.keep(entry(epoch, text, question))
    await rig.settle()


async def answer(rig: Rig, gateway: int = 0) -> str | None:
    """What is found, or None; an outage is a miss. Both ways have to agree."""
    try:
        seen = (await rig.stores[gateway].exact(SCOPE, KEY)).entry
        near = await rig.stores[gateway].nearest(SCOPE, vector_of("why?"), 3)
    except StoreUnavailable:
        return None
    texts = [one.entry.answer.text for one in near]
    assert seen is not None or not texts
    return seen.answer.text if seen else None


async def until_it_answers(rig: Rig) -> None:
    """Redis is found again, by every gateway."""
    async with asyncio.timeout(GIVE_UP_S):
        for store in rig.stores:
            while True:
                try:
                    await store.exact(SCOPE, KEY)
                    break
                except StoreUnavailable:
                    await asyncio.sleep(0.02)


def server(rig: Rig) -> RedisServer:
    """The rig's."""
    assert rig.server is not None
    return rig.server


@pytest.fixture(params=SHARED)
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig_of(request.param, tmp_path) as one:
        yield one


async def test_a_redis_that_comes_back_empty_is_a_miss(rig: Rig) -> None:
    await keep(rig)
    assert await answer(rig, -1) == "answer"
    epoch = (await rig.stores[0].exact(SCOPE, KEY)).epoch
    server(rig).stop()
    assert await answer(rig) is None
    assert await answer(rig, -1) is None
    with pytest.raises(StoreUnavailable):
        await rig.stores[0].invalidate(tenant_id=SCOPE.tenant_id)
    with pytest.raises(StoreUnavailable):
        await rig.stores[0].purge(Selector(tenant_id=SCOPE.tenant_id))
    server(rig).start()
    await until_it_answers(rig)
    assert await answer(rig) is None
    await rig.stores[0].keep(entry(epoch))  # begun in the life before
    await rig.settle()
    assert await answer(rig) is None
    await keep(rig, "new")
    assert await answer(rig, -1) == "new"


async def test_an_old_snapshot_brings_nothing_back(rig: Rig) -> None:
    await keep(rig)
    with server(rig).client() as client:
        client.save()
    await rig.stores[0].invalidate(tenant_id=SCOPE.tenant_id)
    assert await answer(rig) is None
    server(rig).stop()
    server(rig).start()
    await until_it_answers(rig)
    with server(rig).client() as client:
        assert any(b":e:" in name for name in client.scan_iter())
    assert await answer(rig) is None
    assert (await rig.stores[0].size()).num_entries == 0
    await keep(rig, "new")
    assert await answer(rig, -1) == "new"


async def test_kills_under_load_cause_neither_errors_nor_wrong_answers(rig: Rig) -> None:
    over, counts = asyncio.Event(), {"found": 0, "missed": 0}

    async def ask(gateway: int) -> None:
        number = 0
        while not over.is_set():
            number += 1
            question = f"q {number % 40}"
            try:
                found = await rig.stores[gateway].exact(SCOPE, key_of(SCOPE, question))
                near = await rig.stores[gateway].nearest(SCOPE, vector_of(question), 2)
            except StoreUnavailable:
                counts["missed"] += 1
                await asyncio.sleep(0.005)
                continue
            for one in (found.entry, *(one.entry for one in near)):
                if one is not None:
                    assert one.answer.text == f"answer to {question}"
                    counts["found"] += 1
            if found.entry is None:
                kept = entry(found.epoch, f"answer to {question}", question)
                await rig.stores[gateway].keep(kept)
            await asyncio.sleep(0)

    asking = [asyncio.create_task(ask(gateway)) for gateway in (0, 1, 0, 1)]
    for save in (False, True, False):
        await asyncio.sleep(0.4)
        await asyncio.to_thread(server(rig).stop, save)
        await asyncio.sleep(0.1)
        await asyncio.to_thread(server(rig).start)
        before = counts["found"]
        async with asyncio.timeout(GIVE_UP_S):
            while True:
                await asyncio.sleep(0.02)
                if counts["found"] >= before + 50:
                    break
    over.set()
    await asyncio.gather(*asking)
    assert counts["missed"]


async def test_a_redis_that_hangs_is_left_alone_and_found_again(tmp_path: Path) -> None:
    async with rig_of("matrix", tmp_path, timeout_s=0.5, num_gateways=1) as rig:
        (store,) = rig.stores
        assert isinstance(store, RedisAnswers)
        await until_it_answers(rig)
        server(rig).pause()
        try:
            for _ in range(10):
                with pytest.raises(StoreUnavailable):
                    await store.exact(SCOPE, KEY)
            assert store.is_out_of_reach
        finally:
            server(rig).resume()
        await until_it_answers(rig)
        assert not store.is_out_of_reach


async def test_what_cannot_be_told_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_answers, "MAX_PENDING", 3)
    unreported: list[None] = []
    async with rig_of("matrix", tmp_path, num_gateways=1) as rig:
        store = RedisAnswers(
            server(rig).url,
            "test",
            MIB,
            PATIENT_S,
            clock=rig.now,
            write_timeout_s=PATIENT_S,
            on_unreported=lambda: unreported.append(None),
        )
        epoch = (await store.exact(SCOPE, KEY)).epoch
        for number in range(20):
            await store.keep(entry(epoch, question=f"q {number}"))
        await store.drain()
        assert len(unreported) == 17
        assert (await store.size()).num_entries == 3
        await store.close()


async def test_members_without_their_entry_are_taken_out_in_passing(tmp_path: Path) -> None:
    async with rig_of("vectors", tmp_path) as rig:
        await keep(rig)
        with server(rig).client() as client:
            (entry_key,) = [name for name in client.scan_iter() if b":e:" in name]
            (set_key,) = [name for name in client.scan_iter() if b":s:" in name]
            client.delete(entry_key)
            assert client.execute_command("VCARD", set_key) == 1
            assert await answer(rig) is None
            await rig.settle()
            assert not client.execute_command("VCARD", set_key)


async def test_what_is_not_listed_is_not_served(rig: Rig) -> None:
    """A Redis short of memory drops keys as it likes: no purge would find such an entry."""
    for ending in (b":worth", b":count"):
        await keep(rig)
        with server(rig).client() as client:
            client.delete(*[name for name in client.scan_iter() if name.endswith(ending)])
        assert await answer(rig) is None
    await keep(rig, "new")
    assert await answer(rig) == "new"
    assert (await rig.stores[0].size()).num_entries == 1


async def test_an_entry_of_another_version_is_a_miss(rig: Rig) -> None:
    await keep(rig)
    with server(rig).client() as client:
        (name,) = [name for name in client.scan_iter() if b":e:" in name]
        value = client.get(name)
        for cut in (1, 9):
            client.set(name, value[:-cut], keepttl=True)
            assert await answer(rig) is None
    await keep(rig, "new")
    assert await answer(rig) == "new"


async def test_a_redis_without_room_keeps_nothing_and_still_answers(rig: Rig) -> None:
    await keep(rig)
    with server(rig).client() as client:
        client.config_set("maxmemory", "1")
    await keep(rig, question="how?")
    assert await answer(rig) == "answer"
    found = await rig.stores[0].exact(SCOPE, key_of(SCOPE, "how?"))
    assert found.entry is None
    store = rig.stores[0]
    assert isinstance(store, RedisAnswers)
    assert not store.is_out_of_reach


async def test_everything_goes_by_itself(rig: Rig) -> None:
    """But for the state and the sums, every key has its end."""
    await keep(rig)
    with server(rig).client() as client:
        kept = [name for name in client.scan_iter() if b":tenant:" in name]
        assert len(kept) == 3
        assert all(0 < client.pttl(name) <= 600_000 for name in kept)


async def test_two_vectors_of_unlike_length_do_not_meet(tmp_path: Path) -> None:
    async with rig_of("vectors", tmp_path) as rig:
        await keep(rig)
        with pytest.raises(StoreUnavailable):
            await rig.stores[0].nearest(SCOPE, vector_of("why?")[:8], 3)
        assert await answer(rig) == "answer"


async def test_a_large_scope_is_read_in_the_background(tmp_path: Path) -> None:
    async with rig_of("matrix", tmp_path, timeout_s=PATIENT_S) as rig:
        for number in range(700):
            epoch = (await rig.stores[0].exact(SCOPE, KEY)).epoch
            await rig.stores[0].keep(entry(epoch, question=f"q {number}"))
            if number % 200 == 0:
                await rig.settle()
        await rig.settle()
        late = rig.stores[1]
        await late.nearest(SCOPE, vector_of("q 3"), 1)
        await rig.settle()
        for number in (3, 350, 699):
            (near,) = await late.nearest(SCOPE, vector_of(f"q {number}"), 1)
            assert near.entry.question == f"q {number}"


async def test_an_entry_without_a_vector_is_in_no_set(tmp_path: Path) -> None:
    async with rig_of("vectors", tmp_path) as rig:
        epoch = (await rig.stores[0].exact(SCOPE, KEY)).epoch
        await rig.stores[0].keep(replace(entry(epoch), vector=None))
        await rig.settle()
        with server(rig).client() as client:
            assert not [name for name in client.scan_iter() if b":s:" in name]
            (value,) = [client.get(name) for name in client.scan_iter() if b":e:" in name]
        assert value[16:32] == NO_SET
