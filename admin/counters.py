"""Counters of this gateway process as pages show them: read from the metrics' registry by name."""

from collections.abc import Mapping

from gateway.edge import Edge


def counts(edge: Edge, wanted: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Metric -> value of its label -> how many, over its other labels. `wanted`: metric -> label,
    "" where it has none.

    Only the collectors of these are asked, so that it costs no scrape.
    """
    found: dict[str, dict[str, int]] = {name: {} for name in wanted}
    for metric in edge.services.metrics_registry.restricted_registry(list(wanted)).collect():
        for sample in metric.samples:
            if sample.name in wanted:
                told, label = found[sample.name], sample.labels.get(wanted[sample.name], "")
                told[label] = told.get(label, 0) + int(sample.value)
    return found
