"""The production engine on a GPU in this very process, stepped by hand; a dry run has the fake.

Lives here: opening a device, hosting packs, keeping a number of decodes going and timing steps.
Does not: what is compared with what, which is gpu_parts.py and gpu_swap.py.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu import SHM_PREFIX
from engine.config import EngineConfig, WorkerConfig
from engine.engine import Engine
from engine.gpu.device_sampling import SAMPLING_REFERENCE
from engine.protocol import ModelSpec, SamplingParams, Submit, TokenDelta
from engine.worker.open_device import Opened, open_device, open_streams
from kernels.flat_reference import FLAT_REFERENCE
from kernels.page_copy import page_copy_ref
from tests.engine.fake_device import FakeDevice, opaque

PATIENCE_S = 300.0
DRY_ARENA_BYTES = 48 << 20
Figures = dict[str, Any]


def goal(reached: float, wanted: float, more: bool = True) -> Figures:
    """A figure beside what the project wants."""
    met = reached >= wanted if more else reached <= wanted
    return {"reached": reached, "wanted": wanted, "met": met}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a part runs with. `dry`: the fake device and tiny shapes."""

    work_dir: Path
    dry: bool = False
    seconds: float = 400.0

    def scaled(self, real: int, dry: int) -> int:
        """A count, as it is meant and as a dry run takes it."""
        return dry if self.dry else real


@dataclass(slots=True)
class Window:
    """Steps that were timed. `device_s`: of the device, as events say."""

    wall_s: float = 0.0
    device_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    step_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """By the wall."""
        return self.num_tokens / self.wall_s if self.wall_s else 0.0


class Rig:
    """One engine over one device. Close it by `rig`."""

    def __init__(self, settings: Settings, **config: Any) -> None:
        self.settings = settings
        self.opened = _open(settings, config)
        self.engine = Engine(self.opened.config, self.opened.backend, self.opened.dependencies)
        self._names: dict[str, Path] = {}
        self._number = 0

    def host(self, packs: dict[str, Path]) -> None:
        """The whole catalog."""
        self._names = packs
        specs = [ModelSpec(name, str(pack_dir)) for name, pack_dir in packs.items()]
        self.engine.set_catalog(specs, time.monotonic())

    def states(self) -> dict[str, str]:
        """Of all hosted models."""
        return {row.model_id: row.state for row in self.engine.status(time.monotonic()).models}

    def load(self, name: str) -> float:
        """Make it resident, however many steps of others it takes. Seconds of the wall."""
        begin = time.perf_counter()
        self.engine.load(name, time.monotonic())
        self.until(lambda: self.states().get(name) == "resident", name)
        return time.perf_counter() - begin

    def unload(self, name: str) -> None:
        """Off the device."""
        self.engine.unload(name, time.monotonic())
        self.until(lambda: self.states().get(name) in ("cold", "warm"), name)

    def until(self, reached: Any, name: str = "") -> list[TokenDelta]:
        """Step until then. Raises RuntimeError where a model failed or patience ends."""
        deadline = time.monotonic() + PATIENCE_S
        deltas: list[TokenDelta] = []
        while not reached():
            deltas += self.engine.step(time.monotonic())
            if not self.engine.has_work():
                time.sleep(0.0002)
            failed = name and self.states().get(name) == "failed"
            if failed or time.monotonic() > deadline:
                rows = self.engine.status(time.monotonic()).models
                why = {row.model_id: row.reason for row in rows}
                raise RuntimeError(f"{name or 'it'} did not come: {why}")
        return deltas

    def submit(self, model: str, prompt: Sequence[int], new: int, sampled: bool = False) -> str:
        """One request of exactly `new` tokens: greedy, or as chat clients sample."""
        self._number += 1
        name = f"r{self._number}"
        sampling = SamplingParams(temperature=0.0)
        if sampled:
            sampling = SamplingParams(temperature=0.8, top_p=0.95, top_k=20, seed=self._number)
        ask = Submit(name, 1, "bench", model, list(prompt), new, sampling, [])
        self.engine.submit(ask, time.monotonic())
        return name

    def prompts(self, count: int, length: int, vocab_size: int) -> list[list[int]]:
        """Random, none beginning like another."""
        generator = torch.Generator().manual_seed(self._number + count)
        return [
            torch.randint(vocab_size, (length,), generator=generator).tolist() for _ in range(count)
        ]

    def run_out(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Step until these have ended; their tokens. Raises RuntimeError for any other end."""
        said: dict[str, list[int]] = {name: [] for name in names}
        open_ = set(names)
        deadline = time.monotonic() + PATIENCE_S
        while open_:
            for delta in self.engine.step(time.monotonic()):
                if delta.request_id not in said:
                    continue
                said[delta.request_id] += delta.token_ids
                if delta.finish is not None:
                    if delta.finish.reason != "length":
                        raise RuntimeError(f"a request ended by {delta.finish}")
                    open_.discard(delta.request_id)
            if time.monotonic() > deadline:
                raise RuntimeError(f"{len(open_)} requests have not ended")
        return said

    def decode(
        self,
        model: str,
        batch: int,
        context: int,
        steps: int,
        warm_up: int,
        vocab_size: int,
        sampled: bool = False,
    ) -> Window:
        """`batch` requests from `context` tokens on: so many steps, once graphs are recorded."""
        new = warm_up + steps + 8
        with self.decoding(model, batch, context, new, vocab_size, sampled, warm_up) as step:
            window = Window()
            busy_s = self.counter("busy_seconds")
            begin = last = time.perf_counter()
            while window.num_steps < steps:
                window.num_tokens += step()
                now = time.perf_counter()
                window.step_s.append(now - last)
                last = now
                window.num_steps += 1
            window.wall_s = last - begin
            window.device_s = self.counter("busy_seconds") - busy_s
        return window

    @contextmanager
    def decoding(
        self,
        model: str,
        batch: int,
        context: int,
        new: int,
        vocab_size: int,
        sampled: bool = False,
        warm_up: int = 4,
    ) -> Iterator[Callable[[], int]]:
        """So many requests that all decode: a function that takes a step and counts its tokens."""
        new = min(new, self.settings.scaled(16_384, 200))
        names = [
            self.submit(model, p, new, sampled) for p in self.prompts(batch, context, vocab_size)
        ]
        begun: dict[str, int] = dict.fromkeys(names, 0)

        def step() -> int:
            count = 0
            for delta in self.engine.step(time.monotonic()):
                if delta.finish is not None and delta.finish.reason != "length":
                    raise RuntimeError(f"a request ended by {delta.finish}")
                begun[delta.request_id] = begun.get(delta.request_id, 0) + len(delta.token_ids)
                count += len(delta.token_ids)
            return count

        while min(begun[name] for name in names) < warm_up:
            step()
        yield step
        for name in names:
            self.engine.abort(name, 1)
        self.until(lambda: self.is_idle)

    @property
    def is_idle(self) -> bool:
        """No request waits or runs."""
        return not any(True for _ in self.engine.unfinished())

    def steady_decode(
        self, batch: int, vocab_size: int, context: int = 0, sampled: bool = False
    ) -> Window:
        """`decode` of the model "m", of which a first run has seen every form that it meets.

        Contexts grow into wider tables on the way: kernels compiled and steps recorded then would
        count as decoding.
        """
        scaled = self.settings.scaled
        steps, warm_up = scaled(200, 4), scaled(16, 4)
        context = context or scaled(128, 10)
        self.decode("m", batch, context, steps, warm_up, vocab_size, sampled)
        return self.decode("m", batch, context, steps, warm_up, vocab_size, sampled)

    def counter(self, name: str) -> float:
        """Of the engine."""
        return self.engine.status(time.monotonic()).counters[name]

    def close(self) -> None:
        """Check that nothing leaked."""
        self.engine.check_integrity()
        self.engine.close()
        self.opened.backend.close()
        config = self.opened.config
        for path in Path(config.shm_dir).glob(f"{config.shm_prefix}-*"):
            path.unlink()

    def forget(self) -> None:
        """Give the arena back: the next rig of this process takes what is free."""
        del self.engine, self.opened
        gc.collect()
        torch.cuda.empty_cache()  # where there is no GPU it does nothing


@contextmanager
def rig(settings: Settings, **config: Any) -> Iterator[Rig]:
    """An engine that is closed at the end."""
    made = Rig(settings, **config)
    try:
        yield made
    finally:
        try:
            made.close()
        finally:
            made.forget()


def _open(settings: Settings, changes: dict[str, Any]) -> Opened:
    arena = {"arena_bytes": DRY_ARENA_BYTES} if settings.dry else {"arena_bytes": 1 << 30}
    engine = EngineConfig(
        **{
            **arena,
            # A part's own: what an earlier one has left would be no cold load.
            "shm_prefix": f"{SHM_PREFIX}{os.getpid()}",
            "steps_ahead": 1,
            "max_num_seqs": settings.scaled(256, 8),
            "max_batch_tokens": settings.scaled(8192, 64),
            "attention_in_place": True,
            "min_run_steps": 1,
            **changes,
        }
    )
    if not settings.dry:
        worker = WorkerConfig(worker_id="b", endpoint="ipc://b", engine=engine, device="auto")
        return open_device(worker)
    operations = replace(
        FLAT_REFERENCE,
        write=opaque(FLAT_REFERENCE.write),
        attend=opaque(FLAT_REFERENCE.attend),
        norm=opaque(FLAT_REFERENCE.norm),
        head_norm_=opaque(FLAT_REFERENCE.head_norm_),
        gate_mul=opaque(FLAT_REFERENCE.gate_mul),
        experts=opaque(FLAT_REFERENCE.experts),
    )
    return open_streams(
        FakeDevice(), engine, 1 << 24, operations, SAMPLING_REFERENCE, page_copy_ref
    )
