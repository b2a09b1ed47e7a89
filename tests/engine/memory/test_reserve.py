"""The estimate of what a step needs outside the arena, held against what steps really take."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.profiler import ProfilerActivity, profile

from engine.config import EngineConfig
from engine.memory.reserve import step_bytes
from engine.packs.pack import read_index
from engine.running.batch import StepBatch
from engine.sampling.sampler import SampleOutput
from tests.engine.models import MAX_CONTEXT
from tests.engine.test_engine import Driver, Models


class PeakMeter:
    """Runs a runner's steps under the profiler; `peak_bytes` is the most that was alive at once."""

    def __init__(self, driver: Driver, model_id: str, folder: Path) -> None:
        self._runner = driver.runner(model_id)
        self._execute = self._runner.execute
        self._trace = folder / "trace.json"
        self.peak_bytes = 0
        self._runner.execute = self.execute  # type: ignore[method-assign]

    def execute(self, batch: StepBatch) -> SampleOutput:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            output = self._execute(batch)
        profiler.export_chrome_trace(str(self._trace))
        events = json.loads(self._trace.read_text())["traceEvents"]
        changes = sorted(
            (event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"
        )
        alive = 0
        for _, change in changes:
            alive += change
            self.peak_bytes = max(self.peak_bytes, alive)
        return output


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma"])
def test_no_step_takes_more_than_was_estimated(
    tiny_models: Models, name: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"max_batch_tokens": 64, "max_num_seqs": 8}
    driver = Driver(tiny_models, num_pages=400, prefix_cache=False, **settings)
    config = EngineConfig(arena_bytes=400 * 8192, shm_prefix="t", **settings)
    driver.make_resident(name)
    meter = PeakMeter(driver, name, tmp_path)
    for i in range(8):
        driver.submit(str(i), name, [2 + i] * (MAX_CONTEXT - 8), 8)
    driver.run(lambda: len(driver.finishes) == 8)
    estimate = step_bytes(read_index(tiny_models[name].pack_dir), config)
    assert meter.peak_bytes <= estimate
    assert estimate < 20 * meter.peak_bytes  # it refuses models: it must not be absurd
    driver.empty()


def test_what_the_estimate_grows_with(tiny_models: Models) -> None:
    index = read_index(tiny_models["llama"].pack_dir)

    def bytes_of(tokens: int, rows: int, **change: object) -> int:
        config = EngineConfig(
            arena_bytes=1 << 24, shm_prefix="t", max_batch_tokens=tokens, max_num_seqs=rows
        )
        return step_bytes(msgspec.structs.replace(index, **change), config)

    base = bytes_of(256, 8)
    assert bytes_of(512, 8) > base
    assert bytes_of(256, 16) > base
    assert bytes_of(256, 8, vocab_size=100_000) > base + 8 * 99_000 * 4
    assert bytes_of(256, 8, max_context=4096) > base
