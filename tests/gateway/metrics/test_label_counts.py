"""Counters by labels say what prometheus-client's would."""

from prometheus_client import CollectorRegistry, Counter, generate_latest

from gateway.metrics.label_counts import LabelCounts


def lines(registry: CollectorRegistry) -> list[str]:
    text = generate_latest(registry).decode().splitlines()
    return sorted(line for line in text if "_created" not in line)


def test_it_shows_what_prometheus_client_shows() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counts = LabelCounts("x_ended", "Ended.", ["model", "how"], ours)
    counter = Counter("x_ended", "Ended.", ["model", "how"], registry=theirs)
    assert lines(ours) == lines(theirs)
    for model, how, amount in [("a", 'q"\n', 1), ("b", "ok", 2.5), ("a", 'q"\n', 3)]:
        counts.add(amount, model, how)
        counter.labels(model, how).inc(amount)
    assert lines(ours) == lines(theirs)
