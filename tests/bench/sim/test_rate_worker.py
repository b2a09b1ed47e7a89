"""A worker that serves by rate: times as said, and never more than it has."""

import pytest

from bench.sim.fleet_world import Ask, FleetWorld
from bench.sim.rate_worker import Rates

GIB = 1 << 30
RATES = Rates(arena_bytes=25 * GIB, load_overhead_s=0.5, disk_bytes_per_s=10 * GIB)


def world(num_workers: int = 1, num_models: int = 3) -> FleetWorld:
    """Two of the models fit on a worker."""
    return FleetWorld(num_workers, {f"m{n}": 10 * GIB for n in range(num_models)}, rates=RATES)


def test_one_request_takes_its_load_its_prompt_and_its_tokens() -> None:
    one = world()
    one.loop.run(2.0)
    one.ask(Ask(0, "m0", 1000, 101))
    one.loop.run(60.0)
    (first_s,) = one.seen.first_token_s
    token_s = RATES.step_s + RATES.row_s
    prompt_s = 1000 * RATES.prefill_s * token_s / RATES.step_s
    assert first_s == pytest.approx(1.5 + prompt_s + token_s, abs=0.1)  # and statuses
    assert one.seen.ended == {"length": 1}
    assert one.workers[0].counts.tokens == 101


def test_those_that_run_share_the_device() -> None:
    rates = []
    for number in (1, 32):
        one = world()
        one.loop.run(2.0)
        one.ask(Ask(0, "m0", 10, 2))
        one.loop.run(6.0)  # the model is there
        for _ in range(number):
            one.ask(Ask(0, "m0", 10, 400))
        began_s = one.loop.now_s
        while one.seen.ended["length"] <= number:
            one.loop.run(one.loop.now_s + 0.1)
        rates.append(number * 400 / (one.loop.now_s - began_s))
    alone, together = RATES.step_s + RATES.row_s, (RATES.step_s + 32 * RATES.row_s) / 32
    assert rates == [pytest.approx(1 / alone, rel=0.05), pytest.approx(1 / together, rel=0.05)]


def test_service_adds_up_to_the_time_of_the_device() -> None:
    one = world()
    one.loop.run(2.0)
    for number in range(20):
        one.ask(Ask(number % 3, f"m{number % 2}", 10, 50 + number))
    one.loop.run(60.0)
    assert one.seen.ended == {"length": 20}
    served_s = sum(one.dispatcher.snapshot().service_s_by_tenant.values())
    work_s = sum((RATES.step_s + RATES.row_s) * (50 + number) for number in range(20))
    assert 0 < served_s < work_s  # they ran together


def test_a_crowd_over_few_workers_swaps_and_is_served() -> None:
    several = world(num_workers=3, num_models=9)
    rng = several.rng

    def draw() -> Ask:
        return Ask(rng.randrange(4), f"m{rng.randrange(9)}", 100, rng.randrange(1, 50))

    several.arrive(draw, per_s=20.0, until_s=30.0)
    several.loop.run(120.0)
    assert several.seen.ended["length"] > 500
    assert not set(several.seen.ended) - {"length", "service_unavailable"}
    for worker in several.workers:
        assert worker.num_running == 0
        assert worker.free_bytes == RATES.arena_bytes - 10 * GIB * len(worker.resident)
        assert worker.counts.loads > 2
    several.requests.check_integrity()


def test_a_worker_that_is_lost_comes_back_empty() -> None:
    two = world(num_workers=2)
    two.loop.run(2.0)
    for number in range(4):
        two.ask(Ask(number, "m0", 10, 2000))
    two.loop.run(6.0)
    (busy,) = [worker for worker in two.workers if worker.num_running]
    busy.lose("killed by signal 9", "process")
    two.loop.run(7.0)
    busy.restart()
    two.loop.run(300.0)
    assert two.seen.ended == {"length": 4}  # all had tokens, and went on from them
    assert len(two.seen.first_token_s) == 4  # a stream has one beginning
    two.requests.check_integrity()
