"""With several gateway processes: each posting says what it bore of its model's load, once."""

import pytest

from engine.protocol import Finish
from gateway.cluster.load_shares import WAIT_S
from gateway.dispatch.tickets import RequestStream
from tests.gateway.cluster.several_kit import Several


def loaded(*tenants: str, seconds: float = 8.0) -> Several:
    """A request of each tenant, at each gateway in turn, waited while the model was loaded."""
    several = Several(num_requests=0)
    for number, tenant in enumerate(tenants):
        several.ask(several.gateways[number % 2], tenant, tenant)
    several.worker.num_requests = 8
    several.worker.load(seconds)
    several.settle()
    assert len(several.worker.running) == len(tenants)
    return several


def finish_of(stream: RequestStream) -> Finish | None:
    """What has ended it, if anything has."""
    while (event := stream.take()) is not None:
        if event.finish is not None:
            return event.finish
    return None


def load_s(several: Several, request_id: str) -> float | None:
    """As its posting will say; None: it has not ended for its client."""
    streams = {name: one for gateway in several.gateways for name, one in gateway.streams.items()}
    finish = finish_of(streams[request_id])
    return None if finish is None else finish.usage.load_s


async def test_the_dispatchers_share_is_on_the_end_that_its_gateway_tells() -> None:
    several = loaded("x", "y")
    several.worker.finish("y", service_s=3.0)
    assert load_s(several, "y") is None, "its gateway does not know yet"
    several.deliver()
    assert load_s(several, "y") == pytest.approx(3.0)
    several.worker.finish("x", service_s=7.0)
    several.deliver()
    assert load_s(several, "x") == pytest.approx(5.0), "what was left of 8"


async def test_all_that_requests_bear_together_is_the_load() -> None:
    several = loaded("x", "y", seconds=1.0)
    one, two = several.gateways
    for number in range(20):
        (one, two)[number % 2].ask(f"r{number}", "z", max_tokens=2)
    several.worker.num_requests = 30
    several.settle()
    for request_id, attempt in list(several.worker.running):
        several.worker.finish(request_id, attempt, service_s=0.09)
    several.deliver()
    names = ["x", "y", *(f"r{number}" for number in range(20))]
    told = [load_s(several, name) for name in names]
    assert None not in told
    assert sum(share or 0.0 for share in told) == pytest.approx(1.0)


async def test_nobody_waits_where_nothing_is_owed() -> None:
    several = Several()
    stream = several.ask(several.gateways[0], "r")
    several.worker.finish("r")
    finish = finish_of(stream)
    assert finish is not None, "without a word of the dispatcher"
    assert finish.usage.load_s == 0.0


async def test_where_the_dispatcher_dies_the_load_is_nobodys() -> None:
    several = loaded("x")
    several.worker.finish("x", service_s=3.0)
    several.kill_dispatcher()
    assert load_s(several, "x") == 0.0
    several.take_over()


async def test_where_it_has_died_before_nobody_waits() -> None:
    several = loaded("x")
    several.kill_dispatcher()
    several.worker.finish("x", service_s=3.0)
    assert load_s(several, "x") == 0.0


async def test_a_dispatcher_that_says_nothing_is_waited_for_a_bounded_time() -> None:
    several = loaded("x")
    (gateway, _) = several.gateways
    several.worker.finish("x", service_s=3.0)
    several.clock.now_s += WAIT_S - 0.01
    gateway.dispatcher.tick()
    assert load_s(several, "x") is None
    several.clock.now_s += 0.02
    gateway.dispatcher.tick()
    assert load_s(several, "x") == 0.0
    several.deliver()
    several.check()


async def test_a_client_that_leaves_while_the_end_waits_changes_nothing() -> None:
    several = loaded("x")
    several.worker.finish("x", service_s=3.0)
    several.gateways[0].streams["x"].abort()
    several.deliver()
    assert load_s(several, "x") == pytest.approx(3.0)


async def test_at_a_stop_nothing_is_kept_back() -> None:
    several = loaded("x")
    several.worker.finish("x", service_s=3.0)
    several.gateways[0].dispatcher.abort_all()
    assert load_s(several, "x") == 0.0


async def test_a_second_attempt_bears_nothing_of_a_load_that_was_lost() -> None:
    several = loaded("x")
    several.worker.die()
    several.worker.start()
    several.deliver()
    assert list(several.worker.running) == [("x", 2)]
    several.worker.finish("x", 2, service_s=3.0)
    assert load_s(several, "x") == 0.0
