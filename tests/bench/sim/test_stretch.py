"""Many steps at one go against single steps: the same run to the last bit."""

from itertools import pairwise

import pytest

from bench.sim.fast_forward import Steps
from bench.sim.parts import PLAIN_TOKEN
from bench.sim.run import Simulation
from bench.sim.stretch import Stretch
from bench.sim.types import Records, Run, World
from tests.bench.sim.small import small_load, small_world


def run_of(world: World, number: int, rate: float, seed: int, *, skips: bool) -> Run:
    """With `poll_s` 0 nothing is modelled otherwise than by single steps."""
    simulation = Simulation(world, small_load(number, rate, seed))
    for worker in simulation.workers:
        worker.skips, worker.poll_s = skips, 0.0
    simulation.start()
    simulation.loop.run()
    return simulation.finish()


@pytest.mark.parametrize(
    ("seed", "settings"),
    [
        (0, {}),
        (1, {"max_num_seqs": 4}),
        (2, {"max_num_seqs": 8, "min_run_steps": 1}),
        (3, {"prefix_cache": False}),
        (4, {"max_num_seqs": 2, "max_batch_tokens": 64, "tenant_kv_share": 0.3}),
        (5, {"block_tokens": 32, "kv_low_watermark": 0.0}),
    ],
)
def test_stretches_change_nothing(seed: int, settings: dict[str, object]) -> None:
    world = small_world(settings=settings)
    quick = run_of(world, 90, 20, seed, skips=True)
    slow = run_of(world, 90, 20, seed, skips=False)
    for column in Records.__slots__:
        assert list(getattr(quick.records, column)) == pytest.approx(
            list(getattr(slow.records, column)), rel=1e-12, nan_ok=True
        ), column
    assert quick.swaps == slow.swaps
    for one, other in zip(quick.samples, slow.samples, strict=True):
        assert (one.pages, one.waiting, one.running) == (other.pages, other.waiting, other.running)
        assert one.busy_s == pytest.approx(other.busy_s, rel=1e-12)
        assert one.service_s == pytest.approx(other.service_s, rel=1e-12)
    assert quick.counters["engine_steps"] == slow.counters["engine_steps"]
    assert quick.counters["engine_generation_tokens"] == slow.counters["engine_generation_tokens"]
    assert slow.counters["steps_skipped"] == 0
    assert quick.counters["steps_skipped"] > 0.5 * quick.counters["engine_steps"]


def test_a_stretch_ends_where_a_message_comes() -> None:
    """In the midst of a step: after it. At the end of one: then. Before all: at once."""
    simulation = Simulation(small_world(workers=1, models=1), small_load(1, 5, output=900))
    simulation.start()
    worker = simulation.workers[0]

    def stretch() -> Stretch:
        while worker.process is None or worker.process.stretch is None:
            simulation.loop.run(simulation.loop.now_s + 0.001)
        return worker.process.stretch

    found = stretch()
    ends_s = list(found.ends_s)
    assert len(ends_s) > 8
    assert found.cut((ends_s[5] + ends_s[6]) / 2)
    assert found.end_s == ends_s[6]
    assert not found.cut(ends_s[7])
    assert found.cut(ends_s[3])
    assert found.end_s == ends_s[3]
    found.advance_begun(ends_s[1])  # the third step has begun
    assert found.num_done == 3
    found.cut(found.start_s)
    assert found.end_s == ends_s[2], "what has been brought in stays"
    assert [len(delta.token_ids) for delta in found.deltas()] == [3]
    assert found.deltas()[0].token_ids == [PLAIN_TOKEN] * 3


def test_steps_are_cut_by_unit() -> None:
    starts = [float(n) for n in range(9)]
    steps = Steps([(0, 0, 3), (1, 0, 4), (0, 3, 5)], starts, [1.0] * 9)
    assert steps.of_models(2) == [[0, 1, 2, 7, 8], [3, 4, 5, 6]]
    part = steps.cut(2, 8)
    assert part.blocks == [(0, 0, 1), (1, 0, 4), (0, 1, 2)]
    assert part.starts_s == starts[2:8]
    assert part.of_models(2) == [[0, 5], [1, 2, 3, 4]]
    assert all(b - a == 1 for a, b in pairwise(part.starts_s))
