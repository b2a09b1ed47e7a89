"""One tenant's entries in this process: what they are worth, what goes first, and that nothing is
left of what went."""

import random
from dataclasses import replace

import pytest

from gateway.cache import memory_store
from gateway.cache.memory_store import TenantCache, size_of, worth_when_made, worth_when_used
from tests.gateway.cache.answers_kit import BEGAN_AT, entry_of, key_of, scope_of, vector_of

SCOPE = scope_of()


def put(cache: TenantCache, question: str, cost_nanos: int = 1, ttl_s: float = 60.0) -> bytes:
    """An entry, some of them with a vector."""
    vector = vector_of(question) if len(question) % 2 else None
    entry = entry_of(SCOPE, question, b"", vector, cost_nanos=cost_nanos, ttl_s=ttl_s)
    cache.put(entry, b"index")
    return entry.exact_key


def questions(cache: TenantCache) -> set[str]:
    """Of what is there."""
    return {kept.entry.question for kept in cache.entries.values()}


def test_the_least_worth_goes_first_and_what_is_not_used_goes_in_the_end() -> None:
    cache = TenantCache()
    for question, cost in (("dear", 10**6), ("cheap", 10), ("used", 10)):
        put(cache, question, cost)
    cache.use(cache.entries[key_of(SCOPE, "used")], 10**5)
    cache.drop_least()
    assert questions(cache) == {"dear", "used"}
    for number in range(200):
        put(cache, f"new {number}", 5 * 10**4)
        cache.drop_least()
    assert len(cache.entries) == 2
    assert "dear" not in questions(cache)


def test_entries_end_by_themselves_each_in_its_time() -> None:
    cache = TenantCache()
    put(cache, "short", ttl_s=10)
    put(cache, "long", ttl_s=20)
    put(cache, "renewed", ttl_s=10)
    put(cache, "renewed", ttl_s=30)
    cache.expire(BEGAN_AT + 9.9)
    assert len(cache.entries) == 3
    cache.expire(BEGAN_AT + 10)
    assert questions(cache) == {"long", "renewed"}
    cache.expire(BEGAN_AT + 30)
    assert not cache.entries
    assert not cache.indexes
    assert cache.num_bytes == 0


@pytest.mark.parametrize("seed", range(3))
def test_sums_orders_and_indexes_hold_through_any_history(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_store, "HEAP_SLACK", 2)
    dice, cache, now_s = random.Random(seed), TenantCache(), BEGAN_AT
    for _ in range(600):
        roll = dice.random()
        if roll < 0.5 or not cache.entries:
            put(cache, f"q {dice.randrange(40)}", dice.randrange(1000), dice.choice((5, 50)))
        elif roll < 0.8:
            cache.use(dice.choice(list(cache.entries.values())), dice.randrange(1000))
        elif roll < 0.9:
            cache.drop_least()
        else:
            now_s += 1
            cache.expire(now_s)
        cache.check_integrity()


def test_what_it_takes_is_texts_and_vector_and_more() -> None:
    plain = entry_of(SCOPE, "why?", b"")
    assert size_of(replace(plain, question="why" * 10)) - size_of(plain) == 26
    assert size_of(replace(plain, vector=vector_of("why?"))) - size_of(plain) >= 48 * 4


def test_saved_cost_a_byte_counts() -> None:
    assert worth_when_made(0.0, 1000, 10) > worth_when_made(0.0, 1000, 20)
    assert worth_when_made(0.0, 2000, 10) > worth_when_made(0.0, 1000, 10)
    once = worth_when_made(0.0, 1000, 10)
    assert worth_when_used(once, 0.0, 1000, 10) == 2 * once


def test_old_savings_count_less_as_the_clock_goes_on() -> None:
    old = worth_when_used(worth_when_made(0.0, 1000, 10), 0.0, 1000, 10)
    assert worth_when_made(old + 1, 1, 10) > old
    assert worth_when_used(old, 10 * old, 1000, 10) > 10 * old


def test_what_costs_nothing_is_still_worth_its_bytes() -> None:
    assert worth_when_made(5.0, 0, 100) > worth_when_made(5.0, 0, 200) > 5.0
