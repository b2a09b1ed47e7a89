"""`python -m bench.policy_worker --evict lru --config JSON`: a worker with another eviction policy.

The product's worker (engine/worker/main.py), its main, its signals and its exit codes, with one
part of its engine replaced: who leaves the device, by the names of bench/sim/baselines/choose.py.
For bench.popularity_real; the product itself has no such option.
"""

import argparse
import faulthandler
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

from bench.sim.baselines.choose import NAMES, make_eviction
from engine.backend.base import Backend
from engine.config import EngineConfig
from engine.engine import Engine
from engine.parts import EngineParts
from engine.policy.eviction import EvictionParams
from engine.worker import main as worker


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the worker."""
    parser = argparse.ArgumentParser(prog="python -m bench.policy_worker")
    names = [name for name in NAMES["evict"] if name != "belady"]
    parser.add_argument("--evict", choices=names, required=True)
    args, rest = parser.parse_known_args(argv)
    eviction = make_eviction({"evict": args.evict}, EvictionParams(), None, {})

    def engine(config: EngineConfig, backend: Backend, parts: EngineParts | None) -> Engine:
        return Engine(config, backend, replace(parts or EngineParts(), eviction=eviction))

    with mock.patch.object(worker, "Engine", engine):
        return worker.main(rest)


if __name__ == "__main__":
    faulthandler.enable()
    exit_code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(exit_code)  # as engine/worker/main.py does
