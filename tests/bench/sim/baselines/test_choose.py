"""Policies by name, and every one of them at work in a whole simulation."""

import itertools
import re
from collections import Counter
from pathlib import Path

import pytest

from bench.sim.baselines import choose
from bench.sim.baselines.choose import NAMES, DispatchPolicies, make_eviction, parse_policies
from bench.sim.baselines.sharing import Fcfs
from bench.sim.devices import DEVICES
from bench.sim.run import simulate
from bench.sim.spec import parse_workload
from bench.sim.types import OUTCOMES, REFUSED_COUNTER, Run, World
from bench.sim.workloads import open_workload
from bench.sim.worlds import make_models, make_tenants
from engine.residency.policy.eviction_rules import EvictionParams
from gateway.dispatch.policy.fair_share import NOTHING, UsedService

CALM, CROWDED = "rate=6,seconds=12", "rate=40,seconds=4"
EVERY = [(kind, name) for kind, names in NAMES.items() for name in names]


def simulated(policies: dict[str, str], load: str = CALM) -> Run:
    """Twelve small models on two small devices, of which one holds about a third."""
    settings: dict[str, object] = {"arena_bytes": 1 << 30}
    world = World(
        2,
        DEVICES["cpu-2"],
        make_models(12, 1, "tiny"),
        make_tenants(4, 1),
        settings=settings,
        policies=policies,
    )
    spec = parse_workload(f"synthetic:{load},scale=0.05,top_share=0.5")
    workload, future = (open_workload(spec, 4, 12, 1) for _ in range(2))
    return simulate(world, workload, check_every=20, future=future)


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_every_policy_serves_a_world(kind: str, name: str) -> None:
    run = simulated({kind: name})
    assert len(run.records) > 50
    outcomes = {OUTCOMES[code] for code in run.records.outcome}
    if (kind, name) == ("evict", "never"):
        # Whoever comes too late for a place waits until the queue gives up.
        assert "stop" in outcomes
        loads, gone = (
            Counter(swap.model for swap in run.swaps if swap.kind == kind)
            for kind in ("load", "evict")
        )
        # What leaves is a copy that the dispatcher gave up, never the last one.
        assert all(gone[model] < loads[model] for model in gone)
    else:
        assert outcomes == {"stop"}
        assert [swap for swap in run.swaps if swap.kind == "evict"]


def test_policies_differ_and_repeat() -> None:
    ends = {
        name: list(simulated({kind: name}, CROWDED).records.ended_s)
        for kind, name in (("evict", "ours"), ("evict", "lru"), ("share", "fcfs"))
    }
    assert ends["lru"] == list(simulated({"evict": "lru"}, CROWDED).records.ended_s)
    assert all(a != b for a, b in itertools.combinations(ends.values(), 2))


def test_a_static_split_loads_each_model_on_one_worker() -> None:
    run = simulated({"place": "static"})
    places = {(swap.model, swap.worker) for swap in run.swaps if swap.kind == "load"}
    assert len(places) == len({model for model, _ in places})


class Ledger(Fcfs):
    """First come, first served, and what each tenant was charged in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.service_s: Counter[str] = Counter()
        self.units: Counter[str] = Counter()

    def charge(self, tenant_id: str, used: UsedService, expected: UsedService = NOTHING) -> None:
        """While it runs, and for loads."""
        self.service_s[tenant_id] += used.service_s  # type: ignore[assignment]
        self.units[tenant_id] += used.units  # type: ignore[assignment]


def test_charges_are_what_was_used_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger()
    monkeypatch.setattr(DispatchPolicies, "share", lambda policies: ledger)
    run = simulated({})
    records, counters = run.records, run.counters
    units = Counter[str]()
    for row, number in enumerate(records.tenant):
        tenant = f"tenant{number}"
        uncached = records.prompt_tokens[row] - records.cached_tokens[row]
        units[tenant] += uncached + 2 * records.output_tokens[row]
    service_s = ledger.service_s.total() - counters["load_seconds_charged"]
    assert service_s == pytest.approx(sum(records.service_s))
    loads_s = counters["load_seconds_charged"] + counters["load_seconds_system"]
    # Of loads that wait for one another nobody pays for the waiting.
    took_s = sum(swap.duration_s for swap in run.swaps if swap.kind == "load")
    assert 0.7 * took_s < loads_s <= took_s * (1 + 1e-9)
    assert counters["load_seconds_charged"] > 0.5 * loads_s
    assert ledger.units == pytest.approx(units)


def test_refusals_are_counted_by_their_reason() -> None:
    world = World(
        1,
        DEVICES["cpu-2"],
        make_models(1, 1, "tiny"),
        make_tenants(1, 1),
        settings={"max_queue_per_tenant": 5},
    )
    run = simulate(world, open_workload(parse_workload(f"synthetic:{CROWDED}"), 1, 1, 1))
    refused = list(run.records.outcome).count(OUTCOMES.index("refused"))
    assert refused > 20
    by_reason = {k: v for k, v in run.counters.items() if k.startswith(REFUSED_COUNTER)}
    assert sum(by_reason.values()) == refused
    assert by_reason["refused:queue_full"] > 20


def test_no_entry_is_ours() -> None:
    params = EvictionParams()
    assert make_eviction({}, params, None, {}) is None
    assert make_eviction({"evict": "ours"}, params, None, {}) is None
    policies = DispatchPolicies({}, {})
    assert policies.share() is None
    assert policies.placement() is None


def test_books_are_new_for_each_dispatcher() -> None:
    policies = DispatchPolicies({"share": "round_robin", "place": "static"}, {"a": "w0"})
    assert policies.share() is not policies.share()
    assert policies.placement() is not policies.placement()


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ({"order": "lru"}, "no kind of policy 'order': one of evict, share, place"),
        ({"evict": "random"}, "no evict policy 'random': one of ours, lru"),
        ({"evict": "idle:soon"}, "write seconds, such as idle:30"),
        ({"evict": "lru:3"}, "lru has no seconds"),
    ],
)
def test_a_mistake_is_told(policies: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_policies(policies)


def test_seconds_are_read() -> None:
    assert parse_policies({"evict": "idle:12.5"})["evict"].seconds == 12.5


def test_belady_has_to_be_told_the_future() -> None:
    with pytest.raises(ValueError, match="give the workload twice"):
        make_eviction({"evict": "belady"}, EvictionParams(), None, {})


def test_every_policy_is_documented() -> None:
    page = (Path(choose.__file__).parents[3] / "docs" / "simulator.md").read_text(encoding="utf-8")
    names = [name for names in NAMES.values() for name in names if name != choose.OURS]
    assert not [name for name in names if not re.search(rf"`{name}[`:]", page)]
