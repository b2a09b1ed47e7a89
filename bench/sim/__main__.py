"""`python -m bench.sim TRACE ...`: simulate a workload and write the report.

    python -m bench.sim azure2023_conv:rate=20,minutes=10 --data FOLDER --workers 8 --models 40
    python -m bench.sim synthetic:rate=50,minutes=5 --policy evict=lru --policy share=fcfs

Runs the product's own policies, and beside them one run more for each `--policy`. Prints the main
figures and where `report.html` and `report.json` are. Progress goes to standard error.
"""

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.sim.baselines.choose import NAMES, OURS, parse_pair, parse_policies, parse_setting
from bench.sim.columns import Slo
from bench.sim.devices import DEVICES, find_device
from bench.sim.report import HTML_NAME, JSON_NAME, write_report
from bench.sim.run import simulate
from bench.sim.spec import (
    SYNTHETIC,
    WorkloadSpec,
    format_workload,
    options_help,
    parse_workload,
)
from bench.sim.traces import CSV_SUFFIXES
from bench.sim.types import OUTCOMES, DeviceFigures, Run, SimModel, World
from bench.sim.workloads import open_workload
from bench.sim.worlds import MIXES, WEIGHTS, make_models, make_tenants, read_models

GIB = 1 << 30


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 a file could not be read or written, 2 it makes no sense."""
    options = _parser().parse_args(argv)
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)  # what workers and gateways say of themselves
    try:
        return _simulate(options)
    except KeyboardInterrupt:
        print("simulate: interrupted, no report", file=sys.stderr)
        return 1
    finally:
        logging.disable(before)


def _simulate(options: argparse.Namespace) -> int:
    try:
        spec = parse_workload(options.trace, options.data)
        _check_data(spec)
        world = _world(options)
        runs = _runs(options, spec, world)
        write_report(
            runs,
            options.out,
            slo=Slo(options.slo_ttft, options.slo_tpot),
            workload=format_workload(spec),
        )
    except ValueError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 1
    print(f"report: {options.out / HTML_NAME}", file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print((options.out / JSON_NAME).read_text(encoding="utf-8"), end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="polyhost simulate",
        description="Run a workload through the product's own code in modelled time.",
        epilog="keys of a workload:\n" + options_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("trace", metavar="TRACE", help="NAME or NAME:key=value,... or the path of a CSV file")
    add("--data", type=Path, metavar="DIR", help="folder of the traces")
    add("--out", type=Path, metavar="DIR", default=Path("simulation"), help="of the report")
    add("--workers", type=int, default=4, metavar="N", help="workers (4)")
    add(
        "--device",
        default="h100",
        metavar="NAME|FILE",
        help=f"what each has: {', '.join(DEVICES)}, or a file of bench.sim_calibrate (h100)",
    )
    add("--memory", type=float, metavar="GIB", help="of the device, in place of its own")
    add("--host-memory", type=float, metavar="GIB", help="of the host tier")
    add("--cost", type=float, metavar="PRICE", help="of a worker's hour")
    add("--models", default="20", metavar="N|FILE", help="hosted models (20), or a list of them")
    add("--mix", choices=sorted(MIXES), default="mixed", help="their shapes (mixed)")
    add("--tenants", type=int, default=16, metavar="N", help="tenants (16)")
    add("--weights", choices=sorted(WEIGHTS), default="equal", help="their shares (equal)")
    add("--seed", type=int, default=0, metavar="N", help="of world and workload (0)")
    add(
        "--policy",
        action="append",
        default=[],
        metavar="KIND=NAME,...",
        help="one run more with baselines: "
        + "; ".join(f"{kind}: {', '.join(names)}" for kind, names in NAMES.items()),
    )
    add("--only", action="store_true", help="no run with the product's own policies")
    add("--json", action="store_true", help="the report as JSON on standard output")
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of gateway or engine, such as max_num_seqs=128",
    )
    add("--until", type=float, metavar="SECONDS", help="end the simulated time there")
    add("--sample", type=float, default=1.0, metavar="SECONDS", help="between samples (1)")
    add("--slo-ttft", type=float, default=Slo().ttft_s, metavar="SECONDS", help="first token")
    add("--slo-tpot", type=float, default=Slo().tpot_s, metavar="SECONDS", help="each further one")
    return parser


def _world(options: argparse.Namespace) -> World:
    if min(options.workers, options.tenants) < 1:
        raise ValueError("a world has at least one worker and one tenant")
    device = find_device(options.device)
    return World(
        workers=options.workers,
        device=_figures(device.figures, options),
        models=_models(options),
        tenants=make_tenants(options.tenants, options.seed, options.weights),
        seed=options.seed,
        settings={**device.settings, **dict(parse_setting(text) for text in options.set)},
    )


def _models(options: argparse.Namespace) -> tuple[SimModel, ...]:
    text = options.models
    if not text.lstrip("-").isdigit():
        if not Path(text).is_file():
            raise ValueError(f"--models {text}: write how many, or the path of a JSON list of them")
        return read_models(Path(text))
    if int(text) < 1:
        raise ValueError("a world has at least one model")
    return make_models(int(text), options.seed, options.mix)


def _check_data(spec: WorkloadSpec) -> None:
    """Whoever names a trace must say where it lies."""
    if spec.name == SYNTHETIC or spec.name.endswith(CSV_SUFFIXES):
        return
    if spec.data is None:
        raise ValueError(
            f"{spec.name} is a recorded trace: name the folder that holds it with --data, or "
            "write synthetic:rate=5,minutes=10, which needs none"
        )
    if not spec.data.is_dir():
        raise ValueError(
            f"--data {spec.data} is no folder: name the one that holds traces/ (docs/simulator.md)"
        )


def _figures(device: DeviceFigures, options: argparse.Namespace) -> DeviceFigures:
    if options.memory is not None:
        device = replace(device, memory_bytes=int(options.memory * GIB))
    if options.host_memory is not None:
        device = replace(device, host_bytes=int(options.host_memory * GIB))
    return device if options.cost is None else replace(device, cost_per_hour=options.cost)


def _runs(options: argparse.Namespace, spec: WorkloadSpec, world: World) -> Mapping[str, Run]:
    """One run for each choice of policies, all with the same requests."""
    if options.only and not options.policy:
        raise ValueError("--only leaves nothing to run: name a --policy")
    chosen: dict[str, dict[str, str]] = {} if options.only else {OURS: {}}
    for text in options.policy:
        policies = dict(parse_pair(item) for item in text.split(","))
        parse_policies(policies)
        chosen[text] = policies
    runs: dict[str, Run] = {}
    for name, policies in chosen.items():
        sizes = (len(world.tenants), len(world.models), world.seed)
        run = runs[name] = simulate(
            replace(world, policies=policies),
            open_workload(spec, *sizes),
            until_s=options.until,
            sample_s=options.sample,
            future=open_workload(spec, *sizes) if policies.get("evict") == "belady" else None,
        )
        print(_line(name, run), file=sys.stderr, flush=True)
    return runs


def _line(name: str, run: Run) -> str:
    ends = ", ".join(
        f"{count} {outcome}"
        for code, outcome in enumerate(OUTCOMES)
        if (count := run.records.outcome.count(code))
    )
    return (
        f"{name}: {len(run.records)} requests ({ends}), {len(run.swaps)} swaps, "
        f"{run.simulated_s:.0f} s simulated in {run.wall_s:.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
