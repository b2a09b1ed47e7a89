"""The row by which servers elect a dispatcher: one of several gets it, and epochs only rise."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine

from registry.servers import dispatcher_leases as leases
from registry.servers.dispatcher_leases import LeaseRow
from registry.session import make_engine

TTL_S = 0.4


@pytest.fixture
def engine(postgres_url: str) -> Iterator[Engine]:
    made = make_engine(postgres_url)
    yield made
    made.dispose()


def take(
    engine: Engine, seen: LeaseRow | None, who: str, least: int = 0, *, at_once: bool = False
) -> int | None:
    return leases.take(engine, seen, who, f"{who}:1", TTL_S, least, at_once=at_once)


def test_the_row_is_taken_as_it_was_seen_and_only_when_it_has_run_out(engine: Engine) -> None:
    assert leases.read(engine) is None
    before_at = int(time.time())
    first = take(engine, None, "a")
    assert first is not None
    assert before_at <= first <= time.time()
    assert take(engine, None, "b") is None
    seen = leases.read(engine)
    assert seen is not None
    assert seen[:3] == ("a", "a:1", first)
    assert take(engine, seen, "b") is None  # It holds.
    time.sleep(TTL_S)
    assert leases.renew(engine, "a", first, TTL_S)
    assert take(engine, seen, "b") is None  # It was renewed since.
    time.sleep(TTL_S)
    second = take(engine, leases.read(engine), "b", least=first + 100)
    assert second == first + 100
    assert not leases.renew(engine, "a", first, TTL_S)
    leases.give_up(engine, "a", first)
    now = leases.read(engine)
    assert now is not None
    assert now.until_at > 0
    third = take(engine, now, "b", at_once=True)
    assert third == second + 1
    leases.give_up(engine, "b", third)
    given_up = leases.read(engine)
    assert given_up is not None
    assert given_up.until_at == 0
    assert take(engine, given_up, "a") == third + 1


@pytest.mark.parametrize("is_there", [False, True])
def test_of_many_that_take_it_one_gets_it(
    engine: Engine, postgres_url: str, is_there: bool
) -> None:
    row = None
    if is_there:
        take(engine, None, "a")
        row = leases.read(engine)
    engines = [make_engine(postgres_url) for _ in range(8)]
    ready = threading.Barrier(8)

    def one(index: int) -> int | None:
        with engines[index].connect():  # or what differs is when they connect
            pass
        ready.wait()
        return take(engines[index], row, f"s{index}", at_once=True)

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(one, range(8)))
    assert len([epoch for epoch in got if epoch is not None]) == 1
    for other in engines:
        other.dispose()


def test_a_clock_that_was_set_back_does_not_keep_the_row_for_ever(engine: Engine) -> None:
    epoch = leases.take(engine, None, "a", "a:1", 3600.0, 0, at_once=False)
    row = leases.read(engine)
    assert take(engine, row, "b") == (epoch or 0) + 1


def test_leads_are_the_present_holder_s_to_write(engine: Engine) -> None:
    assert leases.read_leads(engine) == {}
    first = take(engine, None, "a")
    assert first is not None
    assert leases.read_leads(engine) == {}
    assert leases.write_leads(engine, first, {"leads": {"ten_1": 1.5}})
    second = take(engine, leases.read(engine), "b", at_once=True)
    assert second is not None
    assert leases.read_leads(engine) == {"leads": {"ten_1": 1.5}}
    assert not leases.write_leads(engine, first, {"leads": {"ten_1": 9.0}})
    assert leases.write_leads(engine, second, {"leads": {"ten_2": 0.25}})
    assert leases.read_leads(engine) == {"leads": {"ten_2": 0.25}}
