"""Drains, restarts one after another, and what becomes of requests and models meanwhile."""

import random

import pytest

from engine.protocol import Abort
from gateway.dispatch.worker_drains import AWAY_S, HANDOVER_S, LONGEST_S, RESTART_AGAIN_S
from gateway.settings.settings import Settings
from registry.models.worker_orders import WorkerOrder
from tests.gateway.scripted_worker import Rig, ScriptedWorker

TIMEOUT_S = 10.0
SETTINGS = Settings(worker_drain_timeout_s=TIMEOUT_S)
DRAINED = WorkerOrder(drained=True)


def two(**states: str) -> tuple[Rig, ScriptedWorker, ScriptedWorker]:
    rig = Rig(SETTINGS)
    one = rig.worker("one", states={"m": "resident", "n": "cold"})
    other = rig.worker("other", states={"m": "resident", "n": "cold"} | states)
    return rig, one, other


def drain(rig: Rig, *names: str) -> None:
    rig.dispatcher.drains.set_orders(dict.fromkeys(names, DRAINED))
    rig.dispatcher.tick()


def restart(rig: Rig, *names: str) -> None:
    rig.dispatcher.drains.set_orders({name: WorkerOrder(False, 1.0) for name in names})
    rig.dispatcher.tick()


def pass_time(rig: Rig, seconds: float, *workers: ScriptedWorker) -> None:
    """With heartbeats."""
    for _ in range(max(1, round(seconds))):
        rig.advance(seconds / max(1, round(seconds)))
        for worker in workers:
            report(worker)


def report(worker: ScriptedWorker) -> None:
    """A heartbeat of a worker that has obeyed."""
    for message in worker.sent:
        if isinstance(message, Abort):
            worker.running.pop((message.request_id, message.attempt), None)
    worker.status()


async def test_a_drained_worker_gets_nothing_until_it_is_resumed() -> None:
    rig, one, other = two()
    drain(rig, "one")
    assert rig.dispatcher.drains.state("one") == "drained"  # it ran nothing
    for name in "abc":
        rig.ask(name)
    assert (one.submitted, other.submitted) == ([], ["a", "b", "c"])
    one.die()
    one.connect()  # a new process is as drained as the one before
    rig.ask("d")
    assert rig.dispatcher.drains.state("one") == "drained"
    assert other.submitted == ["a", "b", "c", "d"]
    drain(rig)
    assert rig.dispatcher.drains.state("one") == "serving"
    rig.ask("e")
    assert one.submitted == ["e"]


async def test_what_runs_may_end_there() -> None:
    rig, one, other = two()
    rig.ask("a")
    assert one.submitted == ["a"]
    drain(rig, "one")
    assert rig.dispatcher.drains.state("one") == "draining"
    pass_time(rig, TIMEOUT_S - 1, one, other)
    assert one.aborted == []
    one.tokens("a", 1)
    one.finish("a")
    one.status()
    assert rig.dispatcher.drains.state("one") == "drained"
    assert other.submitted == []


async def test_what_does_not_end_in_time_goes_on_elsewhere_with_its_tokens() -> None:
    rig, one, other = two()
    stream = rig.ask("a")
    one.tokens("a", 7, 8)
    drain(rig, "one")
    pass_time(rig, TIMEOUT_S + 1, one, other)
    assert one.aborted == ["a"]
    assert other.submitted == ["a/2"]
    assert other.running["a", 2].generated == [7, 8]
    assert rig.dispatcher.drains.state("one") == "drained"
    other.tokens("a", 9, attempt=2)
    other.finish("a", attempt=2, generated=3)
    assert [t for event in [e async for e in stream] for t in event.token_ids] == [7, 8, 9]


async def test_alone_it_keeps_what_it_runs_but_for_a_restart() -> None:
    rig = Rig(SETTINGS)
    one = rig.worker("one")
    rig.ask("a")
    drain(rig, "one")
    pass_time(rig, 3 * TIMEOUT_S, one)
    assert one.aborted == []  # nobody else could go on with it
    asked: list[str] = []
    rig.dispatcher.drains.on_restart = asked.append
    restart(rig, "one")
    assert one.aborted == ["a"]
    report(one)
    assert asked == ["one"]
    one.started_at = 60.0
    one.die("planned")
    one.connect()
    assert one.submitted == ["a", "a/2"]
    assert rig.dispatcher.drains.state("one") == "serving"


async def test_why_says_that_every_worker_is_drained() -> None:
    rig, one, other = two()
    drain(rig, "one", "other")
    rig.ask("a")
    (reason,) = rig.dispatcher.explain("a")
    assert (reason.code, reason.text) == (
        "workers drained",
        "every worker is drained or about to restart",
    )
    assert one.submitted == other.submitted == []


async def test_what_a_dispatcher_before_granted_is_waited_for() -> None:
    """It is in nobody's books here until its gateway says hello; a restart waits for a while."""
    rig, one, other = two()
    one.num_foreign = 2
    one.status()
    asked: list[str] = []
    rig.dispatcher.drains.on_restart = asked.append
    restart(rig, "one")
    pass_time(rig, TIMEOUT_S + LONGEST_S - 5, one, other)
    assert (rig.dispatcher.drains.state("one"), asked) == ("draining", [])
    one.num_foreign = 0
    one.status()
    assert asked == ["one"]


async def test_what_no_other_worker_can_take_stays() -> None:
    rig, one, other = two(m="failed")
    rig.ask("a")
    drain(rig, "one")
    pass_time(rig, HANDOVER_S + 2 * TIMEOUT_S, one, other)
    assert rig.dispatcher.drains.state("one") == "draining"
    assert one.aborted == []


async def test_a_load_elsewhere_is_asked_for_once() -> None:
    rig, one, other = two(m="cold")
    rig.ask("a")
    drain(rig, "one")
    pass_time(rig, 4.0, one, other)
    assert other.loads == ["m"]


async def test_nobody_restarts_while_another_is_away_unless_it_never_comes() -> None:
    rig, one, other = two()
    asked: list[str] = []
    rig.dispatcher.drains.on_restart = asked.append
    other.die()
    restart(rig, "one")
    pass_time(rig, AWAY_S - 2, one)
    assert asked == []
    pass_time(rig, 4, one)
    assert asked == ["one"]


async def test_no_request_could_be_served_where_all_are_drained() -> None:
    rig, _, _ = two()
    assert rig.dispatcher.ready
    drain(rig, "one", "other")
    assert not rig.dispatcher.ready
    drain(rig, "one")
    assert rig.dispatcher.ready


async def test_models_in_demand_are_loaded_elsewhere_first() -> None:
    rig, one, other = two(m="cold")
    running = rig.ask("a")
    assert one.submitted == ["a"]
    drain(rig, "one")
    assert rig.dispatcher.drains.state("one") == "handing_over"
    assert other.loads == ["m"]
    rig.ask("b")
    assert one.submitted == ["a", "b"]  # until the other can
    other.states["m"] = "loading"
    other.status()
    assert rig.dispatcher.drains.state("one") == "handing_over"
    other.states["m"] = "resident"
    other.status()
    one.status()
    assert rig.dispatcher.drains.state("one") == "draining"
    rig.ask("c")
    assert other.submitted == ["c"]
    assert not running.has_event


async def test_nobody_waits_for_a_model_that_cannot_be_had_elsewhere() -> None:
    rig, one, other = two(m="failed")
    rig.ask("a")
    drain(rig, "one")
    other.status()
    pass_time(rig, 6, one, other)  # as long as a claim stands
    assert rig.dispatcher.drains.state("one") == "draining"


async def test_nothing_is_loaded_on_a_worker_that_leaves() -> None:
    rig, one, other = two()
    drain(rig, "one")
    rig.ask("a", model="n")
    assert (one.loads, other.loads) == ([], ["n"])


async def test_restarts_go_one_after_another() -> None:
    rig = Rig(SETTINGS)
    workers = {name: rig.worker(name) for name in ("one", "two", "three")}
    asked: list[str] = []
    rig.dispatcher.drains.on_restart = asked.append
    restart(rig, *workers)
    done: list[str] = []
    while len(asked) < 3 or asked[-1] not in done:
        (name,) = [name for name in asked if name not in done]
        states = {other: rig.dispatcher.drains.state(other) for other in workers}
        assert [state for state in states.values() if state != "serving"] == ["drained"]
        workers[name].die("planned")
        rig.ask(f"during-{name}")
        (busy,) = [worker for worker in workers.values() if f"during-{name}" in worker.submitted]
        busy.tokens(f"during-{name}", 1)
        busy.finish(f"during-{name}")
        pass_time(rig, 1, *[w for other, w in workers.items() if other != name])
        assert len(asked) == len(done) + 1  # the next waits for this one
        workers[name].started_at = 60.0
        workers[name].connect()
        done.append(name)
        rig.dispatcher.tick()
        for worker in workers.values():
            worker.status()
        if len(done) == 3:
            break
    assert sorted(asked) == sorted(workers)
    assert {rig.dispatcher.drains.state(name) for name in workers} == {"serving"}


async def test_an_order_that_is_read_again_restarts_nothing_again() -> None:
    rig, one, other = two()
    asked: list[str] = []
    rig.dispatcher.drains.on_restart = asked.append
    restart(rig, "one")
    assert asked == ["one"]
    pass_time(rig, RESTART_AGAIN_S - 2, one, other)
    assert asked == ["one"]
    pass_time(rig, 4, one, other)  # it is still the old process
    assert asked == ["one", "one"]
    one.started_at = 51.0
    one.die()
    one.connect()
    restart(rig, "one")
    pass_time(rig, 2 * RESTART_AGAIN_S, one, other)
    assert asked == ["one", "one"]


@pytest.mark.parametrize("seed", range(25))
async def test_at_random_nothing_is_lost(seed: int) -> None:
    """Drains, restarts, deaths and requests in any order: every request ends, once."""
    rng = random.Random(seed)
    rig = Rig(Settings(worker_drain_timeout_s=3.0, queue_timeout_s=10_000.0, request_timeout_s=1e6))
    workers = {name: rig.worker(name) for name in ("one", "two", "three")}
    orders: dict[str, WorkerOrder] = {}
    wall = 100.0

    def begin(name: str) -> None:
        workers[name].started_at = wall
        workers[name].connect()

    def end(name: str) -> None:
        workers[name].die("planned")
        begin(name)

    rig.dispatcher.drains.on_restart = end
    streams = []
    for step in range(120):
        wall += 1.0
        action = rng.randrange(8)
        name = rng.choice(list(workers))
        worker = workers[name]
        order = orders.get(name, WorkerOrder())
        if action < 2:
            streams.append(rig.ask(f"r{step}", tenant_id=rng.choice("tu")))
        elif action == 2:
            orders[name] = WorkerOrder(not order.drained, order.restart_of)
        elif action == 3:
            orders[name] = WorkerOrder(order.drained, worker.started_at)
        elif action < 6 and worker.running:
            key = rng.choice(list(worker.running))
            worker.tokens(key[0], step, attempt=key[1])
            if rng.random() < 0.5:
                num = len(worker.running[key].generated) + 1
                worker.finish(key[0], attempt=key[1], generated=num)
        rig.dispatcher.drains.set_orders(orders)
        rig.advance(1.0)
        for each in workers.values():
            for key in [k for k in each.running if rig.dispatcher._running.find(*k) is None]:
                each.running.pop(key)  # aborted
            each.status()
        for each_name in workers:
            drained = rig.dispatcher.drains.state(each_name) == "drained"
            assert not (drained and rig.dispatcher.num_on(each_name))
    rig.dispatcher.drains.set_orders({})
    for _ in range(400):
        wall += 1.0
        rig.advance(1.0)
        for worker in workers.values():
            for request_id, attempt in list(worker.running):
                if rig.dispatcher._running.find(request_id, attempt) is None:
                    worker.running.pop((request_id, attempt))
                else:
                    worker.tokens(request_id, 1, attempt=attempt)
                    worker.finish(request_id, attempt=attempt)
            worker.status()
    assert not rig.dispatcher.snapshot().num_waiting
    for stream in streams:
        finishes = [event.finish for event in [e async for e in stream] if event.finish]
        assert [finish.reason for finish in finishes] == ["stop"]
