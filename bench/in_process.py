"""The production engine in this very process, stepped by hand: no server, no sockets.

Lives here: packs of the demo models or of a true shape, an engine over them, requests given to it
and timed. Does not: measure anything by itself, read data. What is left out (gateway, worker
process) is the same on both sides of every comparison made with it.
"""

import gc
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import processes, shapes
from bench.kv_minimum import group_bytes_per_token
from engine.backend.cpu import CpuBackend, Execution
from engine.config import EngineConfig, auto_page_bytes
from engine.engine import Engine
from engine.packs import convert
from engine.packs.pack import PackIndex
from engine.protocol import ModelSpec, SamplingParams, Submit, TokenDelta
from engine.running.batch import StepBatch
from engine.running.model_runner import ModelRunner
from engine.sampling.sampler import SampleOutput

DEMO_MODELS = Path(__file__).resolve().parent.parent / "gateway" / "demo_models"
MODEL = "bench"
LOAD_TIMEOUT_S = 600.0
KV_ROUNDING = 1.5  # what extents and watermarks may take beside the tokens


@dataclass(frozen=True, slots=True)
class Pack:
    """A model ready to be loaded."""

    name: str
    pack_dir: Path
    index: PackIndex


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: greedy, exactly `max_tokens` tokens."""

    prompt_ids: list[int]
    max_tokens: int


@dataclass(slots=True)
class Run:
    """What came out of some requests. `model_cpu_s`: CPU time inside a `ModelClock`, else 0."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    model_cpu_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0


def make_pack(model: str, work_dir: Path, seed: int = 0) -> Pack:
    """A demo model's pack by its folder's name, or one of a shape with random weights.

    Raises KeyError where neither has that name.
    """
    folder = DEMO_MODELS / model
    if not (folder / "config.json").exists():
        folder = work_dir / f"model-{model.replace('/', '-')}-{seed}"
        if not (folder / "tokenizer_config.json").exists():
            print(f"making {model} with random weights", file=sys.stderr)
            shapes.build(shapes.read_shapes(), model, folder, seed)
    candidate = convert.inspect(folder)
    dest = work_dir / "packs"
    pack_dir, index = convert.write_pack(candidate, dest, "auto", lambda phase, done, total: None)
    return Pack(model, pack_dir, index)


def kv_bytes(pack: Pack, num_seqs: int, num_tokens: int) -> int:
    """Room for so many sequences of so many tokens, and for rounding."""
    dtype = getattr(torch, pack.index.kv_dtype)
    per_token = sum(group_bytes_per_token(group, dtype) for group in pack.index.kv_groups)
    return int(per_token * num_seqs * num_tokens * KV_ROUNDING)


class ModelClock:
    """While entered, CPU time of the step thread inside the models' forward passes is counted.

    What is left of a run's CPU time is the step loop's own: scheduling, caches, batches, tokens.
    For engines whose steps run in the thread that calls them, with one thread an operator.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._execute = ModelRunner.execute

    def __enter__(self) -> "ModelClock":
        execute = self._execute

        def timed(self_: ModelRunner, batch: StepBatch) -> SampleOutput:
            started = time.thread_time()
            try:
                return execute(self_, batch)
            finally:
                self.seconds += time.thread_time() - started

        ModelRunner.execute = timed  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *unused: object) -> None:
        ModelRunner.execute = self._execute  # type: ignore[method-assign]


class Host:
    """An engine with one model resident. Close it by `hosting`."""

    def __init__(self, pack: Pack, settings: Mapping[str, Any], kv_room: int) -> None:
        arena_bytes = _arena_bytes(pack.index, kv_room)
        self.config = EngineConfig(
            arena_bytes=arena_bytes, **{"shm_prefix": "polyhost-bench", **settings}
        )
        execution: Execution = "thread" if self.config.steps_ahead else "inline"
        self._backend = CpuBackend(self.config.arena_bytes, execution=execution)
        self._backend.arena.zero_()  # touched once, as a running worker's arena is
        self.engine = Engine(self.config, self._backend)
        self.number = 0

    def load(self, pack: Pack) -> None:
        """Bring the model in. Raises ServerFailed, TimeoutError."""
        now = time.monotonic()
        self.engine.set_catalog([ModelSpec(MODEL, str(pack.pack_dir))], now)
        self.engine.load(MODEL, now)
        deadline = now + LOAD_TIMEOUT_S
        while True:
            self.engine.step(time.monotonic())
            for row in self.engine.status(time.monotonic()).models:
                if row.state == "resident":
                    return
                if row.state == "failed":
                    raise processes.ServerFailed(f"{pack.name} was not loaded: {row.reason}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{pack.name} is not loaded after {LOAD_TIMEOUT_S:.0f} s")
            time.sleep(0.001)

    def run(self, asks: Iterable[Ask], width: int, clock: ModelClock | None = None) -> Run:
        """All of them, `width` at a time: as one ends the next is given in. Raises ServerFailed."""
        waiting: Iterator[Ask] = iter(asks)
        result = Run()
        sent: dict[str, float] = {}
        started: set[str] = set()
        steps = self.counters()["steps"]
        gc.collect()
        model_cpu = clock.seconds if clock else 0.0
        cpu, wall = time.process_time(), time.perf_counter()
        exhausted = False
        while not exhausted or sent:
            while not exhausted and len(sent) < width:
                ask = next(waiting, None)
                if ask is None:
                    exhausted = True
                else:
                    sent[self._submit(ask)] = time.perf_counter()
            for delta in self.engine.step(time.monotonic()):
                now = time.perf_counter()
                if delta.token_ids and delta.request_id not in started:
                    started.add(delta.request_id)
                    result.ttft_s.append(now - sent[delta.request_id])
                result.num_tokens += len(delta.token_ids)
                if delta.finish is not None:
                    self._end(delta, result)
                    del sent[delta.request_id]
        result.wall_s = time.perf_counter() - wall
        result.cpu_s = time.process_time() - cpu
        result.model_cpu_s = (clock.seconds if clock else 0.0) - model_cpu
        result.num_steps = int(self.counters()["steps"] - steps)
        return result

    def counters(self) -> dict[str, float]:
        """The engine's counters."""
        return self.engine.status(time.monotonic()).counters

    def close(self) -> None:
        """Check that nothing leaked, stop the threads."""
        self.engine.check_integrity()
        self.engine.close()
        self._backend.close()

    def _submit(self, ask: Ask) -> str:
        self.number += 1
        name = f"r{self.number}"
        sampling = SamplingParams(temperature=0.0)
        self.engine.submit(
            Submit(name, 0, "bench", MODEL, ask.prompt_ids, ask.max_tokens, sampling, []),
            time.monotonic(),
        )
        return name

    def _end(self, delta: TokenDelta, result: Run) -> None:
        finish = delta.finish
        assert finish is not None
        if finish.reason != "length":
            raise processes.ServerFailed(f"a request ended by {finish.reason}: {finish.error}")
        result.cached_tokens += finish.usage.cached_tokens
        result.prompt_tokens += finish.usage.prompt_tokens


@contextmanager
def hosting(
    pack: Pack, settings: Sequence[Mapping[str, Any]], kv_room: int
) -> Iterator[list[Host]]:
    """One engine for each of the settings, side by side, the model resident in each."""
    hosts: list[Host] = []
    try:
        for some in settings:
            hosts.append(Host(pack, some, kv_room))
            hosts[-1].load(pack)
        yield hosts
    finally:
        for host in hosts:
            host.close()


def _arena_bytes(index: PackIndex, kv_room: int) -> int:
    """Whole pages for the weights' runs, and room for KV beside them and little more."""
    page = auto_page_bytes(index.total_bytes + kv_room)
    runs = sum(-(-segment.num_bytes // page) for segment in index.segments)
    return (runs + -(-kv_room // page)) * page


def random_prompts(
    lengths: Sequence[int], vocab_size: int, generator: torch.Generator
) -> list[list[int]]:
    """Prompts without a common beginning but by chance."""
    return [
        torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]
