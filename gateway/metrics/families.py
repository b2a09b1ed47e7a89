"""Figures of a process, merged over processes, and as Prometheus' text.

    on the event loop    take()      copies of what is counted; costs as much as there are series
    in a thread          build()     families of samples
                         merge()     those of several processes
                         text()      what a scrape gets

A scrape of a thousand models is a hundred thousand lines: built on the event loop, nothing would be
served for most of a second. So what is counted without locks is copied there, as it is
(`Source.take`), and all else happens in a thread. Times stay lists of counts until they are text.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, UnknownMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Labels: TypeAlias = tuple[tuple[str, str], ...]
"""Names and values, sorted."""
Key: TypeAlias = tuple[str, Labels]
Build: TypeAlias = "Callable[[], Iterable[Family]]"

# Gauges that are one thing seen by several processes: the largest counts. All others are added up,
# since each process has its own part of the whole; a test has the list of those.
MAX = frozenset(
    {
        "polyhost_build_info",
        "polyhost_degraded",
        "polyhost_dispatcher_epoch",
        "polyhost_ledger_lag_seconds",
        "polyhost_ledger_refusing",
        "polyhost_ready",
        "process_max_fds",
        "process_start_time_seconds",
    }
)
_KEPT = frozenset({"counter", "histogram"})


class Family(msgspec.Struct, frozen=True, array_like=True):
    """A metric. Either `samples`, (name, labels, value), or a histogram's `times`, (labels, counts
    by bucket, sum), with the upper `bounds` of all buckets but the last."""

    name: str
    text: str
    kind: str
    samples: list[tuple[str, Labels, float]] = []
    times: list[tuple[Labels, list[int], float]] = []
    bounds: tuple[float, ...] = ()
    is_max: bool = False
    """Of several processes the largest counts, in place of the sum."""


class SharedGauge(GaugeMetricFamily):
    """One thing that several processes see; for names in `MAX` any gauge is."""


def gauge(name: str, doc: str, value: float) -> Metric:
    """Without labels."""
    return GaugeMetricFamily(f"polyhost_{name}", doc, value=value)


def total(name: str, doc: str, value: float) -> Metric:
    """A counter without labels."""
    return CounterMetricFamily(f"polyhost_{name}", doc, value=value)


def by(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily] | type[UnknownMetricFamily],
    name: str,
    doc: str,
    labels: list[str],
    rows: Iterable[tuple[list[str], float]],
) -> Metric:
    """`rows`: (values of the labels, value)."""
    metric = family(f"polyhost_{name}", doc, labels=labels)
    for values, value in rows:
        metric.add_metric(values, value)
    return metric


@runtime_checkable
class Source(Protocol):
    """A collector that is counted without locks, on the event loop."""

    def take(self) -> Build:
        """A copy, quickly. What it returns makes families of it, in any thread."""


class MetricsRegistry(CollectorRegistry):
    """One process' collectors."""

    def __init__(self) -> None:
        super().__init__()
        self._sources: list[Collector] = []

    def register(self, collector: Collector) -> None:
        """See CollectorRegistry."""
        super().register(collector)
        self._sources.append(collector)

    def unregister(self, collector: Collector) -> None:
        """See CollectorRegistry."""
        super().unregister(collector)
        self._sources.remove(collector)

    def take(self) -> Callable[[], list[Family]]:
        """On the event loop. What it returns may run in a thread."""
        builds = [
            source.take() if isinstance(source, Source) else _of_library(source)
            for source in self._sources
        ]
        return lambda: [family for build in builds for family in build()]


def _of_library(collector: Collector) -> Build:
    return lambda: (family_of(metric) for metric in collector.collect())


def family_of(metric: Metric) -> Family:
    """When a series began is left out: of a sum it means nothing."""
    samples = [
        (sample.name, tuple(sorted(sample.labels.items())), float(sample.value))
        for sample in metric.samples
        if not sample.name.endswith("_created")
    ]
    is_max = metric.name in MAX or isinstance(metric, SharedGauge)
    return Family(metric.name, metric.documentation, metric.type, samples, is_max=is_max)


def merge(parts: Iterable[Sequence[Family]]) -> list[Family]:
    """All of them as one process'."""
    heads: dict[str, Family] = {}
    values: dict[str, dict[Key, float]] = {}
    times: dict[str, dict[Labels, tuple[list[int], float]]] = {}
    for families in parts:
        for family in families:
            heads.setdefault(family.name, family)
            _add(values.setdefault(family.name, {}), family)
            found = times.setdefault(family.name, {})
            for labels, counts, sum_s in family.times:
                before = found.get(labels)
                if before is not None:
                    counts = [a + b for a, b in zip(before[0], counts, strict=True)]
                    sum_s += before[1]
                found[labels] = counts, sum_s
    return [
        msgspec.structs.replace(
            head,
            samples=[(*key, value) for key, value in values[name].items()],
            times=[(labels, *found) for labels, found in times[name].items()],
        )
        for name, head in heads.items()
    ]


def _add(found: dict[Key, float], family: Family) -> None:
    for name, labels, value in family.samples:
        before = found.get((name, labels))
        if before is None:
            found[name, labels] = value
        elif family.is_max:
            found[name, labels] = max(before, value)
        else:
            found[name, labels] = before + value


class Retired:
    """What processes had counted that are gone: counters never fall."""

    def __init__(self) -> None:
        self.families: list[Family] = []

    def add(self, families: Sequence[Family]) -> None:
        """The last word of one more. What it told of workers the next dispatcher tells again."""
        kept = [
            msgspec.structs.replace(
                family, samples=[sample for sample in family.samples if not _of_worker(sample[1])]
            )
            for family in families
            if family.kind in _KEPT
        ]
        self.families = merge([self.families, kept])


def _of_worker(labels: Labels) -> bool:
    return any(name == "worker" for name, _ in labels)


class MetricsText:
    """Families as Prometheus' text. Histograms of models that had no request for `silent_s` are
    left out, or a large catalog would be megabytes a scrape; their counts go on where they were.
    """

    def __init__(self, silent_s: float = math.inf) -> None:
        self._silent_s = silent_s
        self._seen: dict[tuple[str, Labels], tuple[int, float]] = {}

    def text(self, families: Iterable[Family], now_s: float) -> bytes:
        """One scrape. Made in pieces: no single call may keep the event loop's thread waiting."""
        pieces = ["".join(self._lines(family, now_s)).encode() for family in families]
        return b"".join(pieces)

    def _lines(self, family: Family, now_s: float) -> Iterator[str]:
        name = family.name + ("_total" if family.kind == "counter" else "")
        kind = "untyped" if family.kind == "unknown" else family.kind
        about = family.text.replace("\\", r"\\").replace("\n", r"\n")
        yield f"# HELP {name} {about}\n# TYPE {name} {kind}\n"
        for sample, labels, value in family.samples:
            yield f"{sample}{_braced(labels)} {_number(value)}\n"
        bounds = [_number(bound) for bound in (*family.bounds, math.inf)]
        for labels, counts, sum_s in family.times:
            if not self._is_silent((family.name, labels), sum(counts), now_s):
                yield from _buckets(family.name, _quoted(labels), bounds, counts, sum_s)

    def _is_silent(self, key: tuple[str, Labels], count: int, now_s: float) -> bool:
        before, since_s = self._seen.get(key, (-1, now_s))
        if before != count:
            since_s = now_s
            self._seen[key] = count, now_s
        return now_s - since_s > self._silent_s


def _buckets(
    name: str, labels: str, bounds: Sequence[str], counts: Sequence[int], sum_s: float
) -> Iterator[str]:
    """Each bucket counts all that is not above it."""
    total, more = 0, f",{labels}" if labels else ""
    for bound, count in zip(bounds, counts, strict=True):
        total += count
        yield f'{name}_bucket{{le="{bound}"{more}}} {total}.0\n'
    braced = f"{{{labels}}}" if labels else ""
    yield f"{name}_count{braced} {total}.0\n{name}_sum{braced} {_number(sum_s)}\n"


def _braced(labels: Labels) -> str:
    return f"{{{_quoted(labels)}}}" if labels else ""


def _quoted(labels: Labels) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
