"""`polyhost simulate TRACE`: a workload through the product's own code in modelled time.

The simulator is `bench.sim`, which imports the engine; the gateway does not. So it is a process of
its own with the same Python, and this module only hands the command line over. What it prints is
passed through, and so is its exit status. It checks what it is given and says what to write.
"""

import argparse
import importlib.util
import signal
import subprocess
import sys

from gateway.cli.common import add_common_options

MODULE = "bench.sim"
# Name, metavar, meaning; the simulator has the same names and knows what they may be.
VALUES = (
    ("--models", "N|FILE", "hosted models: how many (20), or a JSON list of them"),
    ("--mix", "NAME", "their shapes: tiny, small, mixed or large (mixed)"),
    ("--workers", "N", "workers (4)"),
    ("--device", "NAME|FILE", "what each has (h100), or a file of bench.sim_calibrate"),
    ("--memory", "GIB", "of the device, in place of its own"),
    ("--host-memory", "GIB", "of the host tier"),
    ("--cost", "PRICE", "of a worker's hour"),
    ("--tenants", "N", "tenants (16)"),
    ("--weights", "NAME", "their weights: equal or tiers (equal)"),
    ("--data", "DIR", "folder of the traces"),
    ("--out", "DIR", "folder of the report (simulation)"),
    ("--seed", "N", "of world and workload (0)"),
    ("--until", "SECONDS", "end the simulated time there"),
    ("--sample", "SECONDS", "between samples (1)"),
    ("--slo-ttft", "SECONDS", "bound of the first token (2)"),
    ("--slo-tpot", "SECONDS", "bound of each further one (0.1)"),
)
REPEATED = (
    ("--policy", "KIND=NAME,...", "one run more with baselines in place of ours"),
    ("--set", "NAME=VALUE", "a setting of gateway or engine, such as max_num_seqs=128"),
)
FLAGS = (
    ("--only", "no run with the product's own policies"),
    ("--json", "the report as JSON on standard output"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """The simulator's options."""
    add_common_options(parser)
    parser.add_argument(
        "trace", metavar="TRACE", help="NAME, NAME:key=value,... or the path of a CSV file"
    )
    for name, metavar, meaning in VALUES:
        parser.add_argument(name, metavar=metavar, help=meaning)
    for name, metavar, meaning in REPEATED:
        parser.add_argument(name, metavar=metavar, help=meaning, action="append", default=[])
    for name, meaning in FLAGS:
        parser.add_argument(name, help=meaning, action="store_true")
    parser.set_defaults(run=_simulate)


def command(options: argparse.Namespace) -> list[str]:
    """The simulator's command line."""
    words = [sys.executable, "-m", MODULE]
    for name, *_ in VALUES:
        value = getattr(options, _place(name))
        words += [] if value is None else [f"{name}={value}"]
    for name, *_ in REPEATED:
        words += [f"{name}={value}" for value in getattr(options, _place(name))]
    words += [name for name, _ in FLAGS if getattr(options, _place(name))]
    return [*words, "--", options.trace]


def _place(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _simulate(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("bench") is None:
        raise FileNotFoundError(
            "the simulator is not installed: its package `bench` lies beside `gateway` in the "
            "repository"
        )
    with subprocess.Popen(command(options)) as child:
        before = signal.signal(signal.SIGTERM, lambda _signal, _frame: child.terminate())
        try:
            status = child.wait()
        except KeyboardInterrupt:
            # The terminal has told the child as well; it ends by itself.
            child.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    return status if status >= 0 else 128 - status
