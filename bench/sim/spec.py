"""A workload in words: `NAME:key=value,...`, as the command line takes it.

Lives here: `WorkloadSpec`, its text form both ways, errors that say what to write. Does not: making
any request (workloads.py).

    azure2023_conv:rate=20,minutes=10,flood=tenant0@60-120x10
    synthetic:rate=50,requests=1000000,cv=2,lengths=short
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bench.sim.casting import Habits
from bench.sim.random_lengths import DISTRIBUTIONS
from bench.sim.servegen import SERVICES
from bench.sim.shaping import HOURS, Burst, Diurnal
from bench.sim.traces import CSV_SUFFIXES, TABLES

SYNTHETIC = "synthetic"
BURSTGPT = "burstgpt"
SERVEGEN = ("servegen", *(f"servegen_{service}" for service in SERVICES))
NAMES = (SYNTHETIC, *TABLES, *SERVEGEN, BURSTGPT)
Asked = int | Literal["exact"]


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """A workload. Where neither an end nor a rate is given, a trace runs once at its own pace.

    name          one of NAMES or the path of a CSV file
    data          the folder of the traces; synthetic workloads need none
    rate          mean requests a second, bursts not counted; None: the trace's own
    minutes       end of the run; `requests` another: whichever comes first
    speed         the trace's time is run so many times as fast
    start_s       where in the trace to begin
    cv            of a synthetic workload's gaps
    lengths       of a synthetic workload
    scale         lengths of prompts (their blocks) and answers are multiplied by it
    max_prompt, max_output   cut to so many tokens; 0: never
    max_tokens    what clients ask for; "exact": what the answer will have
    aborts        share of the clients that leave, `abort_after_s` after sending in the mean
    """

    name: str
    data: Path | None = None
    rate: float | None = None
    minutes: float | None = None
    requests: int | None = None
    speed: float = 1.0
    start_s: float = 0.0
    cv: float = 1.0
    lengths: str = "chat"
    scale: float = 1.0
    max_prompt: int = 0
    max_output: int = 0
    max_tokens: Asked = 4096
    aborts: float = 0.0
    abort_after_s: float = 5.0
    diurnal: Diurnal | None = None
    bursts: tuple[Burst, ...] = ()
    habits: Habits = field(default_factory=Habits)


class WorkloadError(ValueError):
    """A workload that cannot be; the message says what to write instead."""


def parse_workload(text: str, data: Path | None = None) -> WorkloadSpec:
    """The workload that a text means. Raises WorkloadError."""
    name, _, options = text.strip().partition(":")
    if name not in NAMES and not name.endswith(CSV_SUFFIXES):
        raise WorkloadError(
            f"there is no workload {name!r}: write one of {', '.join(NAMES)}, or the path of a "
            ".csv or .csv.gz file with columns t_s,in_tokens,out_tokens"
        )
    values: dict[str, object] = {}
    bursts: list[Burst] = []
    habits: dict[str, object] = {}
    for item in filter(None, (part.strip() for part in options.split(","))):
        key, equals, value = item.partition("=")
        if not equals or key not in _OPTIONS:
            raise WorkloadError(
                f"{item!r} in a workload: write key=value, the key one of {', '.join(_OPTIONS)}"
            )
        option = _OPTIONS[key]
        try:
            read = option.read(value)
        except ValueError as error:
            raise WorkloadError(
                f"{key}={value}: {option.meaning}; write for example {key}={option.example}"
            ) from error
        if isinstance(read, Burst):
            bursts.append(read)
        elif isinstance(read, _Leavers):
            values |= {"aborts": read.share, "abort_after_s": read.after_s}
        elif option.place.startswith("habits."):
            habits[option.place.removeprefix("habits.")] = read
        else:
            values[option.place] = read
    spec = WorkloadSpec(
        name,
        data,
        bursts=tuple(bursts),
        habits=Habits(**habits),  # type: ignore[arg-type]
        **values,  # type: ignore[arg-type]
    )
    _check(spec)
    return spec


def format_workload(spec: WorkloadSpec) -> str:
    """The text that means this workload; parsed again it gives the same but for the folder."""
    plain, items = WorkloadSpec(spec.name), []
    for key, option in _OPTIONS.items():
        if key in ("aborts", "flood", "spray", "seconds"):
            continue
        place = option.place.removeprefix("habits.")
        holder, default = (spec.habits, plain.habits) if place != option.place else (spec, plain)
        value = getattr(holder, place)
        if value != getattr(default, place):
            items.append(f"{key}={option.write(value)}")
    if spec.aborts:
        items.append(f"aborts={spec.aborts:.17g}@{spec.abort_after_s:.17g}")
    for burst in spec.bursts:
        span = f"{burst.start_s:.17g}-{burst.end_s:.17g}"
        items.append(f"{burst.kind}=tenant{burst.tenant}@{span}x{burst.times:.17g}")
    return spec.name + (":" + ",".join(items) if items else "")


def options_help() -> str:
    """A line for each key, for the command's help."""
    return "\n".join(
        f"{key}={option.example:<24} {option.meaning}" for key, option in _OPTIONS.items()
    )


def _check(spec: WorkloadSpec) -> None:
    if spec.name == SYNTHETIC and spec.rate is None:
        raise WorkloadError("a synthetic workload has no rate of its own: write for example rate=5")
    if spec.name in (SYNTHETIC, BURSTGPT) and spec.minutes is None and spec.requests is None:
        raise WorkloadError(
            f"{spec.name} never ends by itself: write for example minutes=10 or requests=1000"
        )
    for only, key, changed in (
        (SYNTHETIC, "cv", spec.cv != 1.0),
        (SYNTHETIC, "lengths", spec.lengths != "chat" and spec.name != BURSTGPT),
    ):
        if changed and spec.name != only:
            raise WorkloadError(f"{key} is for the {only} workload: {spec.name} has its own")
    if spec.name == SYNTHETIC and (spec.speed != 1.0 or spec.start_s):
        raise WorkloadError("speed and start are for traces: a synthetic workload has only a rate")


@dataclass(frozen=True, slots=True)
class _Leavers:
    share: float
    after_s: float


@dataclass(frozen=True, slots=True)
class _Option:
    place: str
    read: Callable[[str], object]
    example: str
    meaning: str

    def write(self, value: object) -> str:
        """The value as it is read."""
        if isinstance(value, Diurnal):
            return f"{value.swing:.17g}@{value.period_s:.17g}"
        return f"{value:.17g}" if isinstance(value, float) else str(value)


def _number(
    least: float, most: float = float("inf"), *, above: bool = False
) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = float(text)
        if not least <= value <= most or (above and value == least) or value == float("inf"):
            raise ValueError(text)
        return value

    return read


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError(text)
        return value

    return read


def _asked(text: str) -> Asked:
    return "exact" if text == "exact" else _whole(1)(text)


def _lengths(text: str) -> str:
    if text not in DISTRIBUTIONS:
        raise ValueError(text)
    return text


def _seconds(text: str) -> float:
    return _number(0.0, above=True)(text) / 60.0


def _leavers(text: str) -> _Leavers:
    share, _, after = text.partition("@")
    mean_s = _number(0.0, above=True)(after) if after else WorkloadSpec("").abort_after_s
    return _Leavers(_number(0.0, 1.0)(share), mean_s)


def _diurnal(text: str) -> Diurnal:
    swing, at, period = text.partition("@")
    return Diurnal(
        _number(0.0, above=True)(period) if at else HOURS * 3600.0, _number(0.0, 1.0)(swing)
    )


def _burst(kind: Literal["flood", "spray"]) -> Callable[[str], Burst]:
    def read(text: str) -> Burst:
        found = re.fullmatch(r"tenant(\d+)@([\d.]+)-([\d.]+)x([\d.]+)", text)
        if found is None:
            raise ValueError(text)
        tenant, start, end, times = found.groups()
        burst = Burst(kind, int(tenant), float(start), float(end), float(times))
        if burst.end_s <= burst.start_s or burst.times <= 0:
            raise ValueError(text)
        return burst

    return read


_POSITIVE = _number(0.0, above=True)
_BURST = "one tenant, from-to in seconds, times what the average tenant sends"
_OPTIONS: dict[str, _Option] = {
    "rate": _Option("rate", _POSITIVE, "20", "mean requests a second"),
    "minutes": _Option("minutes", _POSITIVE, "10", "length of the run"),
    "seconds": _Option("minutes", _seconds, "90", "length of the run"),
    "requests": _Option("requests", _whole(1), "10000", "the run ends after so many"),
    "speed": _Option("speed", _POSITIVE, "2", "the trace's time runs so many times as fast"),
    "start": _Option("start_s", _number(0.0), "3600", "second of the trace to begin at"),
    "cv": _Option("cv", _POSITIVE, "3", "deviation of the gaps over their mean; 1 is Poisson"),
    "lengths": _Option("lengths", _lengths, "chat", f"one of {', '.join(DISTRIBUTIONS)}"),
    "scale": _Option("scale", _POSITIVE, "0.1", "prompts and answers so many times as long"),
    "max_prompt": _Option("max_prompt", _whole(1), "8192", "longer prompts are cut"),
    "max_output": _Option("max_output", _whole(1), "1024", "longer answers end there"),
    "max_tokens": _Option(
        "max_tokens", _asked, "1024", "what clients ask for: a number of tokens, or `exact`"
    ),
    "aborts": _Option("", _leavers, "0.1@5", "share of clients that leave, after seconds (mean)"),
    "diurnal": _Option("diurnal", _diurnal, "0.5@3600", "the rate's swing (0 to 1) over a period"),
    "flood": _Option("", _burst("flood"), "tenant0@60-120x10", _BURST),
    "spray": _Option("", _burst("spray"), "tenant1@60-120x5", f"{_BURST}, over rarely used models"),
    "tenant_zipf": _Option("habits.tenant_zipf", _number(0.0), "1", "exponent of tenants' shares"),
    "top_share": _Option(
        "habits.top_share", _number(0.0, 1.0), "0.8", "what the busiest fifth of models takes"
    ),
    "affinity": _Option(
        "habits.affinity", _number(0.0, 1.0), "0.8", "share that goes to models a tenant prefers"
    ),
    "preferred": _Option("habits.preferred", _whole(1), "3", "models that a tenant prefers"),
}
