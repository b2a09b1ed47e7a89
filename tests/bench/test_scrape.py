"""The benchmark of a scrape runs, and both ways show the same models."""

import asyncio

from bench.scrape import filled, measure
from gateway.metrics.families import MetricsText


def test_a_small_run_has_all_figures() -> None:
    found = asyncio.run(measure(filled(3, 2), 2))
    for name in ("beside_take_ms", "beside_text_ms", "beside_late_ms", "on_late_ms"):
        assert found[name]["n"] == 2


def test_the_registry_is_full() -> None:
    text = MetricsText().text(filled(3, 2).take()(), 0.0).decode()
    for n in range(3):
        name = f'model_name="org/model-{n}"'
        assert f"polyhost_request_generation_tokens_count{{{name}}} 7.0" in text
        assert f'polyhost_model_residency{{{name},state="cold",worker="worker-1"}} 1.0' in text
