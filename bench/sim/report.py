"""The report of one simulation, or of several side by side: `report.json` and `report.html`.

Lives here: which figures are shown, in which order and words, and the two files. Does not: how they
are reckoned (metrics.py, timelines.py, fair_metrics.py) or drawn (charts.py); the page's elements
are report.html's, its style is page.css's.

Both files are functions of the runs: no wall time, no paths, sorted keys. The page asks for nothing
from outside: no scripts, no fonts.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2

from bench.sim import charts, plots
from bench.sim.columns import Slo
from bench.sim.metrics import Tree, measure
from bench.sim.timelines import Timelines
from bench.sim.types import Run

FORMAT = 1
JSON_NAME, HTML_NAME = "report.json", "report.html"
SHOWN_ROWS = 25
"""Tenants or models that the page shows of a run; the JSON file has more."""
HERE = Path(__file__).parent
Text = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Cell:
    """A table's cell: text, a small remark beside it, whether it is the best of its row."""

    text: str
    remark: str = ""
    best: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of the comparison. `better`: 1 more is better, -1 less, 0 neither."""

    label: str
    path: str
    text: Text
    better: int = 0


_plain: Text = "{:,.0f}".format
_tenths: Text = "{:,.1f}".format
_hundredths: Text = "{:,.2f}".format
_ratio: Text = "{:.3f}".format


def _share(value: float) -> str:
    return f"{value * 100:.1f} %"


def _millis(value: float) -> str:
    return f"{value * 1e3:,.1f}"


PARTS: dict[str, tuple[Figure, ...]] = {
    "Requests": (
        Figure("arrived", "requests.num", _plain),
        Figure("finished", "requests.finished", _plain, 1),
        Figure("within the SLO", "requests.good_share", plots.percent, 1),
        Figure("refused", "refused.num", _plain, -1),
        Figure("timed out", "requests.by_outcome.timeout", _plain, -1),
        Figure("failed", "requests.by_outcome.error", _plain, -1),
        Figure("left by the client", "requests.by_outcome.abort", _plain),
    ),
    "Latency": (
        Figure("time to first token, p50", "latency_s.ttft.p50", plots.seconds, -1),
        Figure("time to first token, p95", "latency_s.ttft.p95", plots.seconds, -1),
        Figure("time to first token, p99", "latency_s.ttft.p99", plots.seconds, -1),
        Figure("time per output token, p50", "latency_s.tpot.p50", plots.seconds, -1),
        Figure("time per output token, p95", "latency_s.tpot.p95", plots.seconds, -1),
        Figure("time per output token, p99", "latency_s.tpot.p99", plots.seconds, -1),
        Figure("in the queue, p50", "latency_s.queue.p50", plots.seconds, -1),
        Figure("in the queue, p95", "latency_s.queue.p95", plots.seconds, -1),
        Figure("whole request, p95", "latency_s.e2e.p95", plots.seconds, -1),
    ),
    "Throughput": (
        Figure("output tokens a second", "throughput.output_tok_s", plots.number, 1),
        Figure("of them within the SLO", "throughput.goodput_tok_s", plots.number, 1),
        Figure("prompt tokens a second", "throughput.prompt_tok_s", plots.number, 1),
        Figure("prompt tokens from the cache", "prefix.cached_share", plots.percent, 1),
    ),
    "Models": (
        Figure("loads", "swaps.loads", _plain, -1),
        Figure("loads a minute", "swaps.loads_per_minute", plots.number, -1),
        Figure("load time", "swaps.load_s", plots.seconds, -1),
        Figure("reloads: the worker had it before", "swaps.reloads", _plain, -1),
        Figure("reload time", "swaps.reload_s", plots.seconds, -1),
        Figure("evictions", "swaps.evictions", _plain, -1),
    ),
    "Fairness": (
        Figure("Jain index, mean", "fairness.jain_mean", _ratio, 1),
        Figure("Jain index, p5", "fairness.jain_p5", _ratio, 1),
        Figure("service gone to the wrong tenant", "fairness.misdirected_share", plots.percent, -1),
        Figure("worst share against its due", "fairness.worst_weight_error", plots.percent, -1),
        Figure("largest service gap", "fairness.largest_gap.gap_s", plots.seconds, -1),
        Figure("bound of the gap", "fairness.largest_gap.bound_s", plots.seconds),
        Figure("gap over bound", "fairness.largest_gap.of_bound", _ratio, -1),
    ),
    "Device and cost": (
        Figure("utilisation", "device.utilisation", plots.percent, 1),
        Figure("device time accounted for", "device.accounted", plots.percent),
        Figure("of it the system's", "device.system_share", plots.percent, -1),
        Figure("cost of the run", "device.cost", _hundredths),
        Figure(
            "per million output tokens", "device.cost_per_million_output_tokens", _hundredths, -1
        ),
        Figure("per million good tokens", "device.cost_per_million_good_tokens", _hundredths, -1),
        Figure(
            "per million tokens, prompts too", "device.cost_per_million_tokens", _hundredths, -1
        ),
    ),
}


def write_report(
    runs: Mapping[str, Run],
    folder: Path,
    *,
    slo: Slo | None = None,
    workload: str = "",
    title: str = "Simulation",
) -> None:
    """Write `report.json` and `report.html` into `folder` (made if missing).

    `runs` by the name of what differs between them, a policy for example; the first is what the
    others are compared with. `workload` is its text form. Raises ValueError without a run.
    """
    if not runs:
        raise ValueError("a report needs a run")
    slo = slo or Slo()
    trees: dict[str, Tree] = {}
    series: dict[str, Timelines] = {}
    for name, run in runs.items():
        trees[name], series[name] = measure(run, slo)
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"format": FORMAT, "slo": asdict(slo), "workload": workload, "runs": trees}
    text = json.dumps(whole, indent=1, sort_keys=True, allow_nan=False)
    (folder / JSON_NAME).write_text(text + "\n", encoding="utf-8")
    html = _page(title, workload, slo, trees, series)
    (folder / HTML_NAME).write_text(html, encoding="utf-8")


def value_at(tree: Tree, path: str) -> float | None:
    """The figure at a dotted path; None where any part of it is missing."""
    found: Any = tree
    for key in path.split("."):
        if not isinstance(found, dict) or key not in found:
            return None
        found = found[key]
    return None if found is None else float(found)


def _page(
    title: str, workload: str, slo: Slo, trees: dict[str, Tree], series: dict[str, Timelines]
) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    first = next(iter(trees.values()))
    world = first["world"]
    facts = (
        ("workers", f"{world['workers']:,} x {world['device']}"),
        ("models", f"{world['num_models']:,}"),
        ("tenants", f"{world['num_tenants']:,}"),
        ("simulated", plots.seconds(first["simulated_s"])),
        ("seed", str(world["seed"])),
        ("SLO", f"TTFT {plots.seconds(slo.ttft_s)}, TPOT {plots.seconds(slo.tpot_s)}"),
    )
    shapes = ", ".join(f"{num} x {shape}" for shape, num in sorted(world["shapes"].items()))
    return environment.get_template("report.html").render(
        title=title,
        style=(HERE / "page.css").read_text("utf-8"),
        workload=workload,
        facts=facts,
        world=(
            ("models", shapes),
            ("device's figures", world["device_source"] or "not said"),
            ("price of a device hour", _hundredths(world["cost_per_hour"])),
            *sorted({**world["policies"], **world["settings"]}.items()),
        ),
        tiles=_tiles(first),
        parts=_comparison(trees),
        shared=charts.shared(series, slo),
        runs=[
            {"name": name, "drawn": charts.own(series[name]), "groups": _groups(tree)}
            for name, tree in trees.items()
        ],
    )


TILES: tuple[tuple[str, str, Text, str, str, Text], ...] = (
    ("Within the SLO", "requests.good_share", plots.percent, "of {}", "requests.num", _plain),
    (
        *("Good tokens a second", "throughput.goodput_tok_s", plots.number),
        *("of {}", "throughput.output_tok_s", plots.number),
    ),
    (
        *("TTFT p95", "latency_s.ttft.p95", plots.seconds),
        *("p50 {}", "latency_s.ttft.p50", plots.seconds),
    ),
    (
        *("TPOT p95", "latency_s.tpot.p95", plots.seconds),
        *("p50 {}", "latency_s.tpot.p50", plots.seconds),
    ),
    ("Jain index p5", "fairness.jain_p5", _ratio, "mean {}", "fairness.jain_mean", _ratio),
    (
        *("Utilisation", "device.utilisation", plots.percent),
        *("{} loads a minute", "swaps.loads_per_minute", plots.number),
    ),
    (
        *("Cost per M tokens", "device.cost_per_million_output_tokens", _hundredths),
        *("good ones {}", "device.cost_per_million_good_tokens", _hundredths),
    ),
)
"""Word, path and text of a figure; a remark with another in it."""


def _tiles(tree: Tree) -> list[tuple[str, str, str]]:
    def shown(path: str, text: Text) -> str:
        value = value_at(tree, path)
        return "-" if value is None else text(value)

    return [
        (word, shown(path, text), remark.format(shown(other, other_text)))
        for word, path, text, remark, other, other_text in TILES
    ]


def _comparison(trees: dict[str, Tree]) -> list[list[str | list[Cell]]]:
    """The rows of each part, under its name."""
    parts: list[list[str | list[Cell]]] = []
    for part, figures in PARTS.items():
        wanted = [*figures, *(_reasons(trees) if part == "Requests" else ())]
        if lines := [line for figure in wanted if (line := _line(figure, trees))]:
            parts.append([part, *lines])
    return parts


def _line(figure: Figure, trees: dict[str, Tree]) -> list[Cell] | None:
    values = [value_at(tree, figure.path) for tree in trees.values()]
    known = [value for value in values if value is not None]
    if not known:
        return None
    best = max(known) if figure.better > 0 else min(known)
    tells = figure.better != 0 and figure.text(max(known)) != figure.text(min(known))
    cells = [Cell(figure.label)]
    for value in values:
        if value is None:
            cells.append(Cell("-"))
            continue
        text = figure.text(value)
        remark = _change(value, values[0]) if len(values) > 1 else ""
        cells.append(Cell(text, remark, tells and text == figure.text(best)))
    return cells


def _change(value: float, base: float | None) -> str:
    """Against the first run; a space where nothing is to be said, so that columns stay aligned."""
    if not base or value == base:
        return " "
    if value / base >= 10:
        return f"x{value / base:.0f}"
    return f"{(value / base - 1) * 100:+.0f} %".replace("-0 %", "+0 %")


def _reasons(trees: dict[str, Tree]) -> list[Figure]:
    reasons = sorted({key for tree in trees.values() for key in tree["refused"]["by_reason"]})
    return [
        Figure(f"refused: {reason.replace('_', ' ')}", f"refused.by_reason.{reason}", _plain)
        for reason in reasons
    ]


def _groups(tree: Tree) -> list[tuple[str, list[str], list[list[Cell]]]]:
    """Words, head and rows of the tables of one run."""
    found = []
    for what in ("tenants", "models"):
        group = tree[what]
        shown = min(len(group["rows"]), SHOWN_ROWS)
        words = f"{what.capitalize()}: {shown} of {group['num']:,} with requests, most served first"
        found.append((words, *_group_table(what, group["rows"][:shown])))
    return found


def _group_table(what: str, rows: Sequence[Tree]) -> tuple[list[str], list[list[Cell]]]:
    last: tuple[tuple[str, str, Text], ...] = (
        (("weight", "weight", plots.number),)
        if what == "tenants"
        else (("loads", "loads", _plain),)
    )
    figures: tuple[tuple[str, str, Text], ...] = (
        ("service, s", "service_s", _tenths),
        ("share", "service_share", _share),
        ("requests", "requests", _plain),
        ("refused", "refused", _plain),
        ("in SLO", "good_share", _share),
        ("output tokens", "output_tokens", _plain),
        ("TTFT p50, s", "ttft_p50_s", _hundredths),
        ("p95, s", "ttft_p95_s", _hundredths),
        ("TPOT p50, ms", "tpot_p50_s", _millis),
        ("p95, ms", "tpot_p95_s", _millis),
        ("queue p95, s", "queue_p95_s", _hundredths),
        *last,
    )
    head = [what.removesuffix("s"), *(word for word, _, _ in figures)]
    body = []
    for row in rows:
        name = (
            row["name"]
            if what == "tenants"
            else f"{row['name']} ({row['shape'].rpartition('/')[2]})"
        )
        values = [(row[key], text) for _, key, text in figures]
        body.append([Cell(name), *(Cell("-" if v is None else text(v)) for v, text in values)])
    return head, body
