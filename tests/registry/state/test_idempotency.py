"""Keys of requests that are made once, on both databases."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from sqlalchemy import Engine

from registry.session import appending
from registry.state import idempotency
from registry.state.idempotency import KEEP_S, IdempotencyRecord

WANTED = IdempotencyRecord("ten_1", "k" * 64, "b" * 64, "resp_1", False, 1000.0)


def claim(engine: Engine, wanted: IdempotencyRecord) -> IdempotencyRecord | None:
    with appending(engine, "test") as session:
        return idempotency.claim(session, wanted, claim_s=60.0)


def test_a_key_is_claimed_once(engine: Engine) -> None:
    assert claim(engine, WANTED) is None
    again = replace(WANTED, response_id="resp_2", created_at=1001.0)
    assert claim(engine, again) == WANTED
    assert claim(engine, replace(again, tenant_id="ten_2", response_id="resp_3")) is None
    assert claim(engine, replace(again, key_sha256="x" * 64, response_id="resp_4")) is None
    with appending(engine, "test") as session:
        idempotency.keep(session, "ten_1", "resp_1")
    assert claim(engine, again) == replace(WANTED, is_kept=True)


def test_a_request_that_came_to_nothing_frees_its_key(engine: Engine) -> None:
    claim(engine, WANTED)
    with appending(engine, "test") as session:
        idempotency.release(session, "ten_2", "resp_1")
    again = replace(WANTED, response_id="resp_2", created_at=1001.0)
    assert claim(engine, again) == WANTED
    with appending(engine, "test") as session:
        idempotency.release(session, "ten_1", "resp_1")
    assert claim(engine, again) is None


def test_the_claim_of_a_dead_process_is_given_on(engine: Engine) -> None:
    claim(engine, WANTED)
    later = replace(WANTED, response_id="resp_2", created_at=1059.0)
    assert claim(engine, later) == WANTED
    assert claim(engine, replace(later, created_at=1061.0)) is None


def test_a_kept_key_holds_for_a_day(engine: Engine) -> None:
    claim(engine, WANTED)
    with appending(engine, "test") as session:
        idempotency.keep(session, "ten_1", "resp_1")
    later = replace(WANTED, response_id="resp_2", created_at=1000.0 + KEEP_S - 1)
    assert claim(engine, later) == replace(WANTED, is_kept=True)
    assert claim(engine, replace(later, created_at=1001.0 + KEEP_S)) is None


def test_old_keys_are_removed(engine: Engine) -> None:
    claim(engine, WANTED)
    claim(engine, replace(WANTED, key_sha256="x" * 64, response_id="resp_2", created_at=2000.0))
    with appending(engine, "test") as session:
        assert idempotency.remove_before(session, 1500.0) == 1
        assert idempotency.remove_before(session, 1500.0) == 0


def test_of_many_at_once_one_has_the_key(engine: Engine) -> None:
    start = threading.Barrier(4)

    def ask(number: int) -> IdempotencyRecord | None:
        start.wait()
        return claim(engine, replace(WANTED, response_id=f"resp_{number}"))

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(ask, range(4)))
    [winner] = [number for number, held in enumerate(found) if held is None]
    assert {held.response_id for held in found if held is not None} == {f"resp_{winner}"}
