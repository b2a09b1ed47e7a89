"""What the host does for a step of a GPU: scheduling, lay-out, tokens handed out. No GPU needed.

    python -m bench.gpu_host [--rows 1 64 256] [--steps 320] [--profile]

The engine as it serves a GPU, over a device that has always just ended: a step's work is what the
host does before and after launching. Launches themselves are not in it; a recorded step has one. A
GPU waits for the host where this is longer than the step on the device. Contexts grow over block
borders meanwhile, all rows' in the same step, which `mean` counts and `median` does not.

Goal: 3 ms a step at 256 rows.
"""

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench import gpu_models
from bench.gpu_rig import Rig, Settings
from engine.backend import Event
from engine.config import EngineConfig
from engine.engine import Engine
from engine.gpu.device_sampling import SAMPLING_REFERENCE
from engine.running import StepBatch
from engine.sampling import SampleOutput
from engine.worker.garbage import settle
from engine.worker.open_device import open_streams
from kernels.flat_reference import FLAT_REFERENCE
from kernels.page_copy import page_copy_ref
from tests.engine.fake_device import FakeDevice

ARENA_BYTES = 256 << 20
CONTEXT = 128
WARM_UP = 20


class Ended:
    """Implements `engine.backend.device.Event`: reached as soon as it is made."""

    def done(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """Not at all."""

    def seconds_since(self, earlier: Event) -> float:
        """No time."""
        return 0.0


class Immediate:
    """Implements `engine.backend.device.Stream`: work is done when it is handed over."""

    def run(self, work: Callable[[], object]) -> None:
        """At once."""
        work()

    def record(self, timed: bool = False) -> Ended:
        """A mark."""
        return Ended()

    def wait_for(self, event: Event) -> None:
        """Nothing is under way."""


class InstantDevice(FakeDevice):
    """Host memory, streams that keep nothing back."""

    def stream(self, urgent: bool = False) -> Any:
        """See `Immediate`."""
        return Immediate()


class HostRig(Rig):
    """A rig whose steps compute nothing: each samples the token that follows its number."""

    def __init__(self, settings: Settings, rows: int) -> None:
        self.settings = settings
        config = EngineConfig(
            arena_bytes=ARENA_BYTES,
            shm_prefix="gpu-host",
            steps_ahead=1,
            max_num_seqs=max(rows, 1),
            max_batch_tokens=8192,
            attention_in_place=True,
            min_run_steps=1,
        )
        opened = open_streams(
            InstantDevice(), config, 1 << 20, FLAT_REFERENCE, SAMPLING_REFERENCE, page_copy_ref
        )
        make = opened.dependencies.make_runner

        def make_runner(*given: Any) -> Any:
            runner: Any = make(*given)
            runner.execute = sampled
            return runner

        dependencies = replace(opened.dependencies, make_runner=make_runner)
        self.opened = replace(opened, dependencies=dependencies)
        self.engine = Engine(config, opened.backend, dependencies)
        self._names = {}
        self._number = 0


def sampled(batch: StepBatch) -> SampleOutput:
    """A token for each row that samples."""
    count = len(batch.sampling_rows)
    return SampleOutput(torch.arange(count) % 500, torch.zeros(count, dtype=torch.bool))


def host_steps(rows: int, steps: int, profiler: cProfile.Profile | None = None) -> list[float]:
    """Seconds of each step while so many requests decode."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(Path(folder), dry=True)
        pack_dir, index = gpu_models.make_pack(gpu_models.LARGE, settings.work_dir, True)
        made = HostRig(settings, rows)
        made.host({"m": pack_dir})
        made.load("m")
        seconds = []
        new = steps + WARM_UP + 8
        with made.decoding("m", rows, CONTEXT, new, index.vocab_size, warm_up=WARM_UP) as step:
            if profiler is not None:
                profiler.enable()
            for _ in range(steps):
                begin = time.perf_counter()
                step()
                seconds.append(time.perf_counter() - begin)
            if profiler is not None:
                profiler.disable()
        made.close()
        return seconds


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_host")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--profile", action="store_true", help="own time by function, at the end")
    options = parser.parse_args(argv)
    settle()
    for rows in options.rows:
        seconds = host_steps(rows, options.steps)
        print(
            f"{rows:4} rows: median {statistics.median(seconds) * 1e3:.2f} ms, "
            f"mean {statistics.mean(seconds) * 1e3:.2f} ms, longest {max(seconds) * 1e3:.2f} ms"
        )
    if options.profile:
        profiler = cProfile.Profile()
        host_steps(options.rows[-1], options.steps, profiler)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
