"""The in-process store: the policy's decisions kept by name, idle counts forgotten."""

from collections.abc import Sequence
from dataclasses import replace
from secrets import token_hex

from gateway.limits.policy.rate_limit import Draw, Refusal, Reservation, UsedAmounts
from gateway.limits.store import LimitStore, MemoryStore, Past


def draws(key: str, tokens: int = 10) -> list[Draw]:
    return [
        Draw(f"{key} requests", "requests", 60, 1, 1),
        Draw(f"{key} tokens", "tokens", 60, 100, tokens),
        Draw("all places", "concurrency", 0, 60, 1),
    ]


async def reserve(store: LimitStore, what: Sequence[Draw], now_s: float) -> Reservation | Refusal:
    decision = await store.reserve(token_hex(8), what, now_s)
    result = decision.reservation or decision.refusal
    assert result is not None
    return result


async def test_names_do_not_share_counts_and_shared_names_do() -> None:
    store: LimitStore = MemoryStore()
    assert isinstance(await reserve(store, draws("a"), 0.0), Reservation)
    assert isinstance(await reserve(store, draws("b"), 0.0), Reservation)
    assert isinstance(await reserve(store, draws("a"), 0.0), Refusal)
    _, tokens, places = await store.figures(draws("a"), 0.0)
    assert (tokens.remaining, places.remaining) == (90, 58)


async def test_a_refusal_has_taken_nothing_of_any_count() -> None:
    store = MemoryStore()
    await reserve(store, draws("a"), 0.0)
    assert isinstance(await reserve(store, draws("a"), 1.0), Refusal)
    assert [f.remaining for f in await store.figures(draws("a"), 1.0)] == [0, 90, 59]
    assert store.num_open == 1
    store.check_integrity()


async def test_figures_of_what_was_never_drawn_on() -> None:
    store = MemoryStore()
    assert [f.remaining for f in await store.figures(draws("a"), 0.0)] == [1, 100, 60]
    assert store.num_counts == 0


async def test_idle_counts_are_forgotten_and_busy_ones_are_not() -> None:
    store = MemoryStore()
    busy = await reserve(store, draws("busy"), 0.0)
    assert isinstance(busy, Reservation)
    for n in range(50):
        held = await reserve(store, draws(f"key-{n}"), 1.0)
        assert isinstance(held, Reservation)
        await store.settle(held, UsedAmounts(3, 2))
    assert store.num_counts == 2 * 51 + 1
    for n in range(120):
        await reserve(store, [], 200.0 + n / 1000)
    assert store.num_counts == 1  # the places, of which one is taken
    assert store.num_open == 121
    await store.release(busy)  # whose windows have passed and are gone
    store.check_integrity()
    assert [f.remaining for f in await store.figures(draws("busy"), 201.0)] == [1, 100, 60]


async def test_a_count_goes_on_from_its_past() -> None:
    store = MemoryStore()
    await store.restore([Past("day", 86_400, ((90_000.0, 7), (50_000.0, 3), (10.0, 4)))], 1000.0)
    day = Draw("day", "tokens", 86_400, 10, 4)
    refusal = await reserve(store, [day], 1000.0)
    assert isinstance(refusal, Refusal)
    assert refusal.used == 7
    assert refusal.wait_s is not None
    assert 36_400 <= refusal.wait_s <= 36_400 + 720
    assert isinstance(await reserve(store, [day], 1000.0 + refusal.wait_s), Reservation)
    store.check_integrity()


async def test_a_limit_that_was_lifted_goes_on_with_what_holds_on_to_it() -> None:
    store = MemoryStore()
    tokens = Draw("day", "tokens", 86_400, 100, 10)
    money = Draw("cost", "cost", 0, 100, 10, 7)
    held = [await reserve(store, [tokens, money], 50_000.0 + n) for n in (0, 1000, 2000)]
    # Lifted for a while, and set again: so much is in the ledger by now.
    await store.restore([Past("day", 86_400, ((1500.0, 40),))], 52_500.0)
    await store.restore([Past("cost", 0, period=7, spent=40)], 52_500.0)
    store.check_integrity()
    assert [f.remaining for f in await store.figures([tokens, money], 52_500.0)] == [30, 30]
    for one in held:
        assert isinstance(one, Reservation)
        await store.settle(one, UsedAmounts(1, 1, 2))
        store.check_integrity()
    assert [f.remaining for f in await store.figures([tokens, money], 52_500.0)] == [54, 54]
    # The ledger is behind: what is known here is more.
    await store.restore([Past("day", 86_400, ((1500.0, 3),))], 52_500.0)
    await store.restore([Past("cost", 0, period=7, spent=3)], 52_500.0)
    assert [f.remaining for f in await store.figures([tokens, money], 52_500.0)] == [54, 54]
    # A new period has begun since the ledger was read.
    await reserve(store, [replace(money, period=8)], 52_500.0)
    await store.restore([Past("cost", 0, period=7, spent=40)], 52_500.0)
    new = replace(money, period=8)
    assert [f.remaining for f in await store.figures([money, new], 52_500.0)] == [44, 90]
