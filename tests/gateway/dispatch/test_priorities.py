"""Priorities: which of one tenant's waiting requests goes first, and nothing between tenants."""

from dataclasses import replace

from gateway.dispatch.running import RequestStream
from tests.gateway.scripted_worker import Rig, ScriptedWorker, prepared, principal
from tests.gateway.several_kit import Several


def ask(rig: Rig, request_id: str, tenant: str, priority: int = 0) -> RequestStream:
    request = replace(prepared(request_id), priority=priority)
    return rig.dispatcher.run(request, principal(tenant))


def run_out(worker: ScriptedWorker) -> list[str]:
    """The order in which everything was served."""
    while worker.running:
        worker.finish(next(iter(worker.running))[0])
        worker.status()
    return worker.submitted


async def test_the_lowest_goes_first_then_the_oldest() -> None:
    rig = Rig()
    worker = rig.worker(num_requests=1)
    for request_id, priority in (("runs", 9), ("a", 0), ("b", 1), ("c", -1), ("d", 0), ("e", -1)):
        ask(rig, request_id, "t", priority)
    rig.dispatcher.check_integrity()
    worker.status()
    assert run_out(worker) == ["runs", "c", "e", "a", "d", "b"]


async def test_other_tenants_turns_are_as_they_were() -> None:
    orders = []
    for priority in (0, -1000):
        rig = Rig()
        worker = rig.worker(num_requests=1)
        ask(rig, "runs", "x")
        for number in range(4):
            ask(rig, f"a{number}", "a", priority * (number % 2))
            ask(rig, f"b{number}", "b")
        worker.status()
        orders.append([name[0] for name in run_out(worker)])
    assert orders[0] == orders[1]


async def test_one_that_comes_back_from_a_worker_takes_its_place() -> None:
    rig = Rig()
    worker = rig.worker(num_requests=1)
    ask(rig, "first", "t", 5)
    ask(rig, "later", "t", 5)
    worker.refuse("first", "overloaded", retryable=True)
    ask(rig, "urgent", "t", 0)
    worker.status()
    assert run_out(worker) == ["first", "urgent", "first", "later"]


async def test_it_holds_over_gateway_processes_and_a_change_of_dispatcher() -> None:
    several = Several(num_requests=1)
    one, two = several.gateways
    one.ask("runs")
    several.deliver()
    for gateway, request_id, priority in ((one, "a", 1), (two, "b", 0), (one, "c", -1)):
        several.clock.now_s += 0.001
        request = replace(prepared(request_id), priority=priority)
        gateway.dispatcher.run(request, principal("a"))
    several.deliver()
    several.kill_dispatcher()
    several.take_over()
    while several.worker.running:
        several.worker.finish(*next(iter(several.worker.running)))
        several.settle()
    assert [name for name, _ in several.worker.submitted] == ["runs", "c", "b", "a"]
