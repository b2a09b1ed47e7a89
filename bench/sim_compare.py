"""`python -m bench.sim_compare SCENARIO... --output FILE`: policies beside each other, simulated.

    fairness     tenants that are unkind to one another (bench/sim/scenarios/fairness.py): all
                 eight worlds, or some by name
    thrash       two models that do not fit together, asked for in turn (thrash.py)
    popularity   a trace over a catalog that does not fit (popularity.py)
    real         the same arrivals on the real server and in the simulator (real.py); it needs
                 --data and --device, a file of bench.sim_calibrate

A policy is `ours`, or baselines of bench/sim/baselines by kind (`share=fcfs`,
`evict=lru+place=eager`); `/NAME=VALUE,...` behind either changes settings of gateway or engine, or
parameters of our eviction (`ours/gather_wait_s=1,eviction_margin=2`).

Every scenario runs under every policy on the same requests. What has been run is in the output file
and is not run again, so that what was interrupted, or is asked for more, goes on.
"""

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from bench import command, processes
from bench.sim.baselines.choose import Policy, parse_policy
from bench.sim.scenarios import fairness, popularity, real, thrash
from bench.sim.scenarios.options import Figures, Options
from bench.sim.spec import WorkloadError

Row = dict[str, Any]


class Family(Protocol):
    """Scenarios of one kind: a module of bench/sim/scenarios."""

    POLICIES: tuple[str, ...]
    COLUMNS: tuple[str, ...]

    def names(self, options: Options) -> list[str]:
        """Of its scenarios. Raises ValueError."""

    def run(self, name: str, policy: Policy, seed: int, options: Options) -> Figures:
        """One run."""


FAMILIES: dict[str, Family] = {"fairness": fairness, "thrash": thrash, "popularity": popularity}


class Cell(NamedTuple):
    """One run."""

    family: str
    scenario: str
    policy: str
    seed: int
    seconds: float | None

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from others in the output file."""
        return tuple(self[1:])


def cells_of(arguments: argparse.Namespace, options: Options) -> list[Cell]:
    """Every combination of what was asked for. Raises ValueError."""
    chosen: dict[str, list[str]] = {}
    for word in arguments.scenario:
        if word in FAMILIES:
            chosen.setdefault(word, []).extend(FAMILIES[word].names(options))
        elif word in fairness.SCENARIOS:
            chosen.setdefault("fairness", []).append(word)
        else:
            known = (*FAMILIES, "real", *fairness.SCENARIOS)
            raise ValueError(f"there is no scenario {word!r}: one of {', '.join(known)}")
    return [
        Cell(family, name, policy, seed, options.seconds)
        for family, names in chosen.items()
        for name in names
        for policy in arguments.policy or FAMILIES[family].POLICIES
        for seed in arguments.seeds
    ]


def run_cell(cell: Cell, options: Options) -> Figures:
    """Figures to six digits: the last ones differ between machines."""
    logging.disable(logging.CRITICAL)
    policy = parse_policy(cell.policy)
    figures = FAMILIES[cell.family].run(cell.scenario, policy, cell.seed, options)
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in figures.items()
    }


def read_rows(output: Path) -> dict[tuple[object, ...], Row]:
    """Rows of earlier runs; none where there is no file."""
    if not output.exists():
        return {}
    rows: list[Row] = json.loads(output.read_text(encoding="utf-8"))["rows"]
    return {tuple(row[name] for name in Cell._fields[1:]): row for row in rows}


def run_all(cells: Sequence[Cell], options: Options, jobs: int, output: Path) -> None:
    """Run what the output file lacks; it is written after every run."""
    rows = read_rows(output)
    for cell, figures in _figures([c for c in cells if c.key not in rows], options, jobs):
        rows[cell.key] = {**cell._asdict(), **figures}
        output.parent.mkdir(parents=True, exist_ok=True)
        ordered = sorted(rows.values(), key=lambda row: [str(row[n]) for n in Cell._fields])
        output.write_text(json.dumps({"rows": ordered}, indent=1) + "\n", encoding="utf-8")
        print(f"{cell.scenario}, {cell.policy}, seed {cell.seed}", file=sys.stderr, flush=True)


def _figures(cells: Sequence[Cell], options: Options, jobs: int) -> Iterator[tuple[Cell, Figures]]:
    if jobs < 2:
        for cell in cells:
            yield cell, run_cell(cell, options)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        futures = {pool.submit(run_cell, cell, options): cell for cell in cells}
        for future in as_completed(futures):
            yield futures[future], future.result()


def table(cells: Sequence[Cell], rows: Mapping[tuple[object, ...], Row]) -> str:
    """A block for each scenario, means over the seeds; then what all of them say together."""
    there = [(cell, rows[cell.key]) for cell in cells if cell.key in rows]
    lines = []
    for family, kind in FAMILIES.items():
        mine = [(cell, row) for cell, row in there if cell.family == family]
        if mine:
            lines.append(f"{family:<44}" + "".join(f"{name:>17}" for name in kind.COLUMNS))
        for scenario in dict.fromkeys(cell.scenario for cell, _ in mine):
            lines.append(scenario)
            for policy in dict.fromkeys(c.policy for c, _ in mine if c.scenario == scenario):
                found = [r for c, r in mine if (c.scenario, c.policy) == (scenario, policy)]
                means = "".join(f"{_mean(found, name):>17}" for name in kind.COLUMNS)
                lines.append(f"  {policy:<42}{means}")
        if mine and kind is popularity:
            lines += popularity.verdicts([row for _, row in mine])
    return "\n".join(lines)


def _mean(rows: Sequence[Row], name: str) -> str:
    values = [row[name] for row in rows if row.get(name) is not None]
    return f"{sum(values) / len(values):.4g}" if values else "-"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.sim_compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, default = parser.add_argument, Options()
    add("scenario", nargs="+", metavar="SCENARIO")
    add("--output", type=Path, required=True, metavar="FILE", help="JSON, kept from run to run")
    add("--policy", nargs="+", metavar="NAME", help="else those of the scenario")
    add("--seeds", type=int, nargs="+", default=[0], metavar="N")
    add("--seconds", type=float, metavar="S", help="of fairness (120) and thrash (100)")
    add("--table", action="store_true", help="run nothing, print what is there")
    add("--jobs", type=int, default=1, metavar="N", help="processes (1)")
    add("--data", type=Path, metavar="DIR", help="folder of the traces")
    add("--trace", nargs="+", default=default.traces, metavar="WORDS", help="of popularity")
    add("--models", type=int, nargs="+", default=default.models, metavar="N", help="of popularity")
    add("--memory", type=float, nargs="+", default=default.memory, metavar="SHARE")
    add("--mix", default=default.mix, help="shapes of popularity's models (mixed)")
    add("--device", type=Path, metavar="FILE", help="of real: from bench.sim_calibrate")
    add("--repeats", type=int, default=3, metavar="N", help="of real (3)")
    add("--workers", type=int, default=1, metavar="N", help="of real (1)")
    add("--work-dir", type=Path, metavar="DIR", help="of real: keeps models and packs")
    return parser.parse_args(argv)


def run_real(arguments: argparse.Namespace) -> int:
    """The real server beside the simulator. Raises ValueError, OSError, ServerFailed."""
    if arguments.data is None or arguments.device is None:
        raise ValueError("real needs --data and --device")
    data, device, seed = arguments.data, arguments.device, arguments.seeds[0]
    with command.working_in(arguments.work_dir) as work_dir:
        repeats, num_workers = arguments.repeats, arguments.workers
        result = real.measure(data, device, repeats, seed, work_dir, num_workers)
    command.keep(result, arguments.output, "sim-real")
    print(real.table(result["summary"]))
    print(f"at share: the workers' cores at {result['core_share']:.0%}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 the server failed, 2 what was asked for makes no sense."""
    arguments = parse(argv)
    options = Options(
        arguments.seconds,
        arguments.data,
        tuple(arguments.trace),
        tuple(arguments.models),
        tuple(arguments.memory),
        arguments.mix,
    )
    try:
        if arguments.scenario == ["real"]:
            return run_real(arguments)
        for policy in arguments.policy or ():
            parse_policy(policy)
        cells = cells_of(arguments, options)
    except (processes.ServerFailed, TimeoutError) as error:
        print(f"sim_compare: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"sim_compare: {error}", file=sys.stderr)
        return 2
    try:
        if not arguments.table:
            run_all(cells, options, arguments.jobs, arguments.output)
    except WorkloadError as error:
        print(f"sim_compare: {error}", file=sys.stderr)
        return 2
    print(table(cells, read_rows(arguments.output)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
