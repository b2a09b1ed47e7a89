"""Whole simulations: everything ends, once; stretches change nothing.

That another process gives the same: tests/admin/cli/test_simulate.py.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from bench.sim import worker
from bench.sim.devices import DEVICES
from bench.sim.run import simulate
from bench.sim.spec import parse_workload
from bench.sim.types import OUTCOMES, Arrival, Run, World
from bench.sim.workloads import open_workload
from bench.sim.worlds import make_models, make_tenants

SPEC = "synthetic:rate=12,requests=160,scale=0.2,aborts=0.05@4,max_tokens=300"
EXACT = ("tenant", "model", "worker", "outcome", "prompt_tokens", "cached_tokens", "output_tokens")
TIMES = ("arrival_s", "granted_s", "first_token_s", "ended_s", "service_s")


def world(workers: int = 2) -> World:
    return World(workers, DEVICES["cpu-2"], make_models(5, 1, "tiny"), make_tenants(4, 1), seed=3)


def arrivals(spec: str = SPEC) -> Iterator[Arrival]:
    return open_workload(parse_workload(spec), 4, 5, 3)


def simulated(check_every: int = 0) -> Run:
    return simulate(world(), arrivals(), check_every=check_every)


def test_every_request_ends_once_and_integrity_holds() -> None:
    run = simulated(check_every=5)
    sent = {round(a.at_s, 9) for a in arrivals()}
    records = run.records
    assert len(records) == 160
    assert {round(at_s, 9) for at_s in records.arrival_s} == sent
    outcomes = [OUTCOMES[number] for number in records.outcome]
    assert outcomes.count("error") == 0
    assert outcomes.count("stop") + outcomes.count("length") > 120
    assert {swap.kind for swap in run.swaps} >= {"load"}
    for row, asked in enumerate(records.output_tokens):
        if outcomes[row] in ("stop", "length"):
            assert asked >= 1
            assert records.arrival_s[row] <= records.granted_s[row]
            assert records.granted_s[row] < records.first_token_s[row] <= records.ended_s[row]


def test_stretches_leave_what_single_steps_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = simulated()
    monkeypatch.setattr(worker, "plan", lambda *args, **kwargs: None)
    slow = simulated()
    for name in EXACT:
        assert getattr(quick.records, name) == getattr(slow.records, name), name
    for name in TIMES:
        left, right = getattr(quick.records, name), getattr(slow.records, name)
        np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-9, err_msg=name)
    assert [(s.model, s.worker, s.kind, s.tier) for s in quick.swaps] == [
        (s.model, s.worker, s.kind, s.tier) for s in slow.swaps
    ]
    assert quick.counters["engine_steps"] == slow.counters["engine_steps"]
    assert quick.counters["steps_skipped"] > slow.counters["steps_skipped"] == 0


def test_until_ends_a_run_early() -> None:
    run = simulate(world(1), arrivals(), until_s=10.0)
    assert run.simulated_s <= 10.0
    assert run.counters["engine_steps"] > 0
    assert len(run.records) < 160
