"""Parts of bench.gpu in a process of their own: `python -m bench.gpu_part NAME... --results FILE`.

One JSON object a line and part goes to FILE as soon as the part has ended, so that whatever ends
this process, what was found stays. Memory of the GPU comes back with the process.
"""

import argparse
import gc
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.gpu_parts import run_part
from bench.gpu_rig import Settings
from bench.machine import git_revision, versions


def main(argv: Sequence[str] | None = None) -> int:
    """0: every part gave figures; 1: some failed; 2: no GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_part")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(argv)
    if not options.dry_run and not torch.cuda.is_available():
        print("bench.gpu needs a CUDA device; --dry-run runs its plumbing without", file=sys.stderr)
        return 2
    name = "dry run" if options.dry_run else torch.cuda.get_device_name()
    machine = {
        "device": name,
        "packages": versions(("torch", "triton", "transformers")),
        "revision": git_revision(Path(__file__).resolve().parent.parent),
    }
    settings = Settings(options.work_dir, options.dry_run)
    failed = False
    gc.collect()
    gc.freeze()  # as a worker does
    with options.results.open("a", encoding="utf-8") as results:
        for part in options.names:
            try:
                row = {"part": part, "figures": run_part(part, settings)}
            except Exception as error:  # noqa: BLE001 - what a part raises is its result
                traceback.print_exc()
                failed = True
                row = {"part": part, "failure": f"{type(error).__name__}: {error}"[:600]}
            results.write(json.dumps(row | machine) + "\n")
            results.flush()
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
