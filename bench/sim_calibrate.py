"""`python -m bench.sim_calibrate`: measures this machine for the simulator, into a device file.

    python -m bench.sim_calibrate --output cpu.json
    polyhost simulate TRACE --device cpu.json

Lives here: what is measured, with which engine, and the file. Does not: the fit (sim_fit.py), what
a step costs by it (bench/sim/device.py), the comparison with a server (sim_compare.py).

The production engine runs in this process, on one thread, over true shapes with random weights:
decode steps over batch size and context, prompts over length, mixed steps as they come, and loads
from the page cache and from the host tier. Then a server is asked short prompts one at a time: what
a first token takes beyond the engine's step is the gateway's share. Two shapes at least, or what a
layer costs could not be told from what its bytes cost.
"""

import argparse
import asyncio
import gc
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from bench import command, load, machine, processes, servers, shapes
from bench.prompts import PromptMaker
from bench.sim.device import ModelCost, StepLoad
from bench.sim.devices import write_device
from bench.sim.packs import SimPacks
from bench.sim.types import DeviceFigures, SimModel
from bench.sim.world import OWN_SETTINGS, roofline
from bench.sim_fit import Errors, Load, Observation, fit_loads, fit_steps, step_errors
from bench.sim_real import pin_server, pin_this
from engine.backend.cpu import CpuBackend
from engine.config import EngineConfig
from engine.engine import Engine
from engine.protocol import ModelSpec, SamplingParams, Submit
from engine.registration import convert
from engine.running.batch import StepBatch
from engine.running.model_runner import ModelRunner
from engine.sampling.sampler import SampleOutput

SHAPES = ("karpathy/tinyllamas-42M", "HuggingFaceTB/SmolLM2-135M")
GIB = 1 << 30
PAGE_BYTES = 1 << 20
ARENA_BYTES = 3 * GIB // 2
MAX_BATCH_TOKENS = 512
DECODES = ((1, 16), (2, 16), (4, 16), (8, 16), (16, 16), (1, 200), (4, 200), (8, 200), (4, 500))
"""(rows, prompt tokens); the prompts' own steps are looked at as well."""
DECODE_STEPS = 6
PROMPTS = (8, 16, 32, 64, 128, 256, 512)
NUM_LOADS = 4
GATEWAY_REQUESTS = 24
GATEWAY_PROMPT = 16
LOAD_TIMEOUT_S = 120.0
ALONE = 0.9
"""Share of a step's time that its thread must have had the core."""


class Rig:
    """An engine stepped by hand over one pack, whose steps are seen with what was in them."""

    def __init__(self, pack_dir: Path, vocab_size: int, host_tier_bytes: int, seed: int) -> None:
        self._config = EngineConfig(
            arena_bytes=ARENA_BYTES,
            page_bytes=PAGE_BYTES,
            host_tier_bytes=host_tier_bytes,
            shm_prefix="polyhost-calibrate",
            max_num_seqs=32,
            max_batch_tokens=MAX_BATCH_TOKENS,
            prefix_cache=False,
        )
        self._backend = CpuBackend(self._config.arena_bytes)
        self._backend.arena.zero_()  # touched once, as a running worker's arena is
        self._engine = Engine(self._config, self._backend)
        self._engine.set_catalog([ModelSpec("model", str(pack_dir))], time.monotonic())
        self._generator = torch.Generator().manual_seed(seed)
        self._vocab_size = vocab_size
        self._number = 0
        self.num_disturbed = 0
        """Steps that are not counted: another program had the core in between."""

    def load(self) -> tuple[str, float]:
        """Bring the model in; from where, and the seconds. Raises TimeoutError, ServerFailed."""
        self._engine.load("model", time.monotonic())
        self._until("resident")
        (swap,) = [swap for swap in self._engine.take_swaps()[0] if swap.kind == "load"]
        return swap.tier, swap.duration_s

    def unload(self) -> None:
        """Give its memory back."""
        self._engine.unload("model", time.monotonic())
        self._until("cold", "warm")
        self._engine.take_swaps()

    def steps(
        self, prompts: Sequence[int], num_tokens: int, cost: ModelCost
    ) -> Iterator[Observation]:
        """Run such requests at once; every step, with its seconds."""
        for length in prompts:
            self._number += 1
            ids = torch.randint(self._vocab_size, (length,), generator=self._generator).tolist()
            sampling = SamplingParams(temperature=0.0)
            submit = Submit(
                f"r{self._number}", 0, "calibrate", "model", ids, num_tokens, sampling, []
            )
            self._engine.submit(submit, time.monotonic())
        with _watching() as seen:
            while self._engine.has_work():
                seen.clear()
                began_s, cpu_s = time.perf_counter(), time.thread_time()
                self._engine.step(time.monotonic())
                seconds = time.perf_counter() - began_s
                if time.thread_time() - cpu_s < ALONE * seconds:
                    self.num_disturbed += 1
                    continue
                for rows, executed_s in seen:
                    yield Observation(cost, StepLoad.of(cost, rows), seconds, seconds - executed_s)

    def close(self) -> None:
        """Stop the threads."""
        self._engine.close()
        self._backend.close()
        gc.collect()  # the arena goes with the last of what refers to it

    def _until(self, *states: str) -> None:
        deadline_s = time.monotonic() + LOAD_TIMEOUT_S
        while True:
            now_s = time.monotonic()
            self._engine.step(now_s)
            rows = self._engine.status(now_s).models
            state = rows[0].state if rows else "cold"  # one that is nowhere but on disk has no row
            if state in states:
                return
            if state == "failed":
                raise processes.ServerFailed(f"the model was not loaded: {rows[0].reason}")
            if now_s > deadline_s:
                raise TimeoutError(f"the model is {state} after {LOAD_TIMEOUT_S:.0f} s")
            time.sleep(1e-4)


Seen = list[tuple[list[tuple[int, int, bool]], float]]


@contextmanager
def _watching() -> Iterator[Seen]:
    """Rows and seconds of every forward pass while entered."""
    seen: Seen = []
    execute = ModelRunner.execute

    def watched(self: ModelRunner, batch: StepBatch) -> SampleOutput:
        began_s = time.perf_counter()
        output = execute(self, batch)
        rows = [(row.first, row.num_scheduled_tokens, row.samples) for row in batch.rows]
        seen.append((rows, time.perf_counter() - began_s))
        return output

    ModelRunner.execute = watched  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        ModelRunner.execute = execute  # type: ignore[method-assign]


def make_pack(
    shape: str, dtype: convert.DtypeChoice, work_dir: Path, seed: int
) -> tuple[Path, int]:
    """The pack's folder and the model's vocabulary. Raises KeyError for an unknown shape."""
    folder = model_folder(shape, work_dir, seed)
    pack_dir, index = convert.write_pack(
        convert.inspect(folder), work_dir / "packs", dtype, lambda phase, done, total: None
    )
    return pack_dir, index.vocab_size


def model_folder(shape: str, work_dir: Path, seed: int) -> Path:
    """Its Hugging Face folder, made where it is not there. Raises KeyError."""
    folder = work_dir / f"model-{shape.replace('/', '-')}-{seed}"
    shapes.build_once(shape, folder, seed)
    return folder


def measure(args: argparse.Namespace, work_dir: Path) -> tuple[list[Observation], list[Load]]:
    """Steps and loads of all shapes in all dtypes."""
    steps: list[Observation] = []
    loads: list[Load] = []
    for _, shape, dtype in itertools.product(range(args.rounds), args.shapes, args.dtypes):
        pack = SimPacks([SimModel("model", shape, dtype)]).pack(0)
        pack_dir, vocab_size = make_pack(shape, dtype, work_dir, args.seed)
        rig = Rig(pack_dir, vocab_size, 2 * pack.index.total_bytes, args.seed)
        try:
            rig.load()  # builds the model's skeleton: once in a worker's life
            list(rig.steps([16], 4, pack.cost))
            found = list(_rounds(rig, args, pack.cost))
            loads += _loads(rig, pack.index.total_bytes)
        finally:
            rig.close()
        steps += found
        print(
            f"{shape} {dtype}: {len(found)} steps, {rig.num_disturbed} more were disturbed",
            file=sys.stderr,
        )
    return steps, loads


def _rounds(rig: Rig, args: argparse.Namespace, cost: ModelCost) -> Iterator[Observation]:
    for rows, prompt in DECODES[:: args.every]:
        yield from rig.steps([prompt] * rows, DECODE_STEPS, cost)
    for prompt in PROMPTS[:: args.every]:
        for _ in range(2):
            yield from rig.steps([prompt], 2, cost)


def _loads(rig: Rig, size_bytes: int) -> Iterator[Load]:
    """From the host tier as it comes: the first load has filled it."""
    for _ in range(NUM_LOADS):
        rig.unload()
        tier, seconds = rig.load()
        yield Load(size_bytes, tier, seconds)


def disk_loads(args: argparse.Namespace, work_dir: Path) -> Iterator[Load]:
    """Without a host tier: from the pack's file, which the page cache holds."""
    for shape in args.shapes:
        dtype = args.dtypes[0]
        size_bytes = SimPacks([SimModel("model", shape, dtype)]).pack(0).index.total_bytes
        pack_dir, vocab_size = make_pack(shape, dtype, work_dir, args.seed)
        rig = Rig(pack_dir, vocab_size, 0, args.seed)
        try:
            rig.load()
            yield from _loads(rig, size_bytes)
        finally:
            rig.close()


def gateway_s(args: argparse.Namespace, work_dir: Path, device: DeviceFigures) -> float:
    """What a first token takes through HTTP beyond the step that samples it and two messages."""
    shape, dtype = args.shapes[0], args.dtypes[0]
    folder = model_folder(shape, work_dir, args.seed).resolve()
    prompts = PromptMaker(folder)
    with ExitStack() as stack:
        data_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="data-", dir=work_dir))
        server_settings = {
            "num_threads": "1",
            "device_budget_bytes": str(GIB),
            "host_tier_bytes": "0",
        }
        ours = servers.Polyhost(Path(data_dir), server_settings)
        ours.add_model("model", folder, dtype)
        server = ours.serve(ours.new_key())
        stack.enter_context(server.process)
        pin_server(server)
        target = server.target(servers.OURS, "model", prompts)
        asked = load.requests_for(prompts, "gateway", GATEWAY_REQUESTS, GATEWAY_PROMPT, 2)
        done = asyncio.run(load.closed_loop(target, asked, 1))
    cost = SimPacks([SimModel("model", shape, dtype)]).pack(0).cost
    beyond = []
    for result in done.results[1:]:  # the first one loads the model
        if result.error or result.ttft_s is None:
            raise processes.ServerFailed(f"a request failed: {result.error}")
        step = StepLoad.of(cost, [(0, result.prompt_tokens, True)])
        beyond.append(result.ttft_s - roofline(device).step_s(cost, step))
    return max(0.0, statistics.median(beyond) - 2 * OWN_SETTINGS["latency_s"])


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.sim_calibrate", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="the device file")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--name", help="of the device; else the file's")
    parser.add_argument("--rounds", type=int, default=2, help="over all shapes in turn")
    parser.add_argument("--every", type=int, default=1, help="measure every n-th point only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-server", action="store_true", help="do not measure the gateway")
    parser.add_argument("--work-dir", type=Path, help="models and packs; else a temporary one")
    args = parser.parse_args(argv)
    if len(set(args.shapes)) < 2:
        parser.error("two shapes at least: a layer's cost cannot be told from its bytes' with one")
    return args


def run(args: argparse.Namespace, work_dir: Path) -> Errors:
    """Measure, fit, write the file; returns the fit's errors."""
    facts = machine.facts()
    torch.set_num_threads(1)
    pin_this(0)
    steps, loads = measure(args, work_dir)
    loads += disk_loads(args, work_dir)
    if not steps:
        raise processes.ServerFailed("every step was disturbed: try again on an idle machine")
    fitted = fit_steps(steps)
    disk_rate, host_rate, overhead_s = fit_loads(loads)
    device = DeviceFigures(
        name=args.name or args.output.stem,
        copy_bytes_per_s=facts["memcpy_gb_s"] * 1e9,
        host_bytes_per_s=host_rate,
        disk_bytes_per_s=disk_rate,
        load_overhead_s=overhead_s,
        memory_bytes=4 * GIB,
        host_bytes=4 * GIB,
        source=f"measured by bench.sim_calibrate on one thread: {', '.join(args.shapes)} in "
        f"{', '.join(args.dtypes)}; loads from the page cache, not from a disk",
        **fitted,
    )
    errors = step_errors(roofline(device), steps)
    settings: dict[str, float] = {}
    if not args.no_server:
        pin_this(1)
        settings["request_s"] = gateway_s(args, work_dir, device)
    device = replace(device, source=f"{device.source}; {errors.in_words()}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_device(args.output, device, settings, {"errors": errors.as_dict(), "machine": facts})
    return errors


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the file, print how well it fits."""
    args = parse(argv)
    with command.working_in(args.work_dir) as work_dir:
        try:
            errors = run(args, work_dir)
        except (processes.ServerFailed, TimeoutError, KeyError) as error:
            print(f"bench.sim_calibrate: {error}", file=sys.stderr)
            return 1
    print(json.dumps(json.loads(args.output.read_text(encoding="utf-8"))["device"], indent=1))
    print(errors.in_words())
    print(f"written to {args.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
