"""A counter by labels for what is counted once a request: no lock, no search for a child.

Stands beside prometheus-client's, as time_histogram.py does. Used on the event loop only, scrapes
included.
"""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class LabelCounts(Collector):
    """Sums by the values of `labels`."""

    def __init__(
        self, name: str, doc: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._family = (name, doc, tuple(labels))
        self._sums: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def add(self, amount: float, *values: str) -> None:
        """`values`: one a label, in their order."""
        self._sums[values] = self._sums.get(values, 0.0) + amount

    def describe(self) -> Iterable[Metric]:
        """The name alone."""
        name, doc, labels = self._family
        return [CounterMetricFamily(name, doc, labels=labels)]

    def collect(self) -> Iterator[Metric]:
        """As of now."""
        name, doc, labels = self._family
        family = CounterMetricFamily(name, doc, labels=labels)
        for values, amount in self._sums.items():
            family.add_metric(values, amount)
        yield family
