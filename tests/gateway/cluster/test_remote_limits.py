"""Limits that live in another process: one for all, over deaths of everybody concerned."""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import TypeVar

import pytest

from gateway.cluster import remote_limits as remote
from gateway.cluster.dispatcher_server import GATHER_S, ORPHAN_HOLD_S
from gateway.errors import UNAVAILABLE, ApiError
from gateway.limits.policy.rate_limit import Draw, Reservation, UsedAmounts
from gateway.limits.store import Past
from tests.gateway.cluster.several_kit import Several

PLACES = Draw("tenant a concurrency", "concurrency", 0, 2, 1)
MONEY = Draw("tenant a day", "cost", 0, 100, 40, period=7, resets_in_s=100.0)
TOKENS = Draw("tenant a tokens", "tokens", 86_400, 100, 10)

T = TypeVar("T")


async def answered(several: Several, call: Awaitable[T]) -> T:
    """What it comes to when messages are delivered."""
    asking = await begun(call)
    several.deliver()
    return await asking


async def begun(call: Awaitable[T]) -> asyncio.Future[T]:
    """It has been asked, and what it has said is on its way."""
    asking = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    return asking


async def cancelled(asking: asyncio.Future[T]) -> None:
    """Who asked has left."""
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def reserved(several: Several, index: int, request_id: str, *draws: Draw) -> bool:
    """Ask for it from this gateway; whether it was granted."""
    store = several.gateways[index].store
    decision = await answered(several, store.reserve(request_id, draws, several.clock.now_s))
    return decision.reservation is not None


async def used(several: Several, draw: Draw) -> int:
    """Of a limit, as any gateway sees it."""
    store = several.gateways[-1].store
    (figures,) = await answered(several, store.figures([draw], several.clock.now_s))
    return figures.limit - figures.remaining


async def test_limits_are_one_for_all_gateways() -> None:
    several = Several()
    assert await reserved(several, 0, "r1", PLACES)
    assert await reserved(several, 1, "r2", PLACES)
    assert not await reserved(several, 0, "r3", PLACES)
    store = several.gateways[0].store
    (held,) = store.open_reservations()
    await answered(several, store.settle(held, UsedAmounts(1, 1)))
    assert store.num_open == 0
    assert await reserved(several, 1, "r4", PLACES)
    (held,) = [r for r in several.gateways[1].store.open_reservations() if r.id == "r4"]
    await answered(several, several.gateways[1].store.release(held))
    assert await used(several, PLACES) == 1


async def test_what_the_ledger_knows_is_told_and_what_nobody_reserved_is_added() -> None:
    several = Several()
    store = several.gateways[0].store
    pasts = [Past(TOKENS.name, 86_400, ((10.0, 30),)), Past(MONEY.name, 0, period=7, spent=50)]
    await answered(several, store.restore(pasts, several.clock.now_s))
    assert (await used(several, TOKENS), await used(several, MONEY)) == (30, 50)
    await answered(several, store.add(pasts, several.clock.now_s))
    assert (await used(several, TOKENS), await used(several, MONEY)) == (60, 100)
    assert not await reserved(several, 1, "r", MONEY)
    assert await store.loss() is None
    assert not store.is_degraded


async def test_open_reservations_outlive_a_dispatcher_and_are_closed_once() -> None:
    several = Several()
    assert await reserved(several, 0, "r1", PLACES, MONEY)
    store = several.gateways[0].store
    (held,) = store.open_reservations()
    several.kill_dispatcher()
    assert store.is_degraded
    closing = asyncio.create_task(store.settle(held, UsedAmounts(1, 1, 30)))
    asking = await begun(
        several.gateways[1].store.reserve("r2", (PLACES, MONEY), several.clock.now_s)
    )
    several.take_over()
    await closing
    assert (await asking).reservation is not None
    assert several.store.num_open == 2
    assert await used(several, MONEY) == 30 + 40
    assert store.num_open == 0
    several.server.read_again()
    assert several.store.num_open == 1


async def test_what_was_added_is_not_added_again_to_a_dispatcher_that_has_read_of_it() -> None:
    several = Several()
    store = several.gateways[0].store
    several.kill_dispatcher()
    added = [Past(MONEY.name, 0, period=7, spent=50)]
    adding = await begun(store.add(added, several.clock.now_s))
    several.take_over()
    await adding
    assert await used(several, MONEY) == 0  # nobody has restored it here


async def test_of_a_dead_gateway_places_are_free_at_once_and_money_later() -> None:
    several = Several()
    assert await reserved(several, 0, "r1", PLACES, MONEY)
    assert await reserved(several, 1, "r2", PLACES, MONEY)
    several.kill_gateway(0)
    several.deliver()
    assert not await reserved(several, 1, "r3", PLACES, MONEY)  # 80 of 100 are held
    assert await reserved(several, 1, "r3", PLACES)
    several.advance(ORPHAN_HOLD_S + 1)
    assert await reserved(several, 1, "r4", MONEY)


async def test_money_of_a_dead_gateway_goes_to_the_one_in_its_place() -> None:
    """Its ledger knows what was open; until that is posted it counts at its most, once."""
    several = Several()
    assert await reserved(several, 0, "r1", PLACES, MONEY)
    (held,) = several.gateways[0].store.open_reservations()
    store = several.kill_gateway(0).store
    left = Reservation("r1", tuple(taken for taken in held.taken if taken.meter == "cost"))
    await answered(several, store.carry([left], several.clock.now_s))
    assert await used(several, MONEY) == 40
    await answered(several, store.settle(left, UsedAmounts(1, 1, 25)))
    assert await used(several, MONEY) == 25
    several.advance(ORPHAN_HOLD_S + 1)
    assert await used(several, MONEY) == 25


@pytest.mark.parametrize("lives", [True, False])
async def test_what_a_missing_gateway_has_open_is_held_by_a_new_dispatcher(lives: bool) -> None:
    several = Several()
    for name in ("r1", "r2"):
        assert await reserved(several, 0, name, replace(MONEY, cost=25))
    held = several.gateways[0].store.open_reservations()
    held = [*held, replace(held[0], id="r0")]  # has ended; its posting is in the journal yet
    several.kill_dispatcher()
    several.new_dispatcher()
    several.server.hold_open([("gateway-0", one) for one in held])
    several.gateways[1].link.connect(several.server)
    several.advance(GATHER_S + 0.5)
    several.advance(GATHER_S + 0.5)
    assert not await reserved(several, 1, "r3", MONEY)
    assert await used(several, MONEY) == 75
    if lives:
        several.gateways[0].link.connect(several.server)
    else:
        several.kill_gateway(0)
    several.deliver()
    assert await used(several, MONEY) == (50 if lives else 75)
    several.advance(ORPHAN_HOLD_S + 1)
    assert await used(several, MONEY) == (50 if lives else 0)


async def test_what_was_adopted_is_not_counted_again_when_its_gateway_wakes() -> None:
    several = Several()
    one, two = several.gateways
    assert await reserved(several, 0, "r1", MONEY)
    (held,) = one.store.open_reservations()
    one.link.cut()
    await answered(several, two.store.carry([held], several.clock.now_s))
    await answered(several, two.store.settle(held, UsedAmounts(1, 1, 25)))
    assert await used(several, MONEY) == 25
    one.link.connect(several.server)
    several.deliver()
    assert await used(several, MONEY) == 25
    await answered(several, one.store.settle(held, UsedAmounts(1, 1, 30)))
    assert await used(several, MONEY) == 25


async def test_a_connection_that_was_cut_leaves_reservations_as_they_were() -> None:
    several = Several()
    assert await reserved(several, 0, "r1", PLACES, MONEY)
    assert await reserved(several, 0, "r2", PLACES)
    several.gateways[0].link.connect(several.server)
    several.deliver()
    assert not await reserved(several, 1, "r3", PLACES)
    assert await used(several, MONEY) == 40
    several.advance(ORPHAN_HOLD_S + 1)
    assert await used(several, MONEY) == 40


async def test_who_gives_up_a_reservation_that_nobody_answered_does_not_hold_it() -> None:
    several = Several()
    store = several.gateways[0].store
    asking = await begun(store.reserve("r1", (PLACES,), several.clock.now_s))
    await cancelled(asking)
    several.deliver()
    assert several.store.num_open == 0
    assert store.num_open == 0


async def test_without_any_dispatcher_nobody_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "WAIT_S", 0.01)
    monkeypatch.setattr(remote, "CLOSE_WAIT_S", 0.01)
    several = Several()
    assert await reserved(several, 0, "r1", PLACES)
    store = several.gateways[0].store
    (held,) = store.open_reservations()
    several.kill_dispatcher()
    with pytest.raises(ApiError) as refused:
        await store.reserve("r2", (PLACES,), several.clock.now_s)
    assert refused.value.kind == UNAVAILABLE
    await store.settle(held, UsedAmounts(1, 1))  # in the background from here on
    assert await store.figures([PLACES], several.clock.now_s) == []
    assert store.num_open == 1
    several.take_over()
    assert store.num_open == several.store.num_open == 0


async def test_nothing_is_kept_of_what_nobody_can_have_heard_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "WAIT_S", 0.02)
    several = Several()
    store = several.gateways[0].store
    assert await reserved(several, 0, "held", PLACES)
    several.kill_dispatcher()
    asked = [store.reserve(f"r{n}", [PLACES], 0.0) for n in range(50)]
    refused = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(one) for one in refused} == {ApiError}
    assert not store._calls
    (held,) = store.open_reservations()
    monkeypatch.setattr(remote, "CLOSE_WAIT_S", 0.01)
    await asyncio.gather(*(store.release(held) for _ in range(3)))
    assert len(store._calls) == 3
    several.take_over()
    assert not store._calls
    assert await used(several, PLACES) == 0


async def test_a_budget_is_not_granted_from_before_all_have_said_what_they_hold() -> None:
    several = Several()
    first, second = several.gateways
    assert await reserved(several, 0, "r1", MONEY)
    assert await reserved(several, 0, "r2", MONEY)
    several.kill_dispatcher()
    several.new_dispatcher()
    second.link.connect(several.server)
    several.deliver()
    asking = asyncio.create_task(second.store.reserve("r3", (MONEY,), several.clock.now_s))
    left = await begun(second.store.reserve("r4", (PLACES,), several.clock.now_s))
    await cancelled(left)
    several.deliver()
    assert not asking.done()
    first.link.connect(several.server)
    several.deliver()
    assert (await asking).reservation is None
    assert several.store.num_open == 2


async def test_who_does_not_come_is_waited_for_a_while() -> None:
    several = Several()
    several.kill_dispatcher()
    several.new_dispatcher()
    several.gateways[1].link.connect(several.server)
    several.advance(0.5)
    store = several.gateways[1].store
    asking = await begun(store.reserve("r1", (MONEY,), several.clock.now_s))
    several.advance(GATHER_S - 0.5)
    assert not asking.done()
    several.advance(0.5)
    assert (await asking).reservation is not None


async def test_money_of_a_dead_gateway_is_held_as_long_as_nobody_is_in_its_place() -> None:
    """What it used is in its journal until then: no budget may be granted from meanwhile."""
    several = Several()
    assert await reserved(several, 0, "r1", MONEY)
    assert await reserved(several, 0, "r2", MONEY)
    several.gateways[0].link.cut()
    several.advance(3 * ORPHAN_HOLD_S)
    assert await used(several, MONEY) == 80
    several.kill_gateway(0)
    several.deliver()
    several.advance(ORPHAN_HOLD_S - 1)
    assert await used(several, MONEY) == 80
    several.advance(2)
    assert await used(several, MONEY) == 0


async def test_what_was_granted_and_not_told_is_taken_anew_after_a_cut() -> None:
    several = Several()
    gateway = several.gateways[0]
    asking = await begun(gateway.store.reserve("r1", (PLACES, MONEY), several.clock.now_s))
    assert gateway.link.deliver_out()
    gateway.link.connect(several.server)
    several.deliver()
    held = (await asking).reservation
    assert held is not None
    assert (await used(several, PLACES), await used(several, MONEY)) == (1, 40)
    several.advance(ORPHAN_HOLD_S + 1)
    await answered(several, gateway.store.settle(held, UsedAmounts(1, 1, 30)))
    assert (await used(several, PLACES), await used(several, MONEY)) == (0, 30)


async def test_what_is_asked_before_the_welcome_is_asked_once() -> None:
    several = Several()
    first, second = several.gateways
    assert await reserved(several, 1, "r1", PLACES)
    assert await reserved(several, 1, "r2", PLACES)
    first.link.connect(several.server)
    asking = await begun(first.store.reserve("r3", (PLACES,), several.clock.now_s))
    while first.link.deliver_out():
        pass
    assert first.link.deliver_in()
    held = next(r for r in second.store.open_reservations() if r.id == "r1")
    closing = await begun(second.store.release(held))
    assert second.link.deliver_out()
    several.deliver()
    await asyncio.gather(asking, closing)
    assert several.store.num_open == first.store.num_open + second.store.num_open


async def test_who_leaves_in_the_turn_of_the_answer_holds_nothing() -> None:
    several = Several()
    store = several.gateways[0].store
    asking = await begun(store.reserve("r1", (PLACES,), several.clock.now_s))
    several.deliver()
    await cancelled(asking)
    several.deliver()
    assert store.num_open == several.store.num_open == 0


async def test_counts_of_many_are_told_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RESTORE_SLICE", 2)
    several = Several()
    store = several.gateways[0].store
    pasts = [Past(f"tenant {i} cost day", 0, period=7, spent=i) for i in range(5)]
    telling = asyncio.create_task(store.restore(pasts, several.clock.now_s))
    while not telling.done():
        await asyncio.sleep(0)
        assert len(several.gateways[0].link.outbox) <= 1
        several.deliver()
    assert all(several.store.knows(past.name) for past in pasts)


@pytest.mark.parametrize("is_read_at_once", [False, True])
@pytest.mark.parametrize("is_answered", [False, True])
async def test_what_was_spent_a_moment_before_a_takeover_counts_once_in_the_end(
    is_read_at_once: bool, is_answered: bool
) -> None:
    """Its posting may be in what the next dispatcher reads first, or come behind it: a budget is
    never short of it, and exact once the ledger has been read again."""
    several = Several()
    first = several.gateways[0].store
    assert await reserved(several, 0, "r1", MONEY, PLACES)
    (held,) = first.open_reservations()
    closing = await begun(first.settle(held, UsedAmounts(1, 1, 30, 7, 7)))
    if is_answered:
        several.deliver()
    several.kill_dispatcher()
    several.new_dispatcher()
    past = Past(MONEY.name, 0, period=7, spent=30)
    if is_read_at_once:
        await several.store.restore([past], several.clock.now_s)
    for gateway in several.gateways:
        gateway.link.connect(several.server)
    several.deliver()
    await closing
    assert await used(several, MONEY) == (60 if is_read_at_once else 30)
    assert await used(several, PLACES) == 0
    await several.store.restore([past], several.clock.now_s)
    several.server.read_again()
    assert await used(several, MONEY) == 30
    several.gateways[0].link.connect(several.server)  # the same one: it knows
    several.deliver()
    assert await used(several, MONEY) == 30
