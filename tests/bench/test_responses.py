"""The benchmark of stored responses measures responses that are there."""

import os
from pathlib import Path

import pytest

from bench import responses
from bench.responses import BATCH, CHAIN, Filled


def test_what_it_fills_is_what_the_product_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, number in (("NUM_READS", 20), ("NUM_STORES", 3), ("NUM_CHAINS", 3)):
        monkeypatch.setattr(responses, name, number)
    filled = Filled(tmp_path, f"sqlite:///{tmp_path / 'polyhost.db'}", 2)
    fsync = os.fsync
    with responses.without_syncs():
        filled.fill(range(3 * CHAIN), CHAIN)
        assert os.fsync is not fsync
    assert os.fsync is fsync, "what is timed is synced"
    earlier = filled.store.earlier(filled.viewer(CHAIN - 1), f"resp_{CHAIN - 1:032x}")
    assert (earlier.depth, len(earlier.items)) == (CHAIN, 2 * CHAIN)
    figures = responses.measure(filled, 3 * CHAIN)
    filled.engine.dispose()
    assert set(figures) == {
        "read",
        "missing",
        "earlier_10",
        "earlier_999",
        "store",
        "remove",
        "sweep_s",
    }
    assert all(figures[name]["p50"] <= figures[name]["p99"] for name in set(figures) - {"sweep_s"})
    assert len(list(filled.objects.list())) == 3 * CHAIN + BATCH - 1
