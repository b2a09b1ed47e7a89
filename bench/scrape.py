"""What a scrape of /metrics takes from the event loop, with many models that were all used.

    python -m bench.scrape [--models 1000] [--workers 4] [--rounds 20] [--output FILE]

The registry is the gateway's own, filled through the product's counters; a worker's status names
every model. Per round, interleaved:

    beside   as /metrics does it: `MetricsRegistry.take` on the loop, text in a thread
    on       the same registry by prometheus-client's `generate_latest`, on the loop

`take_ms`: on the loop. `text_ms`: all of it. `late_ms`: the longest that a task was late which
wakes every millisecond meanwhile, as a token would be. `own_late_ms`: the same with nothing
else to do: the machine's.
"""

import argparse
import asyncio
import dataclasses
import gc
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

from prometheus_client import generate_latest

from bench.machine import facts
from bench.stats import spread
from engine.protocol import ModelStatus, WorkerStatus
from gateway.metrics.families import MetricsRegistry, MetricsText
from gateway.metrics.metrics import Metrics, watch_process
from gateway.metrics.state_metrics import StateCollector
from gateway.protocols import DispatcherSnapshot, LedgerSnapshot
from gateway.server.process_setup import GC_THRESHOLDS
from gateway.types import AnswerNote

ROUTE = "/v1/chat/completions"
TICK_S = 0.001


def filled(num_models: int, num_workers: int) -> MetricsRegistry:
    """As a gateway that has served each model."""
    registry, names = MetricsRegistry(), [f"org/model-{n}" for n in range(num_models)]
    watch_process(registry)
    metrics = Metrics(registry, lambda: names)
    for name in names:
        for histogram in (
            metrics.time_to_first_token,
            metrics.inter_token_latency,
            metrics.e2e_request_latency,
            metrics.request_queue_time,
            metrics.prefill_time,
            metrics.decode_time,
            metrics.time_per_output_token,
            metrics.prompt_length,
            metrics.output_length,
        ):
            histogram.of(name).observe(0.123, 7)
        metrics.prompt_tokens.add(100, name)
        metrics.answers.add(ROUTE, AnswerNote(name))
        metrics.request_success.add(1, name, "stop")
    statuses = [_status(f"worker-{n}", names) for n in range(num_workers)]
    dispatcher, ledger = mock.Mock(ready=True), mock.Mock()
    dispatcher.worker_statuses.return_value = statuses
    dispatcher.snapshot.return_value = DispatcherSnapshot(running_by_model=dict.fromkeys(names, 1))
    numbers: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(LedgerSnapshot)}
    ledger.snapshot.return_value = LedgerSnapshot(**numbers)
    about = dispatcher, ledger, lambda: 0
    registry.register(StateCollector(*about, models=lambda: names))
    return registry


def _status(worker_id: str, names: list[str]) -> WorkerStatus:
    pages = {f"{name}/weights": 4 for name in names}
    models = [ModelStatus(name, "cold", 0, 0, 0, 0, -1.0) for name in names]
    counters = {"steps": 1.0, "preemptions": 0.0}
    return WorkerStatus("e", worker_id, 1, 1, 2.0, 65536, 10_000, pages, models, [], [], counters)


async def watched(work: Callable[[], Awaitable[None]]) -> float:
    """Milliseconds that a ticking task was late at most during `work`."""
    worst_s, over = 0.0, False

    async def tick() -> None:
        nonlocal worst_s
        while not over:
            before_s = time.perf_counter()
            await asyncio.sleep(TICK_S)
            worst_s = max(worst_s, time.perf_counter() - before_s - TICK_S)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    await work()
    over = True
    await ticking
    return worst_s * 1000


async def measure(registry: MetricsRegistry, rounds: int) -> dict[str, Any]:
    """The figures of both ways."""
    found: dict[str, list[float]] = {
        f"{way}_{figure}": []
        for way, figures in (("beside", ("take_ms", "text_ms", "late_ms")), ("on", ("late_ms",)))
        for figure in figures
    }
    own: list[float] = []
    shown, sizes = MetricsText(), set()

    async def beside() -> None:
        began_s = time.perf_counter()
        build = registry.take()
        taken_s = time.perf_counter()
        text = await asyncio.to_thread(lambda: shown.text(build(), 0.0))
        found["beside_take_ms"].append((taken_s - began_s) * 1000)
        found["beside_text_ms"].append((time.perf_counter() - began_s) * 1000)
        sizes.add(len(text))

    async def on() -> None:
        generate_latest(registry)

    for _ in range(rounds):
        own.append(await watched(lambda: asyncio.sleep(0.1)))
        found["beside_late_ms"].append(await watched(beside))
        found["on_late_ms"].append(await watched(on))
    told = {name: spread(values) for name, values in (found | {"own_late_ms": own}).items()}
    return {"text_bytes": max(sizes), **told}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    registry = filled(options.models, options.workers)
    gc.collect()
    gc.freeze()  # as a gateway process does when it is set up
    gc.set_threshold(*GC_THRESHOLDS)
    about = {"num_models": options.models, "num_workers": options.workers}
    figures = asyncio.run(measure(registry, options.rounds))
    text = json.dumps({"machine": facts(), **about, **figures}, indent=2)
    if options.output:
        options.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
