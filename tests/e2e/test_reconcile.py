"""Twenty seconds of everything at once: clients, limits and ledger agree to the token."""

from pathlib import Path

import pytest

from bench import reconcile

pytestmark = pytest.mark.e2e


def test_limits_and_ledger_agree_with_what_clients_saw(tmp_path: Path) -> None:
    wrong, told = reconcile.run(tmp_path, 20.0, tenants=40, connections=80, think_s=1.0)
    assert not wrong, "\n".join(wrong[:20])
    assert set(told["ends"]) >= {"done", "left", "error", "refused"}
    assert told["budgets_probed_to_the_token"] + told["token_limits_probed"] > 0
