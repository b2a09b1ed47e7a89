"""Which plots a report shows: of all runs together, and of each for itself.

Lives here: series put into axes and captions. Does not: reckoning (timelines.py),
drawing (plots.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from bench.sim import plots
from bench.sim.columns import Slo
from bench.sim.plots import Axis
from bench.sim.timelines import Line, Timelines

_LEAST_LOG_S = 1e-4
_LOG_S = Axis("", log=True, text=plots.short_seconds)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A plot with its caption; the drawing is SVG."""

    title: str
    remark: str
    drawing: str


def shared(series: Mapping[str, Timelines], slo: Slo) -> list[Drawn]:
    """All runs in the same plots."""
    return [*_over_requests(series), *_over_time(series, slo)]


def _every(series: Mapping[str, Timelines], pick: Callable[[Timelines], Line]) -> dict[str, Line]:
    """A line of each run; a single one needs no name."""
    return {name if len(series) > 1 else "": pick(one) for name, one in series.items()}


def _over_requests(series: Mapping[str, Timelines]) -> list[Drawn]:
    share = Axis("share of requests", low=0.0, high=1.0, text=plots.percent)
    ttft, tenants = "share of requests that had it within", "share of tenants that had it within"
    tpot = "share of finished requests at most so slow"
    wanted: tuple[tuple[str, str, Callable[[Timelines], Line]], ...] = (
        ("Time to first token", ttft, lambda one: _positive(one.ttft_cdf)),
        ("Time per output token", tpot, lambda one: _positive(one.tpot_cdf)),
        (
            "Time to first token, p95 of each tenant",
            tenants,
            lambda one: _positive(one.tenants_cdf),
        ),
    )
    return [
        Drawn(title, remark, plots.lines(_every(series, pick), _LOG_S, share))
        for title, remark, pick in wanted
    ]


def _over_time(series: Mapping[str, Timelines], slo: Slo) -> list[Drawn]:
    time = _time(max(one.end_s for one in series.values()))
    count = Axis("", low=0.0)
    share = Axis("", low=0.0, high=1.0, text=plots.percent)
    in_slo = {"SLO": slo.ttft_s}
    arrived, per_worker = "by the time of arrival", "seconds of loads a second and worker"
    jain = "of service over weight, tenants that waited through 10 s"
    wanted: tuple[tuple[str, str, Axis, Callable[[Timelines], Line], dict[str, float]], ...] = (
        ("Time to first token, p95", arrived, _LOG_S, lambda one: one.ttft_p95, in_slo),
        ("Time to first token, p50", arrived, _LOG_S, lambda one: one.ttft_p50, in_slo),
        ("Output tokens a second", "of all answers", count, lambda one: one.output_tok_s, {}),
        ("Waiting requests", "tickets in the queue", count, lambda one: one.waiting, {}),
        ("Running requests", "on all workers", count, lambda one: one.running, {}),
        ("Utilisation", "busy time of the devices", share, lambda one: one.utilisation, {}),
        ("Loading", per_worker, count, lambda one: one.load_s, {}),
        ("Jain index", jain, Axis("", low=0.0, high=1.0), lambda one: one.jain, {}),
    )
    figures = [
        Drawn(title, remark, plots.lines(_every(series, pick), time, y, marks))
        for title, remark, y, pick, marks in wanted
    ]
    return [_demand(series, time), *figures]


def _demand(series: Mapping[str, Timelines], time: Axis) -> Drawn:
    """Arrivals are the same in all runs of one workload; refusals are not."""
    demand = {"arrivals a second": next(iter(series.values())).arrivals}
    for name, one in series.items():
        if one.refused[1].any():
            demand[f"refused, {name}" if len(series) > 1 else "refused"] = one.refused
    remark = "requests a second as they arrive, and those refused"
    return Drawn("Demand", remark, plots.lines(demand, time, Axis("", low=0.0)))


def own(series: Timelines) -> list[Drawn]:
    """Of one run: who has the memory, who has the device."""
    time, up = _time(series.end_s), Axis("", low=0.0)
    service = "device seconds a second; those with most, and all others"
    wanted = (
        ("Pages by owner", "of all workers", series.at_s, series.pages),
        ("Service by tenant", service, series.at_s[1:], series.service),
    )
    return [
        Drawn(title, remark, plots.stacked(at_s, layers, time, up))
        for title, remark, at_s, layers in wanted
        if layers
    ]


def _time(end_s: float) -> Axis:
    return Axis("simulated time", low=0.0, high=end_s, text=plots.seconds)


def _positive(line: Line) -> Line:
    """For a scale of decades: what is shorter than a tenth of a millisecond is drawn as that."""
    return np.maximum(line[0], _LEAST_LOG_S), line[1]
