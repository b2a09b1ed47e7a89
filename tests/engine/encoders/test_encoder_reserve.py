"""The estimate of an encoder's step outside the arena, held against what steps really take."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from engine.config import EngineConfig
from engine.encoders.encoder_batch import EncoderBatch
from engine.memory.reserve import step_bytes
from engine.packs.pack import read_index
from tests.engine.encoder_rig import POSITIONS
from tests.engine.encoders.test_encoder_engine import EncoderDriver, Encoders


@pytest.mark.parametrize("name", ["bert", "modernbert", "xlm-roberta"])
def test_no_step_takes_more_than_was_estimated(
    encoders: Encoders, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = EncoderDriver(encoders, max_batch_tokens=4 * POSITIONS)
    driver.make_resident(name)
    runner = driver.encoder(name)
    encode, peaks = runner.encode, []

    def metered(batch: EncoderBatch) -> torch.Tensor:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            rows = encode(batch)
        trace = tmp_path / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
        changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
        alive = 0
        for _, change in changes:
            alive += change
            peaks.append(alive)
        return rows

    monkeypatch.setattr(runner, "encode", metered)
    driver.encode("long", name, [[5] * POSITIONS] * 8)
    driver.encode("short", name, [[5]] * 60)
    driver.run(lambda: len(driver.finishes) == 2)
    config = EngineConfig(arena_bytes=600 * 8192, shm_prefix="t", max_batch_tokens=4 * POSITIONS)
    estimate = step_bytes(read_index(encoders[name].pack_dir), config)
    assert max(peaks) <= estimate
    assert estimate < 20 * max(peaks)  # it refuses models: it must not be absurd


def test_the_longest_input_makes_the_largest_step(encoders: Encoders) -> None:
    index = read_index(encoders["bert"].pack_dir)
    config = EngineConfig(arena_bytes=1 << 20, shm_prefix="t", max_batch_tokens=64)
    longer = msgspec.structs.replace(index, max_context=8192)
    assert step_bytes(longer, config) > 50 * step_bytes(index, config)


def test_a_model_whose_steps_need_more_is_not_loaded(encoders: Encoders) -> None:
    driver = EncoderDriver(encoders, reserve_bytes=1000)
    driver.engine.load("bert", driver.now_s)
    (row,) = driver.engine.status(driver.now_s).models
    assert row.state == "failed"
    assert "reserve_bytes is 1000" in row.reason
