"""A head that fits on no worker: it keeps one of them, and is served."""

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gateway.settings.settings import Settings
from tests.gateway.scripted_worker import Rig, ScriptedWorker, hosted

STATES = {"m": "resident", "n": "cold"}


def crowd(num_workers: int) -> tuple[Rig, list[ScriptedWorker]]:
    """Workers full of small requests, and a head that needs nearly all of one of them."""
    rig = Rig(Settings(queue_timeout_s=600.0))
    workers = [
        rig.worker(f"w{number}", num_requests=99, kv_tokens=40, states=dict(STATES))
        for number in range(num_workers)
    ]
    for number in range(4 * num_workers):
        rig.ask(f"s{number}", "small", prompt=5, max_tokens=5)
    for worker in workers:
        worker.status()
        assert len(worker.running) == 4
    return rig, workers


def end_one(worker: ScriptedWorker) -> None:
    (request_id, attempt), _ = next(iter(worker.running.items()))
    worker.finish(request_id, attempt=attempt)
    worker.status()


@pytest.mark.parametrize("few", [0, 64])
async def test_it_keeps_one_worker_and_the_others_go_on(few: int) -> None:
    with mock.patch("gateway.dispatch.dispatcher.FEW_WORKERS", few):
        rig, workers = crowd(3)
        rig.ask("large", "big", prompt=35, max_tokens=5)
        for number in range(9):
            rig.ask(f"t{number}", f"behind{number}", prompt=5, max_tokens=5)
        for _ in range(3):
            for worker in workers:
                end_one(worker)
            rig.advance(0.05)
        late = [name for w in workers for name in w.submitted if name.startswith("t")]
        assert len(late) == 6  # three ends on each of two workers, and none on the kept one
        kept = [worker for worker in workers if len(worker.running) == 1]
        assert len(kept) == 1
        end_one(kept[0])
        assert kept[0].submitted[-1] == "large"


async def test_it_goes_where_it_fits_first_whatever_is_kept() -> None:
    rig, (one, two) = crowd(2)
    rig.ask("large", "big", prompt=35, max_tokens=5)
    end_one(one)  # one is kept
    for _ in range(4):
        (request_id, attempt), _ = next(iter(two.running.items()))
        two.finish(request_id, attempt=attempt)
    two.status()
    assert two.submitted[-1] == "large"


async def test_a_kept_worker_that_is_lost_is_replaced() -> None:
    rig, (one, two) = crowd(2)
    rig.ask("large", "big", prompt=35, max_tokens=5)
    rig.ask("behind", "other", prompt=5, max_tokens=5)
    end_one(one)
    assert rig.dispatcher.snapshot().num_waiting == 2  # one is kept
    end_one(two)
    assert two.submitted[-1] == "behind"
    one.die()
    while len(two.running) > 1:
        end_one(two)
    end_one(two)
    assert "large" in two.submitted


@hypothesis_settings(max_examples=60)
@given(
    num_workers=st.integers(2, 5),
    ends=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=60, max_size=60),
    few=st.sampled_from([0, 64]),
)
def test_a_flood_of_small_ones_does_not_starve_it(
    num_workers: int, ends: list[tuple[int, int]], few: int
) -> None:
    """Small requests of others come without end, and requests end in any order. Between two looks
    at the head every worker may have been filled again, but for the one that is kept."""
    with mock.patch("gateway.dispatch.dispatcher.FEW_WORKERS", few):
        rig, workers = crowd(num_workers)
        rig.ask("large", "big", prompt=30, max_tokens=10)
        num_ends = 0
        for turn, (which, pick) in enumerate(ends * 4):
            rig.ask(f"f{turn}", f"flood{turn % 7}", prompt=5, max_tokens=5)
            worker = workers[which % num_workers]
            if worker.running:
                request_id, attempt = list(worker.running)[pick % len(worker.running)]
                worker.finish(request_id, attempt=attempt, service_s=0.01)
                num_ends += 1
            worker.status()
            rig.advance(0.01)
            if any("large" in w.submitted for w in workers):
                break
        # Every worker that ends at all has ended more than four by then: the kept one is empty.
        visited = {which % num_workers for which, _ in ends}
        if len(visited) == num_workers:
            assert any("large" in w.submitted for w in workers)
        rig.dispatcher.check_integrity()


@pytest.mark.parametrize("few", [0, 64])
async def test_only_the_worker_that_is_kept_makes_room(few: int) -> None:
    states = {"m": "resident", "n": "resident"}
    with mock.patch("gateway.dispatch.dispatcher.FEW_WORKERS", few):
        rig = Rig(Settings(queue_timeout_s=600.0))
        workers = [
            rig.worker(f"w{number:02}", num_requests=99, kv_tokens=40, states=dict(states))
            for number in range(20)
        ]
        for number in range(80):
            rig.ask(f"s{number}", "small", prompt=5, max_tokens=5)
        for _ in range(20):  # `n` rests
            rig.advance(0.1)
            for worker in workers:
                worker.status()
        rig.ask("large", "big", prompt=35, max_tokens=5)
        for _ in range(5):
            for worker in workers:
                worker.status()
            rig.advance(0.05)
        (ticket,) = rig.dispatcher._queue
        assert {w.worker_id for w in workers if "n" in w.unloads} == {ticket.kept_on}


async def test_a_worker_that_can_never_hold_it_is_passed_over() -> None:
    rig = Rig()
    small = rig.worker("a-small", kv_tokens=20, arena_bytes=1200)
    big = rig.worker("big", kv_tokens=210)
    rig.ask("first", prompt=100, max_tokens=100)
    for worker in (small, big):
        worker.status()
    rig.ask("second", prompt=100, max_tokens=100)
    assert (small.submitted, big.submitted) == ([], ["first"])
    (ticket,) = rig.dispatcher._queue
    assert ticket.kept_on == "big"
    reason = rig.dispatcher.explain("second")[0]
    assert (reason.code, reason.worker) == ("not enough KV memory", "big")
    end_one(big)
    assert big.submitted == ["first", "second"]
    rig.dispatcher.check_integrity()


async def test_what_nobody_can_ever_hold_is_refused_by_a_worker() -> None:
    rig = Rig()
    workers = [rig.worker(name, kv_tokens=20, arena_bytes=1200) for name in ("a", "b")]
    rig.ask("large", prompt=100, max_tokens=100)
    assert sum("large" in worker.submitted for worker in workers) == 1


async def test_pinned_weights_leave_no_room() -> None:
    rig = Rig()
    rig.dispatcher.set_catalog([hosted("m"), hosted("n", pinned=True)])
    states = {"m": "resident", "n": "resident"}
    small = rig.worker("a", kv_tokens=20, arena_bytes=3200, states=dict(states))
    big = rig.worker("b", kv_tokens=20, arena_bytes=5000, states=dict(states))
    rig.ask("first", prompt=5, max_tokens=5)
    rig.ask("large", prompt=100, max_tokens=100)  # 2000 bytes, beside 2000 of weights
    assert (small.submitted, big.submitted) == (["first"], ["large"])
    small.finish("first")
    small.status()
    rig.ask("another", prompt=100, max_tokens=100)
    assert small.submitted == ["first"], "it runs nothing and cannot hold it"
