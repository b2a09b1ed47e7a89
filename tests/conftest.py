"""What every test shares: one thread for torch, reproducible property tests, the order of files.

Fixtures of a room live in that room's own conftest.
"""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
# The files of this room share servers.
E2E = "tests/e2e/"
# What takes longest, begun first, so that no process works alone at the end. CPU seconds of one
# core: 90, 30, 30, 20, and some 10 each.
LONGEST = (
    E2E,
    "tests/kernels/test_aot.py",
    "tests/engine/constraints/test_constrained_rows.py",
    "tests/engine/test_engine_pressure.py",
    "tests/engine/test_engine.py",
    "tests/kernels/test_delta_rule.py",
    "tests/kernels/test_ssd.py",
    "tests/engine/worker/test_worker_real.py",
    "tests/engine/running/test_parity_mixes.py",
    "tests/engine/test_engine_stateful.py",
    "tests/engine/encoders/test_encoder_engine.py",
    "tests/engine/sampling/test_sampler.py",
    "tests/engine/constraints/test_constraints.py",
    "tests/admin/registration/test_registration.py",
    "tests/admin/registration/test_registration_kills.py",
    "tests/admin/cli/test_simulate.py",
    "tests/gateway/cache/test_answer_stores.py",
    "tests/gateway/cache/test_redis_answers.py",
    "tests/registry/test_migrations.py",
    "tests/gateway/cluster/test_dispatcher_lease.py",
    "tests/gateway/cluster/policy/test_election.py",
    "tests/admin/test_pages_in_a_browser.py",
)

pytest_plugins = ("tests.postgres",)

# Kernels are interpreted. Triton reads this when it is imported, which any test may be the first to
# do; kernels run only where a test launches them, so nothing else is touched.
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Benches that are run in this process switch logging off."""
    before = logging.root.manager.disable
    yield
    logging.disable(before)


settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests run beside servers on small machines; torch is imported only by those that need it.

    What has been imported stays, so the garbage collector need not look through it again: with
    torch and transformers that is half a second each time, and benches collect before each run.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long ones first, all else as it was found."""
    gone = [name for name in LONGEST if not (ROOT / name).exists()]
    assert not gone, f"LONGEST names what there is not: {gone}"

    def rank(item: pytest.Item) -> int:
        places = (n for n, name in enumerate(LONGEST) if item.nodeid.startswith(name))
        return next(places, len(LONGEST))

    items.sort(key=rank)


class Scheduling(LoadFileScheduling):  # type: ignore[misc]
    """pytest-xdist's `--dist loadfile`, with the files that share servers in one process too."""

    def _split_scope(self, nodeid: str) -> str:
        return E2E if nodeid.startswith(E2E) else str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    """In our order; else the files with the fewest tests would come last, which are the longest."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return Scheduling(config, log)
