"""One tenant's entries in this process: what goes first, and that nothing is left of what went."""

import random
from dataclasses import replace

import pytest

from gateway.cache import shelf as shelves
from gateway.cache.shelf import Shelf, size_of
from tests.gateway.cache.answers_kit import BEGAN_AT, entry_of, key_of, scope_of, vector_of

SCOPE = scope_of()


def put(shelf: Shelf, question: str, cost_nanos: int = 1, ttl_s: float = 60.0) -> bytes:
    """An entry, some of them with a vector."""
    vector = vector_of(question) if len(question) % 2 else None
    entry = entry_of(SCOPE, question, b"", vector, cost_nanos=cost_nanos, ttl_s=ttl_s)
    shelf.put(entry, b"index")
    return entry.exact_key


def questions(shelf: Shelf) -> set[str]:
    """Of what is there."""
    return {kept.entry.question for kept in shelf.entries.values()}


def test_the_least_worth_goes_first_and_what_is_not_used_goes_in_the_end() -> None:
    shelf = Shelf()
    for question, cost in (("dear", 10**6), ("cheap", 10), ("used", 10)):
        put(shelf, question, cost)
    shelf.use(shelf.entries[key_of(SCOPE, "used")], 10**5)
    shelf.drop_least()
    assert questions(shelf) == {"dear", "used"}
    for number in range(200):
        put(shelf, f"new {number}", 5 * 10**4)
        shelf.drop_least()
    assert len(shelf.entries) == 2
    assert "dear" not in questions(shelf)


def test_entries_end_by_themselves_each_in_its_time() -> None:
    shelf = Shelf()
    put(shelf, "short", ttl_s=10)
    put(shelf, "long", ttl_s=20)
    put(shelf, "renewed", ttl_s=10)
    put(shelf, "renewed", ttl_s=30)
    shelf.expire(BEGAN_AT + 9.9)
    assert len(shelf.entries) == 3
    shelf.expire(BEGAN_AT + 10)
    assert questions(shelf) == {"long", "renewed"}
    shelf.expire(BEGAN_AT + 30)
    assert not shelf.entries
    assert not shelf.indexes
    assert shelf.num_bytes == 0


@pytest.mark.parametrize("seed", range(3))
def test_sums_orders_and_indexes_hold_through_any_history(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelves, "HEAP_SLACK", 2)
    dice, shelf, now_s = random.Random(seed), Shelf(), BEGAN_AT
    for _ in range(600):
        roll = dice.random()
        if roll < 0.5 or not shelf.entries:
            put(shelf, f"q {dice.randrange(40)}", dice.randrange(1000), dice.choice((5, 50)))
        elif roll < 0.8:
            shelf.use(dice.choice(list(shelf.entries.values())), dice.randrange(1000))
        elif roll < 0.9:
            shelf.drop_least()
        else:
            now_s += 1
            shelf.expire(now_s)
        shelf.check_integrity()


def test_what_it_takes_is_texts_and_vector_and_more() -> None:
    plain = entry_of(SCOPE, "why?", b"")
    assert size_of(replace(plain, question="why" * 10)) - size_of(plain) == 26
    assert size_of(replace(plain, vector=vector_of("why?"))) - size_of(plain) >= 48 * 4
