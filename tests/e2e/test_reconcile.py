"""Everything at once: clients, limits and ledger agree to the token. Ten minutes are a soak."""

import tempfile
import threading
from pathlib import Path

import pytest

from gateway.limits.shared_store import PACE
from tests.e2e import reconcile
from tests.e2e.conftest import Prepared
from tests.redis_kit import RedisServer

pytestmark = pytest.mark.e2e


def test_limits_and_ledger_agree_with_what_clients_saw(prepared: Prepared, tmp_path: Path) -> None:
    data_dir = prepared.copy_to(tmp_path)
    wrong, told = reconcile.run(data_dir, 10.0, tenants=40, connections=80, think_s=1.0)
    assert not wrong, "\n".join(wrong[:20])
    assert set(told["ends"]) >= {"done", "left", "error", "refused"}
    assert told["budgets_probed_to_the_token"] + told["token_limits_probed"] > 0


@pytest.mark.soak
def test_they_agree_over_two_gateways_and_a_redis_that_hangs(
    prepared: Prepared, tmp_path: Path
) -> None:
    """Of two gateways one that grants without Redis may add its share to a rate, to no budget. What
    Redis holds of requests that went without it is found at two looks and given back."""
    with tempfile.TemporaryDirectory(prefix="polyhost-redis-") as folder:
        redis, over = RedisServer(Path(folder)), threading.Event()

        def hang() -> None:
            while not over.wait(1.0):
                redis.pause()
                over.wait(0.12)
                redis.resume()

        redis.start()
        hanging = threading.Thread(target=hang)
        hanging.start()
        settings = {"gateway_processes": 2, "redis_url": redis.url}
        try:
            wrong, _ = reconcile.run(
                prepared.copy_to(tmp_path),
                120.0,
                think_s=1.5,
                settings=settings,
                rate_slack=1.5,
                quiet_s=3 * PACE.reconcile_s,
            )
        finally:
            over.set()
            hanging.join()
            redis.stop()
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.soak
def test_they_agree_after_ten_minutes_in_flat_memory(prepared: Prepared, tmp_path: Path) -> None:
    wrong, told = reconcile.run(prepared.copy_to(tmp_path), 600.0)
    assert not wrong, "\n".join(wrong[:20])
    assert told["budgets_probed_to_the_token"] > 0
    assert told["token_limits_probed"] > 0
