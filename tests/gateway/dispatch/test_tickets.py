"""Tickets: the table of states and events, second tries; and the stream of a request's events."""

import asyncio
import weakref
from copy import copy
from itertools import product
from typing import get_args

import pytest

from engine.protocol import Finish, Usage
from gateway.dispatch.policy.service_costs import Prediction
from gateway.dispatch.tickets import TRANSITIONS, RequestStream, Ticket, TicketEvent, TicketState
from gateway.errors import IllegalTransition, WorkerLost
from gateway.types import TokenEvent
from tests.gateway.scripted_worker import prepared

STATES: tuple[TicketState, ...] = get_args(TicketState)
EVENTS: tuple[TicketEvent, ...] = get_args(TicketEvent)


def ticket_in(state: TicketState) -> Ticket:
    stream = RequestStream(100, on_abort=lambda: None, queue_s=lambda: 0.0)
    return Ticket(
        prepared("a"), "t", 1.0, 1, 5.0, 35.0, Prediction(1, 0.1), stream, 605.0, state=state
    )


@pytest.mark.parametrize(("state", "event"), [*product(STATES, EVENTS)])
def test_an_event_does_what_the_table_says_or_nothing(
    state: TicketState, event: TicketEvent
) -> None:
    ticket = ticket_in(state)
    before = copy(ticket)
    if event in TRANSITIONS[state]:
        ticket.on(event)
        assert ticket.state == TRANSITIONS[state][event]
        return
    with pytest.raises(IllegalTransition, match=f"request .'a', 1.: '{event}' while {state}"):
        ticket.on(event)
    assert all(getattr(ticket, name) == getattr(before, name) for name in Ticket.__struct_fields__)


def test_a_grant_names_the_worker_and_an_illegal_one_does_not() -> None:
    ticket = ticket_in("waiting")
    ticket.grant("w", "e", 7.0)
    assert (ticket.state, ticket.worker_id, ticket.epoch, ticket.granted_s) == (
        *("granted", "w", "e"),
        7.0,
    )
    with pytest.raises(IllegalTransition):
        ticket.grant("other", "f", 8.0)
    assert (ticket.worker_id, ticket.epoch, ticket.granted_s) == ("w", "e", 7.0)


def test_a_second_attempt_may_wait_as_long_as_the_first() -> None:
    ticket = ticket_in("granted")
    ticket.on("worker_lost")
    ticket.next_attempt(20.0)
    assert (ticket.state, ticket.key, ticket.deadline_s) == ("waiting", ("a", 2), 50.0)
    assert isinstance(ticket.stream, RequestStream)
    assert (ticket.stream.attempt, ticket.ends_by_s) == (2, 605.0)
    ticket.next_attempt(100.0, 5)
    assert (ticket.key, ticket.deadline_s) == (("a", 5), 130.0)


def test_a_later_attempt_has_the_tokens_and_the_waits_of_those_before() -> None:
    ticket = ticket_in("waiting")
    assert not ticket.has_tokens
    for now_s in (10.0, 50.0):
        ticket.grant("w", "e", now_s)
        ticket.on("token")
        ticket.num_tokens += 3
        assert ticket.queue_s(now_s + 30.0) == ticket.waited_s + now_s - ticket.queued_s
        ticket.on("move")
        ticket.next_attempt(now_s + 30.0)
    assert (ticket.num_tokens, ticket.num_before, ticket.has_tokens) == (0, 6, True)
    assert (ticket.waited_s, ticket.queue_s(82.0)) == (5.0 + 10.0, 17.0)


STOP = Finish("stop", Usage(3, 0, 2, 0.5))


def stream_of(max_buffer_tokens: int = 100) -> RequestStream:
    return RequestStream(max_buffer_tokens, on_abort=lambda: None, queue_s=lambda: 1.5)


async def collect(stream: RequestStream) -> list[TokenEvent]:
    return [event async for event in stream]


async def test_tokens_that_wait_are_one_event_and_the_finish_comes_with_them() -> None:
    stream = stream_of()
    assert stream.put([1])
    assert stream.put([2, 3])
    assert (await anext(stream)).token_ids == [1, 2, 3]
    stream.put([4])
    stream.finish(STOP)
    assert await collect(stream) == [TokenEvent([4], STOP)]
    assert await collect(stream) == []


async def test_a_waiting_consumer_is_woken() -> None:
    stream = stream_of()
    task = asyncio.create_task(collect(stream))
    await asyncio.sleep(0)
    stream.put([1])
    await asyncio.sleep(0)
    stream.put([2])
    stream.finish(STOP)
    assert await task == [TokenEvent([1]), TokenEvent([2], STOP)]


async def test_an_error_comes_after_the_tokens_and_once() -> None:
    stream = stream_of()
    stream.put([1])
    stream.finish(WorkerLost("killed"))
    stream.finish(STOP)
    assert await anext(stream) == TokenEvent([1])
    with pytest.raises(WorkerLost, match="killed"):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_reader_that_does_not_read_loses_tokens_but_not_the_end() -> None:
    stream = stream_of(max_buffer_tokens=2)
    assert stream.put([1, 2])
    assert not stream.put([3])
    assert stream.overflowed
    assert not stream.put([4])
    stream.finish(STOP)
    assert await collect(stream) == [TokenEvent([1, 2], STOP)]


async def test_abort_is_passed_on_until_the_end() -> None:
    aborts: list[int] = []
    stream = RequestStream(9, on_abort=lambda: aborts.append(1), queue_s=lambda: 0.0)
    stream.abort()
    stream.finish(STOP)
    stream.abort()
    assert aborts == [1]


async def test_a_cancelled_wait_leaves_the_stream_usable() -> None:
    stream = stream_of()
    task = asyncio.create_task(collect(stream))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    stream.put([7])
    stream.finish(STOP)
    assert await collect(stream) == [TokenEvent([7], STOP)]


async def test_one_consumer_only() -> None:
    stream = stream_of()
    task = asyncio.create_task(collect(stream))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="one consumer"):
        await anext(stream)
    stream.finish(STOP)
    await task


async def test_attempt_and_queue_time_are_visible() -> None:
    stream = stream_of()
    assert (stream.attempt, stream.queue_s) == (1, 1.5)
    stream.retry(2)
    assert stream.attempt == 2


def test_after_the_end_it_keeps_nothing_of_whoever_made_it() -> None:
    """Who made it has it: the two would be a circle."""

    class Maker:
        num_aborted = 0
        waited_s = 1.5

        def abort(self) -> None:
            self.num_aborted += 1

        def queue_s(self) -> float:
            return self.waited_s

    maker = Maker()
    kept = weakref.ref(maker)
    stream = RequestStream(100, on_abort=maker.abort, queue_s=maker.queue_s)
    stream.abort()
    stream.finish(STOP)
    stream.abort()
    assert (maker.num_aborted, stream.queue_s) == (1, 1.5)
    maker.waited_s = 9.0
    del maker
    assert kept() is None
    assert stream.queue_s == 1.5
