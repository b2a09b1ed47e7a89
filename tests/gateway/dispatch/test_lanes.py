"""Class batch in the dispatcher: strictly last, invisible to all others, and never starved."""

import random
from pathlib import Path

import msgspec
import pytest

from engine.protocol import LoadModel, Submit
from gateway.dispatch.counter_checkpoint import CounterCheckpoint, LeadFile
from gateway.dispatch.policy.fair_share import FairShare, UsedService
from gateway.errors import QUEUE_FULL, ApiError
from gateway.settings.settings import Settings
from gateway.types import BatchWindow
from tests.gateway.cluster.several_kit import Several
from tests.gateway.scripted_worker import Rig, ScriptedWorker, prepared, principal, served


def submits(worker: ScriptedWorker) -> dict[str, Submit]:
    """The last of each request."""
    return {m.request_id: m for m in worker.sent if isinstance(m, Submit)}


async def test_others_go_first_whoever_they_are() -> None:
    rig, worker = served(num_requests=1)
    rig.ask("runs", "a")
    for number in range(3):
        rig.ask(f"batch{number}", "b", is_batch=True)
    for number in range(3):
        rig.ask(f"live{number}", "a")
    while worker.running:
        worker.finish(next(iter(worker.running))[0], service_s=5.0)
        worker.status()
    assert worker.submitted == ["runs", "live0", "live1", "live2", "batch0", "batch1", "batch2"]


async def test_what_runs_of_class_batch_takes_no_room_from_others() -> None:
    rig, worker = served(num_requests=2, kv_tokens=20)
    for number in range(4):
        rig.ask(f"batch{number}", "b", is_batch=True)
    worker.status()
    assert worker.submitted == ["batch0", "batch1"]
    rig.ask("live0", "a")
    rig.ask("live1", "a")
    assert worker.submitted == ["batch0", "batch1", "live0", "live1"]
    worker.finish("batch0")
    worker.status()  # two rows, both of others
    assert "batch2" not in worker.submitted
    assert not any(submit.is_batch for name, submit in submits(worker).items() if "live" in name)


def history(seed: int, *, with_batch: bool) -> list[str]:
    """The grants of other requests, in a random history with or without class batch."""
    rng, batch_rng = random.Random(seed), random.Random(-seed)
    rig = Rig(Settings(max_queue_total=40, max_queue_per_tenant=12))
    states = {"m": "resident", "n": "resident", "o": "cold"}
    worker = rig.worker(num_requests=rng.choice((2, 4, 9)), kv_tokens=400, states=states)
    num_asked = 0
    for number in range(200):
        rig.clock.now_s += 0.01
        act = rng.random()
        if act < 0.25:
            tenant, size = rng.choice("abc"), rng.randint(1, 60)
            try:
                name, longest = f"live{num_asked}", rng.randint(1, 40)
                rig.ask(name, tenant, rng.choice("mn"), prompt=size, max_tokens=longest)
            except ApiError:
                pass
            num_asked += 1
        elif act < 0.75:
            live = [key for key, submit in worker.running.items() if not submit.is_batch]
            if live:
                worker.finish(rng.choice(live)[0], service_s=rng.random())
        else:
            worker.status()
        if with_batch and batch_rng.random() < 0.6:
            window = BatchWindow(0.0, 1e9)
            try:
                tenant, model = batch_rng.choice("abd"), batch_rng.choice("mn")
                rig.ask(f"batch{number}", tenant, model, is_batch=True, window=window)
            except ApiError as error:
                if error.kind is not QUEUE_FULL:
                    raise
            batch = [key for key, submit in worker.running.items() if submit.is_batch]
            if batch and batch_rng.random() < 0.5:
                worker.finish(batch_rng.choice(batch)[0], service_s=batch_rng.random())
        rig.dispatcher.check_integrity()
    if with_batch:
        assert sum("batch" in name for name in worker.submitted) > 5
    return [name for name in worker.submitted if "live" in name]


@pytest.mark.parametrize("seed", range(12))
async def test_no_turn_of_others_depends_on_class_batch(seed: int) -> None:
    assert history(seed, with_batch=True) == history(seed, with_batch=False)


async def test_each_class_has_the_bounds_of_the_queue_for_itself() -> None:
    settings = Settings(max_queue_per_tenant=3, max_queue_total=4)
    rig, _ = served(settings, num_requests=1)
    rig.ask("runs", "x")
    for number in range(3):
        rig.ask(f"batch{number}", "b", is_batch=True)
    with pytest.raises(ApiError, match="the queue of your tenant is full"):
        rig.ask("batch3", "b", is_batch=True)
    for number in range(3):
        rig.ask(f"live{number}", "b")
    snapshot = rig.dispatcher.snapshot()
    assert (snapshot.num_waiting, snapshot.waiting_by_tenant) == (6, {"b": 6})
    assert snapshot.num_queue_rejections == 1


async def test_in_the_last_fifth_of_its_time_in_the_queue_it_is_an_ordinary_request() -> None:
    rig, worker = served(Settings(queue_timeout_s=100.0), num_requests=1)
    rig.ask("runs", "a")
    rig.ask("flex", "b", is_batch=True)
    rig.advance(79.0)
    rig.ask("before", "a")
    worker.finish("runs")
    worker.status()
    rig.advance(2.0)
    rig.ask("later", "a")
    worker.finish("before", service_s=3.0)
    worker.status()
    assert worker.submitted == ["runs", "before", "flex"]
    assert not submits(worker)["flex"].is_batch


async def test_who_has_become_an_ordinary_request_is_not_the_oldest_of_the_others() -> None:
    rig, _ = served(num_requests=1)
    rig.ask("runs", "a")
    now_s = rig.clock.now_s
    rig.ask("late", "c", is_batch=True, window=BatchWindow(now_s, now_s + 5.0))
    rig.ask("waits", "c", is_batch=True)
    rig.advance(4.7)
    rig.dispatcher.check_integrity()


async def test_a_line_that_gives_way_too_long_goes_on_as_the_next_attempt() -> None:
    """The end of its window is near: from the tokens that it has, and no longer as class batch."""
    rig, worker = served(num_requests=2)
    now_s = rig.clock.now_s
    rig.ask("line", "b", is_batch=True, window=BatchWindow(now_s, now_s + 1000.0, behind_s=100.0))
    worker.tokens("line", 0, 1)
    rig.ask("live", "a")
    rig.advance(690.0)
    worker.status()
    assert worker.submitted == ["line", "live"]
    rig.advance(15.0)  # with what comes behind it, it would end at 805
    worker.status()
    assert worker.submitted == ["line", "live", "line/2"]
    again = submits(worker)["line"]
    assert (again.is_batch, again.generated, worker.aborted) == (False, [0, 1], ["line"])


async def test_it_does_not_wait_where_its_model_has_left() -> None:
    rig, worker = served(num_requests=2)
    rig.ask("line", "b", is_batch=True)
    assert worker.submitted == ["line"]
    worker.states = {"m": "warm", "n": "resident"}
    worker.status()
    assert worker.aborted == ["line"]


def loads(worker: ScriptedWorker) -> list[LoadModel]:
    """What it was told to load."""
    return [message for message in worker.sent if isinstance(message, LoadModel)]


async def test_a_load_waits_until_it_pays_and_evicts_nothing_that_is_wanted() -> None:
    rig = Rig()
    worker = rig.worker(arena_bytes=1500, kv_tokens=10)  # room for one model
    rig.ask("live", "a")
    rig.ask("line", "b", "n", is_batch=True, window=BatchWindow(0.0, 1e6))
    for _ in range(40):
        rig.advance(1.0)
        worker.status()
    assert not loads(worker)  # the other one is at work
    worker.finish("live")
    for _ in range(20):
        rig.advance(60.0)  # and is asked for no more
        worker.status()
    assert loads(worker)[0].is_batch
    assert loads(worker)[0].model_id == "n"


async def test_one_line_waits_for_twenty_load_times_and_many_do_not() -> None:
    waited = []
    for num_lines in (1, 200):
        rig = Rig(Settings(max_queue_per_tenant=1000, max_queue_total=1000))
        worker = rig.worker()
        for number in range(num_lines):
            window = BatchWindow(rig.clock.now_s, rig.clock.now_s + 1e6)
            rig.ask(f"line{number}", "b", "n", is_batch=True, window=window)
        began_s = rig.clock.now_s
        while not loads(worker):
            rig.advance(0.5)
            worker.status()
        waited.append(rig.clock.now_s - began_s)
    assert waited[0] == pytest.approx(20 * 0.5, abs=1.0)  # a load takes 0.5 s
    assert waited[1] <= 1.0


async def test_what_others_come_to_wait_for_is_their_load() -> None:
    rig = Rig()
    worker = rig.worker()
    rig.ask("line", "b", "n", is_batch=True, window=BatchWindow(0.0, 1e6))
    while not loads(worker):
        rig.advance(0.5)
        worker.status()
    rig.ask("live", "a", "n")
    rig.advance(0.1)
    assert [message.is_batch for message in loads(worker)] == [True, False]


async def test_it_makes_no_model_popular() -> None:
    rig = Rig()
    rig.worker()
    for number in range(20):
        rig.ask(f"line{number}", "b", "n", is_batch=True)
    popularity = rig.local.dispatcher._loads._popularity
    assert popularity.asks_s("n", rig.clock.now_s) == 0.0
    rig.ask("live", "a", "n")
    assert popularity.asks_s("n", rig.clock.now_s) > 0.0


async def test_the_class_crosses_gateway_processes_and_a_change_of_dispatcher() -> None:
    several = Several(num_requests=1)
    one, two = several.gateways
    several.ask(one, "runs")
    asked_by = principal("b", is_batch=True, window=BatchWindow(0.0, 1e6))
    one.dispatcher.run(prepared("line"), asked_by)
    several.deliver()
    several.kill_dispatcher()
    several.take_over()
    several.clock.now_s += 0.001
    several.ask(two, "live")
    several.deliver()
    order = []
    while several.worker.running:
        name, attempt = next(iter(several.worker.running))
        order.append(name)
        several.worker.finish(name, attempt)
        several.worker.status()
        several.deliver()
    assert order == ["runs", "live", "line"]


async def test_both_orders_outlive_a_restart(tmp_path: Path) -> None:
    def shares(lead: float, batch_lead: float) -> tuple[FairShare, FairShare]:
        made = FairShare(100.0), FairShare(100.0)
        for share, ahead in zip(made, (lead, batch_lead), strict=True):
            for tenant_id in ("low", "high"):
                share.enqueue(tenant_id, 1.0)
            share.charge("high", UsedService(ahead))
        return made

    await CounterCheckpoint(LeadFile(tmp_path), *shares(3.0, 7.0)).write()
    again = FairShare(100.0), FairShare(100.0)
    await CounterCheckpoint(LeadFile(tmp_path), *again).load()
    assert [share.counter("high") for share in again] == [3.0, 7.0]


async def test_a_request_may_ask_for_the_class() -> None:
    rig, worker = served()
    request = msgspec.structs.replace(prepared("flex"), is_batch=True)
    rig.dispatcher.run(request, principal("a"))
    assert submits(worker)["flex"].is_batch


async def test_why_it_waits_is_said() -> None:
    rig, worker = served(num_requests=1)
    rig.ask("live", "a")
    worker.status()
    rig.ask("line", "b", is_batch=True)
    (reason,) = rig.dispatcher.explain("line")
    assert reason.code == "worker full"
