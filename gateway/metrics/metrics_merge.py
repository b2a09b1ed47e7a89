"""One answer to /metrics from several processes (pure).

Every process tells what it counts itself; here that becomes one server's figures. Counters,
histograms and gauges are summed by name and labels, for each process has its own part of the whole;
MAX names the gauges that are one thing seen by many. Counters never fall: what a process that is
gone had counted is kept by `Retired`, up to the last time it was asked.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

MAX = frozenset(
    {
        "polyhost_ready",
        "polyhost_degraded",
        "polyhost_ledger_lag_seconds",
        "polyhost_ledger_refusing",
    }
)
_KEPT = frozenset({"counter", "histogram"})

Key = tuple[str, tuple[tuple[str, str], ...]]


class Family(msgspec.Struct, frozen=True, array_like=True):
    """A metric with its samples: (name, sorted labels, value)."""

    name: str
    text: str
    kind: str
    samples: list[tuple[str, tuple[tuple[str, str], ...], float]]


def families_of(registry: CollectorRegistry) -> list[Family]:
    """What a process tells now. When a series began is left out: of a sum it means nothing."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [
                (sample.name, tuple(sorted(sample.labels.items())), float(sample.value))
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ],
        )
        for metric in registry.collect()
    ]


def merge(parts: Iterable[Sequence[Family]]) -> list[Family]:
    """All of them as one process'."""
    heads: dict[str, Family] = {}
    values: dict[str, dict[Key, float]] = {}
    for families in parts:
        for family in families:
            heads.setdefault(family.name, family)
            found = values.setdefault(family.name, {})
            for name, labels, value in family.samples:
                before = found.get((name, labels))
                if before is None:
                    found[name, labels] = value
                elif family.name in MAX:
                    found[name, labels] = max(before, value)
                else:
                    found[name, labels] = before + value
    return [
        Family(name, head.text, head.kind, [(*key, value) for key, value in values[name].items()])
        for name, head in heads.items()
    ]


class Retired:
    """What processes had counted that are gone."""

    def __init__(self) -> None:
        self.families: list[Family] = []

    def add(self, families: Sequence[Family]) -> None:
        """The last word of one more."""
        kept = [family for family in families if family.kind in _KEPT]
        self.families = merge([self.families, kept])


class Merged(Collector):
    """Renders like a registry: `generate_latest(Merged(...))` asks for nothing else."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric
