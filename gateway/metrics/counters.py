"""What is counted once a token or once a request: without locks, on the event loop only.

prometheus-client's `observe` walks the buckets and takes two locks: 3 us a token. Here it is one
search by halving and three additions. Both are its collectors too, for whoever asks a registry for
single metrics; a scrape takes copies (families.py).
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.metrics.families import Build, Family, Labels


class Times:
    """Of one model."""

    __slots__ = ("_bounds", "counts", "sum_s")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        # No list: a copy of thousands would set the garbage collector going.
        self.counts = array("Q", bytes(8 * (len(bounds) + 1)))
        self.sum_s = 0.0

    def observe(self, value_s: float, count: int = 1) -> None:
        """`count` times so long."""
        self.counts[bisect_left(self._bounds, value_s)] += count
        self.sum_s += value_s * count


class TimeHistogram(Collector):
    """Times, or lengths, by label `model_name`. `buckets` are upper bounds, rising."""

    def __init__(
        self, name: str, doc: str, buckets: tuple[float, ...], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._doc = doc
        self._buckets = buckets
        self._by_model: dict[str, Times] = {}
        registry.register(self)

    def of(self, model_name: str) -> Times:
        """To observe with."""
        times = self._by_model.get(model_name)
        if times is None:
            times = self._by_model[model_name] = Times(self._buckets)
        return times

    def describe(self) -> Iterable[Metric]:
        """The name alone."""
        return [HistogramMetricFamily(self._name, self._doc, labels=["model_name"])]

    def collect(self) -> Iterator[Metric]:
        """As Prometheus has it: each bucket counts all that is not above it."""
        family = HistogramMetricFamily(self._name, self._doc, labels=["model_name"])
        names = [*(repr(float(bound)) for bound in self._buckets), "+Inf"]
        for model, times in self._by_model.items():
            total, rows = 0, []
            for name, count in zip(names, times.counts, strict=True):
                total += count
                rows.append((name, float(total)))
            family.add_metric([model], rows, times.sum_s)
        yield family

    def take(self) -> Build:
        """See Source."""
        models = list(self._by_model)
        counts = [times.counts[:] for times in self._by_model.values()]
        sums = [times.sum_s for times in self._by_model.values()]

        def build() -> Iterator[Family]:
            times = [
                (_pairs(["model_name"], [m]), list(counts), sum_s)
                for m, counts, sum_s in zip(models, counts, sums, strict=True)
            ]
            yield Family(self._name, self._doc, "histogram", times=times, bounds=self._buckets)

        return build


class LabelCounts(Collector):
    """Sums by the values of `labels`, without a lock and without a search for a child."""

    def __init__(
        self,
        name: str,
        doc: str,
        labels: Sequence[str],
        registry: CollectorRegistry,
        zeros: Callable[[], Iterable[tuple[str, ...]]] = tuple,
    ) -> None:
        """`zeros`: values that are told from the beginning, as 0: a rate of what is not there is
        nothing, and alerts on it never end. Asked in any thread."""
        self._family = (name, doc, tuple(labels))
        self._sums: dict[tuple[str, ...], float] = {}
        self._zeros = zeros
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
        sums = {**dict.fromkeys(self._zeros(), 0.0), **self._sums}
        for values, amount in sums.items():
            family.add_metric(values, amount)
        yield family

    def take(self) -> Build:
        """See Source."""
        name, doc, labels = self._family
        counted = self._sums.copy()

        def build() -> Iterator[Family]:
            sums = {**dict.fromkeys(self._zeros(), 0.0), **counted}
            samples = [(f"{name}_total", _pairs(labels, v), amount) for v, amount in sums.items()]
            yield Family(name, doc, "counter", samples)

        return build


def _pairs(labels: Sequence[str], values: Sequence[str]) -> Labels:
    return tuple(sorted(zip(labels, values, strict=True)))
