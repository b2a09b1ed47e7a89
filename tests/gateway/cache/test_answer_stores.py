"""Every store of answers keeps the seam's promises, and finds what a plain model finds."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.cache import memory_store, vector_index
from gateway.cache.memory_store import MemoryAnswers
from gateway.cache.policy.cache_confidence import Confidence
from gateway.cache.types import (
    SIMILARITY_FLOOR,
    AnswerStore,
    Entry,
    Scope,
    Selector,
    StoreUnavailable,
)
from tests.gateway.cache.answers_kit import (
    BEGAN_AT,
    KINDS,
    MIB,
    PATIENT_S,
    Model,
    Rig,
    entry_of,
    key_of,
    rig_of,
    scope_of,
    vector_of,
)

STEPS = 300
ROUNDING = 0.02
"""Of a cosine: vector sets keep eight bits a number, entries sixteen."""
QUESTIONS = [f"question {number}" for number in range(12)]
SCOPES = [
    scope_of(tenant, model, system)
    for tenant in ("a", "b:s", "{c}")
    for model in ("small", "large")
    for system in ("", "be brief")
]


@pytest.fixture(params=KINDS)
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig_of(request.param, tmp_path) as one:
        yield one


async def kept(rig: Rig, entry: Entry) -> Entry:
    """Kept in the present epoch, as a request would."""
    store = rig.stores[0]
    epoch = (await store.exact(entry.scope, entry.exact_key)).epoch
    entry = replace(entry, epoch=epoch)
    await store.keep(entry)
    await rig.settle()
    return entry


async def found(store: AnswerStore, scope: Scope, question: str) -> str | None:
    """The text of the answer."""
    entry = (await store.exact(scope, key_of(scope, question))).entry
    return entry.answer.text if entry else None


async def similar(store: AnswerStore, scope: Scope, question: str) -> list[str]:
    """Questions near to this one's own direction."""
    near = await store.nearest(scope, vector_of(question), 5)
    return [one.entry.question for one in near]


class History:
    """Random calls at any of the gateways, and the same at the model."""

    def __init__(self, rig: Rig, dice: random.Random) -> None:
        self.rig, self.dice, self.model = rig, dice, Model(rig.now)
        self.num_made = 0

    async def keep(self) -> None:
        store, scope = self.rig.any(self.dice), self.dice.choice(SCOPES)
        question = self.dice.choice(QUESTIONS)
        epoch = (await store.exact(scope, key_of(scope, question))).epoch
        is_late = self.dice.random() < 0.1
        if is_late:
            await self.drop()
        self.num_made += 1
        vector = vector_of(question, self.dice.choice(QUESTIONS), 0.3)
        entry = entry_of(
            scope,
            question,
            epoch,
            vector if self.dice.random() < 0.8 else None,
            text=f"answer {self.num_made}",
            ttl_s=self.dice.choice((60.0, 600.0)),
            made_at=self.rig.now.at,
            key_id=self.dice.choice(("k1", "k2")),
        )
        await store.keep(entry)
        await self.rig.settle()
        if (await store.exact(scope, entry.exact_key)).epoch == epoch:
            self.model.keep(entry)

    async def drop(self) -> None:
        scope = self.dice.choice(SCOPES)
        whole = (Selector(tenant_id=scope.tenant_id), Selector(model_name=scope.model_name))
        selector = self.dice.choice(
            (
                *whole,
                Selector(scope.tenant_id, scope.model_name),
                Selector(key_id="k1"),
                Selector(scope.tenant_id, question=self.dice.choice(QUESTIONS)),
            )
        )
        store = self.rig.any(self.dice)
        if selector in whole and self.dice.random() < 0.5:
            await store.invalidate(selector.tenant_id, selector.model_name)
        else:
            await store.purge(selector)
        self.model.drop(selector)

    async def learn(self) -> None:
        store, scope = self.rig.any(self.dice), self.dice.choice(SCOPES)
        live = self.model.live(scope)
        if live:
            entry = self.dice.choice(live)
            learnt = replace(entry.confidence, agreed=entry.confidence.agreed + 1)
            assert await store.learn(entry, learnt)
            assert not await store.learn(entry, learnt)
            self.model.learn(entry, learnt)

    async def look(self) -> None:
        store, scope = self.rig.any(self.dice), self.dice.choice(SCOPES)
        question = self.dice.choice(QUESTIONS)
        entry = (await store.exact(scope, key_of(scope, question))).entry
        assert (entry and entry.entry_id) == self.model.exact(scope, key_of(scope, question))
        if entry is not None:
            expected = self.model.entries[entry.exact_key]
            assert entry == replace(expected, vector=None, epoch=entry.epoch)
            await store.used(entry, 10)
        vector = vector_of(question, self.dice.choice(QUESTIONS), 0.4)
        expected_near = self.model.near(scope, vector)
        near = await store.nearest(scope, vector, 4)
        for one in near:
            exact = expected_near.get(one.entry.entry_id, SIMILARITY_FLOOR)
            assert one.entry.scope == scope
            assert one.similarity == pytest.approx(exact, abs=ROUNDING)
            assert self.model.exact(scope, one.entry.exact_key) == one.entry.entry_id
        best = max(expected_near.values(), default=0.0)
        if best > SIMILARITY_FLOOR + ROUNDING:
            assert near
            assert near[0].similarity == pytest.approx(best, abs=ROUNDING)

    async def step(self) -> None:
        roll = self.dice.random()
        if roll < 0.4:
            await self.keep()
        elif roll < 0.85:
            await self.look()
        elif roll < 0.93:
            await self.learn()
        elif roll < 0.96:
            self.rig.now.at += 30
        else:
            await self.drop()


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_histories_find_what_the_model_finds(rig: Rig, seed: int) -> None:
    history = History(rig, random.Random(seed))
    for _ in range(STEPS):
        await history.step()
    assert history.num_made > STEPS / 4


async def test_is_found_in_its_own_scope_only(rig: Rig) -> None:
    home = scope_of("a", "m", "be brief")
    await kept(rig, entry_of(home, "why?", b"", vector_of("why?")))
    for other in (scope_of("b", "m", "be brief"), scope_of("a", "m"), scope_of("a", "n")):
        assert (await rig.stores[-1].exact(other, key_of(home, "why?"))).entry is None
        assert not await similar(rig.stores[-1], other, "why?")
    assert await found(rig.stores[-1], home, "why?") == "answer"
    assert await similar(rig.stores[-1], home, "why?") == ["why?"]


async def test_lives_from_when_it_was_made_however_often_it_is_used(rig: Rig) -> None:
    scope = scope_of()
    entry = await kept(rig, entry_of(scope, "why?", b"", vector_of("why?"), ttl_s=100.0))
    for _ in range(3):
        rig.now.at += 33
        assert await found(rig.stores[0], scope, "why?") == "answer"
        await rig.stores[0].used(entry, 10**9)
        await rig.settle()
    rig.now.at += 2
    assert await found(rig.stores[0], scope, "why?") is None
    assert not await similar(rig.stores[0], scope, "why?")


async def test_a_request_from_before_an_invalidation_keeps_nothing(rig: Rig) -> None:
    scope, store = scope_of(), rig.stores[0]
    drops = (
        rig.stores[-1].invalidate(tenant_id=scope.tenant_id),
        rig.stores[-1].invalidate(model_name=scope.model_name),
        rig.stores[-1].purge(Selector(scope.tenant_id, question="why?")),
        rig.stores[-1].purge(Selector(key_id="key")),
    )
    for drop in drops:
        epoch = (await store.exact(scope, key_of(scope, "why?"))).epoch
        await drop
        await store.keep(entry_of(scope, "why?", epoch, vector_of("why?")))
        await rig.settle()
        for gateway in rig.stores:
            assert await found(gateway, scope, "why?") is None
            assert not await similar(gateway, scope, "why?")


async def test_nothing_from_before_is_found_once_an_invalidation_has_returned(rig: Rig) -> None:
    scope, present, over = scope_of(), 0, asyncio.Event()
    num_found = 0

    async def ask(store: AnswerStore) -> None:
        nonlocal num_found
        while not over.is_set():
            oldest = invalidated
            seen = await store.exact(scope, key_of(scope, "why?"))
            begun = present  # Read after the epoch: what has that epoch is no older.
            if seen.entry is not None:
                num_found += 1
                assert int(seen.entry.answer.text) >= oldest
            near = await store.nearest(scope, vector_of("why?"), 2)
            assert all(int(one.entry.answer.text) >= oldest for one in near)
            await asyncio.sleep(0)
            vector = vector_of("why?")
            await store.keep(entry_of(scope, "why?", seen.epoch, vector, text=str(begun)))
            await asyncio.sleep(0.001)

    invalidated = 0
    asking = [asyncio.create_task(ask(store)) for store in rig.stores * 3]
    for number in range(60):
        await asyncio.sleep(0.005)
        present += 1
        store = rig.stores[number % len(rig.stores)]
        if number % 3 == 0:
            await store.invalidate(tenant_id=scope.tenant_id)
        elif number % 3 == 1:
            await store.invalidate(model_name=scope.model_name)
        else:
            await store.purge(Selector(question="why?"))
        invalidated = present
    over.set()
    await asyncio.gather(*asking)
    assert num_found


async def test_learning_is_refused_where_another_was_first(rig: Rig) -> None:
    scope = scope_of()
    entry = await kept(rig, entry_of(scope, "why?", b""))
    once, twice = Confidence(agreed=1.0), Confidence(agreed=2.0)
    assert await rig.stores[0].learn(entry, once)
    assert not await rig.stores[-1].learn(entry, twice)
    entry = replace(entry, confidence=once)
    assert await rig.stores[-1].learn(entry, twice)
    seen = (await rig.stores[0].exact(scope, entry.exact_key)).entry
    assert seen is not None
    assert seen.confidence == twice
    newer = await kept(rig, entry_of(scope, "why?", b"", text="another"))
    assert not await rig.stores[0].learn(replace(entry, confidence=newer.confidence), once)


async def test_an_entry_is_found_by_its_request(rig: Rig) -> None:
    scope = scope_of()
    entry = await kept(rig, entry_of(scope, "why?", b""))
    await kept(rig, entry_of(scope, "how?", b""))
    (seen,) = await rig.stores[-1].entries(scope.tenant_id, entry.entry_id)
    assert seen.question == "why?"
    assert not await rig.stores[-1].entries("another", entry.entry_id)
    assert not await rig.stores[-1].entries(scope.tenant_id, "another")


async def test_what_is_kept_is_listed_by_tenant_and_model(rig: Rig) -> None:
    async def listed(tenant: str, **wanted: Any) -> list[str]:
        found = await rig.stores[-1].entries(tenant, limit=wanted.pop("limit", 9), **wanted)
        return sorted(one.question for one in found)

    for tenant, model, question in (
        ("a", "m", "one"),
        ("a", "m", "two"),
        ("a", "n", "three"),
        ("b", "m", "four"),
    ):
        await kept(rig, entry_of(scope_of(tenant, model), question, b""))
    await kept(rig, entry_of(scope_of("a", "m"), "short", b"", ttl_s=30.0))
    assert await listed("a") == ["one", "short", "three", "two"]
    rig.now.at += 40.0
    assert await listed("a") == ["one", "three", "two"]
    assert await listed("a", model_name="m") == ["one", "two"]
    assert len(await listed("a", limit=2)) == 2
    assert await listed("a", limit=0) == []
    await rig.stores[0].invalidate(model_name="m")
    assert await listed("a") == ["three"]
    assert await listed("b") == []
    await rig.stores[0].purge(Selector(tenant_id="a", question="three"))
    assert await listed("a") == []


async def test_a_purge_of_nothing_in_particular_is_refused(rig: Rig) -> None:
    with pytest.raises(ValueError, match="purge"):
        await rig.stores[0].purge(Selector())


async def test_purges_count_and_leave_the_rest(rig: Rig) -> None:
    a, b = scope_of("a"), scope_of("b")
    for scope in (a, b):
        for number in range(300):
            key_id = "k1" if number < 200 else "k2"
            await kept(rig, entry_of(scope, f"q {number}", b"", key_id=key_id))
    assert await rig.stores[-1].purge(Selector("a", key_id="k1")) == 200
    assert (await rig.stores[0].size()).num_entries == 400
    assert await rig.stores[-1].purge(Selector(key_id="k2")) == 200
    assert await rig.stores[-1].purge(Selector(tenant_id="b")) == 200
    assert (await rig.stores[0].size()).num_entries == 0
    assert (await rig.stores[0].size()).num_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_tenant_is_bounded_and_keeps_what_saves_most(kind: str, tmp_path: Path) -> None:
    scope, other = scope_of("full"), scope_of("other")
    async with rig_of(kind, tmp_path, tenant_max_bytes=100_000) as rig:
        await kept(rig, entry_of(other, "why?", b""))
        await kept(rig, entry_of(scope, "dear", b"", cost_nanos=10**9))
        used = await kept(rig, entry_of(scope, "used", b"", vector_of("used")))
        for _ in range(5):
            await rig.stores[0].used(used, 10**8)
        for number in range(150):
            await kept(rig, entry_of(scope, f"q {number}", b"", vector_of(f"q {number}")))
        assert (await rig.stores[0].size()).num_bytes <= 103_000
        for question in ("dear", "used", "q 149"):
            assert await found(rig.stores[0], scope, question) == "answer"
        assert await found(rig.stores[0], scope, "q 0") is None
        assert not await similar(rig.stores[0], scope, "q 0")
        assert await similar(rig.stores[0], scope, "used") == ["used"]
        assert await found(rig.stores[0], other, "why?") == "answer"
        await kept(rig, entry_of(scope, "huge", b"", text="x" * 200_000))
        assert await found(rig.stores[0], scope, "huge") is None
        for number in range(2000):  # What nobody uses any longer goes in the end.
            await kept(rig, entry_of(scope, f"n {number}", b"", cost_nanos=2 * 10**8))
        assert await found(rig.stores[0], scope, "dear") is None


async def test_searches_that_pile_up_are_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_store, "SEARCH_S", 0.0)
    monkeypatch.setattr(vector_index, "INLINE_SIZE", 0)
    store, scope = MemoryAnswers(MIB, MIB, lambda: BEGAN_AT), scope_of()
    epoch = (await store.exact(scope, key_of(scope, "why?"))).epoch
    await store.keep(entry_of(scope, "why?", epoch, vector_of("why?")))
    with pytest.raises(StoreUnavailable):
        await store.nearest(scope, vector_of("why?"), 3)
    monkeypatch.setattr(memory_store, "SEARCH_S", PATIENT_S)
    (near,) = await store.nearest(scope, vector_of("why?"), 3)
    assert near.entry.question == "why?"
    await store.close()
