"""What every test shares: one thread for torch and reproducible property tests.

Fixtures of a room live in that room's own conftest.
"""

import sys

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests run beside servers on small machines; torch is imported only by those that need it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
