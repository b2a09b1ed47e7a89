"""What the host does for a step on a GPU, without one: scheduling, lay-out, launching, tokens.

    python -m bench.gpu_host [--rows 256] [--steps 200] [--profile]

The production engine steps over a device that computes nothing: graphs are replayed in no time,
layers and sampling give memory as it comes. So a step takes what the host takes, in one thread, as
beside a GPU. Two loads: decodes only, and in each step one request that ends and one prompt of
CHUNK tokens in its place. `schedule`, `lay out` and `execute` are parts of `step`; the rest is
tokens and charges. Times are the thread's processor time, so that other work on the machine counts
little. Needs neither a GPU nor Triton.
"""

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu_models import SMALL, make_pack
from engine.config import EngineConfig
from engine.engine import Engine
from engine.gpu import SamplingOperations
from engine.protocol import ModelSpec, SamplingParams, Submit
from engine.worker.open_device import open_streams
from kernels.decoder_layer import LayerForm, LayerStep, Operations, Product
from kernels.page_copy import page_copy_ref
from kernels.sampling import Draw
from tests.engine.fake_device import FakeDevice

PROMPT, CHUNK = 240, 128
VOCAB = 512
WARM_UP = 24
MEMORY_BYTES = 1 << 30
ARENA_BYTES = 256 << 20


class _Nothing:
    """A graph; implements `backend.device.Graph`."""

    num_bytes = 0

    def replay(self) -> None:
        """At once."""


class _Device(FakeDevice):
    """Never late, and recordings are empty."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """As from a pool."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
        """What is launched while recording is all that ever comes of it."""
        return _Nothing(), work()


def _norm(x: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x, x


def _product(x: torch.Tensor, product: Product) -> torch.Tensor:
    assert isinstance(product.weight, torch.Tensor)
    return x.new_zeros(len(x), len(product.weight))


def _write(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return query


def _attend(query: torch.Tensor, form: LayerForm, step: LayerStep) -> torch.Tensor:
    return query.new_zeros(len(query), form.num_heads, step.geometry.layer.v_dim)


def _gate_mul(x: torch.Tensor, activation: Any) -> torch.Tensor:
    del activation
    return x[:, : x.shape[1] // 2]


def _draw(logits: torch.Tensor, how: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    del how
    tokens = torch.full((len(logits),), 7, dtype=torch.int64)
    return tokens, torch.zeros(len(logits), dtype=torch.bool)


def _nothing(*_: Any, **__: Any) -> Any:
    return None


LAYERS = Operations(_norm, _product, _nothing, _write, _attend, _gate_mul, _nothing)
SAMPLING = SamplingOperations(_draw, _nothing, _nothing, _nothing, _nothing)


class Bench:
    """One engine with `rows` requests that decode."""

    def __init__(self, pack_dir: Path, folder: Path, rows: int, sampling: SamplingParams) -> None:
        config = EngineConfig(
            arena_bytes=ARENA_BYTES,
            max_num_seqs=rows,
            max_batch_tokens=8192,
            max_waiting=2 * rows,
            steps_ahead=1,
            attention_in_place=True,
            shm_dir=str(folder),
            shm_prefix="host",
        )
        device = _Device(None, MEMORY_BYTES)
        opened = open_streams(device, config, 1 << 20, LAYERS, SAMPLING, page_copy_ref)
        self._opened, self._sampling = opened, sampling
        self.engine = Engine(config, opened.backend, opened.dependencies)
        self.engine.set_catalog([ModelSpec("m", str(pack_dir))], 0.0)
        self.engine.load("m", 0.0)
        while self.engine.status(0.0).models[0].state != "resident":
            self.engine.step(0.0)
        self._number = 0
        self._open: list[str] = []
        self.part_s: dict[str, list[float]] = defaultdict(list)
        self._clock(self.engine._scheduler, "schedule", "schedule")
        self._clock(self.engine._pipeline, "_lay_out", "lay out")
        self._clock(self.engine.runner(next(iter(self.engine._runners))), "execute", "execute")
        for _ in range(rows):
            self.submit(PROMPT)
        for _ in range(WARM_UP):
            self.engine.step(0.0)

    def submit(self, length: int) -> None:
        """A prompt of its own."""
        self._number += 1
        name = str(self._number)
        prompt = [(self._number * 31 + i * i) % VOCAB for i in range(length)]
        ask = Submit(name, 1, "t", "m", prompt, 250, self._sampling, [])
        self.engine.submit(ask, 0.0)
        self._open.append(name)

    def run(self, steps: int, mixed: bool) -> list[float]:
        """Seconds of each step."""
        self.part_s.clear()
        found = []
        for _ in range(steps):
            if mixed:
                self.engine.abort(self._open.pop(0), 1)
                self.submit(CHUNK)
            begin = time.thread_time()
            self.engine.step(0.0)
            found.append(time.thread_time() - begin)
        return found

    def close(self) -> None:
        """Raises RuntimeError where a step has failed: then nothing was measured."""
        failed = self.engine.status(0.0).counters["steps_failed"]
        if failed:
            raise RuntimeError(f"{failed:.0f} steps failed")
        self.engine.close()
        self._opened.backend.close()

    def _clock(self, owner: Any, name: str, label: str) -> None:
        call = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            begin = time.thread_time()
            try:
                return call(*args, **options)
            finally:
                self.part_s[label].append(time.thread_time() - begin)

        setattr(owner, name, timed)


def main(argv: Sequence[str] | None = None) -> int:
    """Print milliseconds a step, median and the fastest tenth, by part."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_host")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", action="store_true", help="where the time goes (cProfile)")
    options = parser.parse_args(argv)
    loads = (
        ("decode, greedy", False, SamplingParams(0.0)),
        ("decode, top_p", False, SamplingParams(0.7, top_p=0.95, top_k=20, seed=3)),
        ("one prompt a step", True, SamplingParams(0.7, top_p=0.95, seed=3)),
    )
    with tempfile.TemporaryDirectory() as name:
        pack_dir, _ = make_pack(SMALL, Path(name), dry=True)
        for label, mixed, sampling in loads:
            bench = Bench(pack_dir, Path(name), options.rows, sampling)
            profile = cProfile.Profile()
            if options.profile:
                profile.enable()
            steps = bench.run(options.steps, mixed)
            profile.disable()
            parts = {"step": steps, **bench.part_s}
            figures = ", ".join(f"{part} {_ms(seconds)}" for part, seconds in parts.items())
            print(f"{label}, {options.rows} rows: {figures} ms", flush=True)
            if options.profile:
                pstats.Stats(profile).sort_stats("tottime").print_stats(30)
            bench.close()
    return 0


def _ms(seconds: Sequence[float]) -> str:
    low = sorted(seconds)[len(seconds) // 10]
    return f"{statistics.median(seconds) * 1e3:.2f} ({low * 1e3:.2f})"


if __name__ == "__main__":
    raise SystemExit(main())
