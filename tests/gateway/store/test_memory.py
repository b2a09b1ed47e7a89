"""The in-process store: the policy's decisions kept per key, idle keys forgotten."""

from gateway.policy.rate_limit import Refusal, Reservation
from gateway.store.base import LimitStore
from gateway.store.memory import MemoryStore
from gateway.types import Limits

LIMITS = Limits(requests_per_minute=1, tokens_per_minute=100)


async def test_keys_do_not_share_limits() -> None:
    store: LimitStore = MemoryStore()
    assert isinstance(await store.reserve("a", LIMITS, 10, 0.0), Reservation)
    assert isinstance(await store.reserve("b", LIMITS, 10, 0.0), Reservation)
    assert isinstance(await store.reserve("a", LIMITS, 10, 0.0), Refusal)


async def test_figures_only_where_limited() -> None:
    store = MemoryStore()
    await store.reserve("a", LIMITS, 10, 0.0)
    requests, tokens = await store.figures("a", Limits(tokens_per_minute=100), 0.0)
    assert requests is None
    assert tokens is not None
    assert tokens.remaining == 90


async def test_idle_keys_are_forgotten_and_busy_ones_are_not() -> None:
    store = MemoryStore()
    busy = await store.reserve("busy", LIMITS, 10, 0.0)
    assert isinstance(busy, Reservation)
    for n in range(50):
        held = await store.reserve(f"key-{n}", LIMITS, 10, 1.0)
        assert isinstance(held, Reservation)
        await store.settle(f"key-{n}", held, 5)
    assert store.num_keys == 51
    for n in range(60):
        await store.reserve("again", Limits(), 1, 200.0 + n / 1000)
    assert store.num_keys == 2
    await store.release("busy", busy)
    store.check_integrity()
    assert store.num_open == 60
