"""Large simulations in machine code: the same modules, compiled by mypyc in a folder of their own.

    python -m bench.sim.compiled FOLDER                 copy the packages there and compile them
    python -m bench.sim.compiled FOLDER -- TRACE ...    the simulator's command, run from there

Most of a simulation is the product's own bookkeeping in plain, fully annotated Python: what mypyc
is made for. Nothing else changes: the figures are the same to the last digit
(`tests/bench/sim/test_compiled.py`), and the tree that was copied is not touched. Compiling takes
some minutes and a C compiler. A folder made from other sources than the present ones is refused.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import bench

PACKAGES = ("bench", "engine", "gateway", "kernels", "registry")
MODULES = (
    "engine/scheduling/admission.py",
    "engine/backend/sim.py",
    "engine/running/batch.py",
    "engine/residency/catalog.py",
    "engine/memory/compaction.py",
    "engine/scheduling/deadlines.py",
    "engine/engine.py",
    "engine/engine_status.py",
    "engine/residency/hosting.py",
    "engine/memory/kv_cache.py",
    "engine/memory/kv_extents.py",
    "engine/memory/kv_group.py",
    "engine/memory/kv_memory.py",
    "engine/memory/kv_plan.py",
    "engine/memory/kv_supply.py",
    "engine/worker/leases.py",
    "engine/residency/load_queue.py",
    "engine/scheduling/model_queue.py",
    "engine/memory/page_pool.py",
    "engine/residency/placement.py",
    "engine/policy/batching.py",
    "engine/policy/eviction.py",
    "engine/policy/kv_share.py",
    "engine/policy/kv_value.py",
    "engine/memory/prefix_cache.py",
    "engine/request.py",
    "engine/memory/request_kv.py",
    "engine/residency/residency.py",
    "engine/residency/residency_state.py",
    "engine/residency/room.py",
    "engine/scheduling/scheduler.py",
    "engine/scheduling/skip.py",
    "engine/scheduling/step_pipeline.py",
    "engine/residency/units.py",
    "engine/worker/usage_outbox.py",
    "engine/worker/worker_loop.py",
    "engine/worker/worker_status.py",
    "gateway/dispatch/assignments.py",
    "gateway/dispatch/capacity.py",
    "gateway/dispatch/dispatcher.py",
    "gateway/dispatch/fleet.py",
    "gateway/dispatch/matching.py",
    "gateway/policy/fair_share.py",
    "gateway/policy/placement.py",
    "gateway/policy/rate_limit.py",
    "gateway/policy/service_estimate.py",
    "gateway/dispatch/running.py",
    "gateway/dispatch/tickets.py",
    "gateway/dispatch/worker_connection.py",
    "bench/sim/cable.py",
    "bench/sim/client.py",
    "bench/sim/gateway.py",
    "bench/sim/loop.py",
    "bench/sim/parts.py",
    "bench/sim/sampling.py",
    "bench/sim/stretch.py",
    "bench/sim/worker.py",
)
"""What a run spends its time in."""
STAMP = "sources.blake2b"
NUM_JOBS = 2

_MYPY_INI = """\
[mypy]
strict = True
[mypy-transformers.*,safetensors.*,tokenizers.*]
ignore_missing_imports = True
follow_imports = skip
"""
_SETUP = """\
from mypyc.build import mypycify
from setuptools import setup

modules = mypycify({modules!r}, opt_level="2", debug_level="0", multi_file=True)
setup(name="compiled", ext_modules=modules, script_args={arguments!r})
"""


def source_digest(root: Path) -> str:
    """Of every module of PACKAGES below `root`, names and contents."""
    digest = hashlib.blake2b(digest_size=16)
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def build(root: Path, folder: Path) -> None:
    """Copy and compile. Raises ValueError where `folder` is not ours, OSError, CalledProcessError.

    The stamp is empty until all is done: by it the folder is ours, and is not used before that.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / STAMP).is_file():
        raise ValueError(f"{folder} holds something else: name a new folder")
    digest = source_digest(root)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / STAMP).touch()
    for package in PACKAGES:
        skip = shutil.ignore_patterns("__pycache__", "demo_models", "results", "*.so")
        shutil.copytree(root / package, folder / package, ignore=skip)
    (folder / "mypy.ini").write_text(_MYPY_INI)
    script = _SETUP.format(
        modules=list(MODULES), arguments=["build_ext", "--inplace", f"-j{NUM_JOBS}"]
    )
    subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdout=sys.stderr,
        check=True,
    )
    (folder / STAMP).write_text(digest)


def command(root: Path, folder: Path, arguments: Sequence[str]) -> int:
    """The simulator's command from `folder`; its exit status. Raises ValueError if that is old."""
    stamp = folder / STAMP
    if not stamp.is_file() or stamp.read_text() != source_digest(root):
        raise ValueError(
            f"{folder} was not compiled from the present sources: "
            f"run python -m bench.sim.compiled {folder}"
        )
    # -P: the folder it is called from, perhaps the tree itself, is not looked into first.
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "bench.sim", *arguments], env=environment, check=False
    )
    return done.returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: the simulator's; 1 compiling failed, 2 it makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m bench.sim.compiled", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("simulate", nargs="*", metavar="ARGUMENT", help="after --: a run")
    options = parser.parse_args(argv)
    root, folder = Path(bench.__file__).parents[1], options.folder.absolute()
    try:
        if options.simulate:
            return command(root, folder, options.simulate)
        build(root, folder)
    except ValueError as error:
        print(f"compiled: {error}", file=sys.stderr)
        return 2
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"compiled: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
