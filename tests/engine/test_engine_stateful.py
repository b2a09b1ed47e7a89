"""The engine's memory over random lives: nothing lost, shared wrongly, read after free, or leaked.

Two ways into the same worlds (`stamp_life.py`): a walk drawn from a seed, quick enough for a
hundred thousand steps, and a hypothesis machine whose failures shrink. After every step the stamps
of all positions that the step read, the weights' bytes, the engine's integrity, and every request's
tokens and usage have been compared; at the end everything is unloaded and every page is free.

    .venv/bin/python -m tests.engine.stamp_life SEED STEPS      one walk again, with its events
"""

import gc
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from engine.errors import RequestRefused
from engine.protocol import ModelSpec
from tests.engine.engine_hooks import compact, move_kv, move_weights
from tests.engine.stamp_life import FAULTS, TENANTS, Life

WALK_STEPS = 150
FEW_WALKS = 10
LONG_WALK_STEPS = 500
SOAK_STEPS = 100_000
# What must have happened in a soak, and how often at least.
EVENTS = {
    "requests": 8000,
    "model steps": 60_000,
    "positions read": 20_000_000,
    "states read": 20_000,
    "lost tokens": 3000,
    "hits": 1000,
    "preemptions": 500,
    "swaps: load": 1000,
    "swaps: evict": 800,
    "kv_evicted_pages": 10_000,
    "kv_moved_pages": 5000,
    "weights_moved_pages": 500,
    "kv_compactions": 300,
    "forced kv moves": 300,
    "forced weight moves": 300,
    "faults": 300,
    "aborts": 800,
    "catalogs": 200,
    "ended: length": 4000,
    "ended: stop": 500,
    "ended: abort": 500,
    "ended: timeout": 1000,
    "ended: error": 400,
}


def walks(folder: Path, seeds: Sequence[int], num_steps: int) -> Counter[str]:
    """Lives one after the other; their events together."""
    total: Counter[str] = Counter()
    for seed in seeds:
        own = folder / str(seed)
        life = Life(own, seed)
        try:
            total.update(life.walk(num_steps))
        except BaseException:
            print(f"life of seed {seed}, at step {life.rig.events['steps']} of {num_steps}")
            raise
        total["lives"] += 1
        shutil.rmtree(own)
        if total["lives"] % 20 == 0:
            gc.collect()  # arenas hang in cycles, and their size is nothing the collector sees
    return total


def test_random_walks(tmp_path: Path) -> None:
    total = walks(tmp_path, range(FEW_WALKS), WALK_STEPS)
    assert total["steps"] >= FEW_WALKS * WALK_STEPS
    for event in (
        "hits",
        "states read",
        "lost tokens",
        "preemptions",
        "swaps: evict",
        "kv_moved_pages",
        "ended: error",
    ):
        assert total[event], (event, total)


def test_random_walks_with_steps_in_a_thread(tmp_path: Path) -> None:
    for seed in range(2):
        Life(tmp_path / str(seed), 900 + seed, "thread").walk(WALK_STEPS)


@pytest.mark.soak
def test_a_hundred_thousand_random_steps(tmp_path: Path) -> None:
    num_lives = SOAK_STEPS // LONG_WALK_STEPS
    total = walks(tmp_path, range(10_000, 10_000 + num_lives), LONG_WALK_STEPS)
    for event, count in sorted(total.items()):
        print(f"{count:>12,}  {event}")
    assert total["steps"] >= SOAK_STEPS
    rare = {event: total[event] for event, least in EVENTS.items() if total[event] < least}
    assert not rare


class EngineMachine(RuleBasedStateMachine):
    """Actions with the choices spelled out, so that a failing list of them can shrink."""

    folder: Path
    life: Life

    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="machine-"))
        self.life = Life(self.folder / "life", seed)
        self.rig = self.life.rig

    @rule(
        number=st.integers(0, 5),
        family=st.integers(0, 2),
        cut=st.integers(1, 160),
        tail=st.lists(st.integers(0, 16), max_size=4),
        tenant=st.sampled_from(TENANTS),
        max_tokens=st.integers(1, 60),
        timeout_s=st.sampled_from((0.0, 0.0, 0.05, 1.0)),
        loses=st.booleans(),
    )
    def submit(
        self,
        number: int,
        family: int,
        cut: int,
        tail: list[int],
        tenant: str,
        max_tokens: int,
        timeout_s: float,
        loses: bool,
    ) -> None:
        name = self._model(number)
        if name is None:
            return
        pack = Path(self.rig.catalog[name].pack_dir).name
        context = self.life.shapes[pack].max_context
        prompt = [*self.life.families[pack][family][:cut], *tail][: context - 1]
        max_tokens = min(max_tokens, context - len(prompt))
        try:
            self.rig.submit(name, tenant, prompt, max_tokens, [], timeout_s, loses)
        except RequestRefused as refused:
            if refused.code == "not_resident":
                self.rig.engine.load(name, self.rig.now_s)

    @rule(
        count=st.integers(1, 12),
        after_s=st.sampled_from((0.001, 0.01, 0.3)),
        load_parts=st.sampled_from((0, 1, 50)),
    )
    def steps(self, count: int, after_s: float, load_parts: int) -> None:
        for _ in range(count):
            self.rig.step(after_s, load_parts)

    @rule(number=st.integers(0, 30))
    def abort(self, number: int) -> None:
        names = [*self.rig.open, "nobody"]
        self.rig.abort(names[number % len(names)])

    @rule(number=st.integers(0, 5))
    def load(self, number: int) -> None:
        name = self._model(number)
        if name is not None:
            self.rig.engine.load(name, self.rig.now_s)

    @rule(number=st.integers(0, 5))
    def unload(self, number: int) -> None:
        name = self._model(number)
        if name is not None:
            self.rig.engine.unload(name, self.rig.now_s)

    @rule(
        packs=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=5),
    )
    def set_catalog(self, packs: list[tuple[int, bool]]) -> None:
        known = list(self.rig.packs.values())
        self.rig.set_catalog(
            [
                ModelSpec(f"m{i}", str(known[pack % len(known)]), pinned)
                for i, (pack, pinned) in enumerate(packs)
            ]
        )

    @rule()
    def move_kv(self) -> None:
        move_kv(self.rig.engine, self.life.rng)

    @rule()
    def move_weights(self) -> None:
        move_weights(self.rig.engine, self.life.rng)

    @rule()
    def compact(self) -> None:
        compact(self.rig.engine)

    @rule(kind=st.sampled_from(FAULTS))
    def fail_a_step(self, kind: str) -> None:
        self.rig.fault(kind)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            try:
                if not self.rig.dead:
                    self.rig.end()
            finally:
                shutil.rmtree(self.folder)

    def _model(self, number: int) -> str | None:
        names = list(self.rig.catalog)
        return names[number % len(names)] if names else None


@pytest.mark.parametrize(
    ("examples", "steps"),
    [(25, 30), pytest.param(600, 60, marks=pytest.mark.soak)],
    ids=["few", "many"],
)
def test_machine(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            suppress_health_check=list(HealthCheck),
        ),
    )
