"""Priorities: which of one tenant's waiting requests goes first, and nothing between tenants."""

import msgspec

from tests.gateway.cluster.several_kit import Several
from tests.gateway.scripted_worker import ScriptedWorker, prepared, principal, served


def run_out(worker: ScriptedWorker) -> list[str]:
    """The order in which everything was served."""
    while worker.running:
        worker.finish(next(iter(worker.running))[0])
        worker.status()
    return worker.submitted


async def test_the_lowest_goes_first_then_the_oldest() -> None:
    rig, worker = served(num_requests=1)
    for request_id, priority in (("runs", 9), ("a", 0), ("b", 1), ("c", -1), ("d", 0), ("e", -1)):
        rig.ask(request_id, "t", priority=priority)
    rig.dispatcher.check_integrity()
    worker.status()
    assert run_out(worker) == ["runs", "c", "e", "a", "d", "b"]


async def test_other_tenants_turns_are_as_they_were() -> None:
    orders = []
    for priority in (0, -1000):
        rig, worker = served(num_requests=1)
        rig.ask("runs", "x")
        for number in range(4):
            rig.ask(f"a{number}", "a", priority=priority * (number % 2))
            rig.ask(f"b{number}", "b")
        worker.status()
        orders.append([name[0] for name in run_out(worker)])
    assert orders[0] == orders[1]


async def test_one_that_comes_back_from_a_worker_takes_its_place() -> None:
    rig, worker = served(num_requests=1)
    rig.ask("first", "t", priority=5)
    rig.ask("later", "t", priority=5)
    worker.refuse("first", "overloaded", retryable=True)
    rig.ask("urgent", "t", priority=0)
    worker.status()
    assert run_out(worker) == ["first", "urgent", "first", "later"]


async def test_it_holds_over_gateway_processes_and_a_change_of_dispatcher() -> None:
    several = Several(num_requests=1)
    one, two = several.gateways
    several.ask(one, "runs")
    for gateway, request_id, priority in ((one, "a", 1), (two, "b", 0), (one, "c", -1)):
        several.clock.now_s += 0.001
        request = msgspec.structs.replace(prepared(request_id), priority=priority)
        gateway.dispatcher.run(request, principal("a"))
    several.deliver()
    several.kill_dispatcher()
    several.take_over()
    while several.worker.running:
        several.worker.finish(*next(iter(several.worker.running)))
        several.settle()
    assert [name for name, _ in several.worker.submitted] == ["runs", "c", "b", "a"]
