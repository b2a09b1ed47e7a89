"""The histogram of times beside prometheus-client's own, over the same observations."""

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics.metrics import INTER_TOKEN_BUCKETS
from gateway.metrics.time_histogram import TimeHistogram


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """What a scrape reads, without the times of creation."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, str(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_a_scrape_reads_what_prometheus_client_would_say() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    ours_times = TimeHistogram("t_seconds", "Times.", INTER_TOKEN_BUCKETS, ours)
    theirs_times = Histogram(
        "t_seconds", "Times.", ["model_name"], buckets=INTER_TOKEN_BUCKETS, registry=theirs
    )
    draw = random.Random(7)
    edges = [*INTER_TOKEN_BUCKETS, 0.0, 80.0, 1e9]
    for _ in range(500):
        model = draw.choice("ab")
        value_s, count = draw.choice([*edges, draw.expovariate(5.0)]), draw.choice([1, 1, 3])
        ours_times.of(model).observe(value_s, count)
        for _ in range(count):
            theirs_times.labels(model).observe(value_s)
    found, expected = samples(ours), samples(theirs)
    assert found.keys() == expected.keys()
    assert all(abs(found[key] - expected[key]) <= 1e-6 * max(1, expected[key]) for key in expected)


def test_nothing_is_shown_before_something_is_observed() -> None:
    registry = CollectorRegistry()
    TimeHistogram("t_seconds", "Times.", (1.0,), registry)
    assert samples(registry) == {}
