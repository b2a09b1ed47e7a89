"""Figures of several processes as one, and as text."""

import dataclasses
import math
import typing
from unittest import mock

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.protocol import ModelStatus, WorkerStatus
from gateway.errors import SERVER_ERROR
from gateway.metrics.cache_metrics import CacheMetrics, CacheSize
from gateway.metrics.counters import LabelCounts, TimeHistogram
from gateway.metrics.families import MAX, Family, MetricsRegistry, MetricsText, Retired, merge
from gateway.metrics.metrics import Metrics, watch_process
from gateway.metrics.state_metrics import StateCollector
from gateway.protocols import Accounts, DispatcherSnapshot, LedgerSnapshot
from gateway.types import AnswerNote

# Each process' part of a whole. All other gauges are in MAX.
SUM = {
    "polyhost_alerts_waiting",
    "polyhost_arena_num_pages",
    "polyhost_arena_page_size_bytes",
    "polyhost_arena_pages",
    "polyhost_connections_open",
    "polyhost_journal_size_bytes",
    "polyhost_kv_cache_usage_perc",
    "polyhost_kv_cache_usage_ratio",
    "polyhost_ledger_open",
    "polyhost_ledger_pending",
    "polyhost_ledger_unsynced",
    "polyhost_limit_reservations_open",
    "polyhost_load_charges_seconds",
    "polyhost_model_load_eta_seconds",
    "polyhost_model_quarantined",
    "polyhost_model_residency",
    "polyhost_num_requests_running",
    "polyhost_num_requests_waiting",
    "polyhost_semantic_cache_entries",
    "polyhost_semantic_cache_size_bytes",
    "polyhost_tenant_requests_waiting",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_virtual_memory_bytes",
}


def registry(count: float, gauge: float, ready: int = 1) -> MetricsRegistry:
    """What one process counts."""
    own = MetricsRegistry()
    Counter("polyhost_requests", "Asked.", ["model"], registry=own).labels("m").inc(count)
    Gauge("polyhost_open", "Open.", registry=own).set(gauge)
    Gauge("polyhost_ready", "Ready.", registry=own).set(ready)
    Histogram("polyhost_seconds", "Took.", buckets=(1.0, 2.0), registry=own).observe(count)
    TimeHistogram("polyhost_times", "Took.", (1.0, 2.0), own).of("m").observe(count)
    return own


def families_of(registry: MetricsRegistry) -> list[Family]:
    return registry.take()()


def values(families: list[Family]) -> dict[str, float]:
    return {name: value for family in families for name, _, value in family.samples}


def samples(body: bytes) -> dict[tuple[str, str], float]:
    """What a scrape reads, without the times of creation."""
    return {
        (sample.name, str(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_sums_are_sums_and_what_is_one_thing_stays_one() -> None:
    found = merge([families_of(registry(1, 2)), families_of(registry(1.5, 3, ready=0))])
    merged = values(found)
    assert merged["polyhost_requests_total"] == 2.5
    assert merged["polyhost_open"] == 5
    assert merged["polyhost_ready"] == 1
    assert merged["polyhost_seconds_count"] == 2
    assert not [name for name in merged if name.endswith("_created")]
    (times,) = [family.times for family in found if family.name == "polyhost_times"]
    assert times == [((("model_name", "m"),), [1, 1, 0], 2.5)]


def test_labels_keep_series_apart() -> None:
    one, two = MetricsRegistry(), MetricsRegistry()
    for own, tenants in ((one, "ab"), (two, "bc")):
        counter = Counter("polyhost_x", "X.", ["tenant"], registry=own)
        for tenant in tenants:
            counter.labels(tenant).inc()
    (family,) = merge([families_of(one), families_of(two)])
    found = {dict(labels)["tenant"]: value for _, labels, value in family.samples}
    assert found == {"a": 1, "b": 2, "c": 1}


def test_counts_of_who_is_gone_are_kept_and_gauges_are_not() -> None:
    retired = Retired()
    retired.add(families_of(registry(1, 5)))
    retired.add(families_of(registry(2, 5)))
    kept = values(retired.families)
    assert kept["polyhost_requests_total"] == 3
    assert kept["polyhost_seconds_sum"] == 3
    assert "polyhost_open" not in kept


def test_what_is_told_of_workers_is_not_kept_for_who_told_it() -> None:
    """They live on, and the next dispatcher tells the same of them."""
    own = MetricsRegistry()
    for name in ("polyhost_num_preemptions", "polyhost_mine"):
        label = "model" if name.endswith("mine") else "worker"
        Counter(name, "Counted.", [label], registry=own).labels("w").inc(5)
    retired = Retired()
    retired.add(families_of(own))
    assert values(retired.families) == {"polyhost_mine_total": 5}


def test_what_is_taken_does_not_change_any_more() -> None:
    own = MetricsRegistry()
    counts = LabelCounts("polyhost_x", "X.", ["a"], own)
    times = TimeHistogram("polyhost_t", "T.", (1.0,), own)
    counts.add(1, "a")
    times.of("m").observe(0.5)
    build = own.take()
    counts.add(1, "a")
    times.of("m").observe(0.5)
    x, t = build()
    assert x.samples == [("polyhost_x_total", (("a", "a"),), 1.0)]
    assert t.times == [((("model_name", "m"),), [1, 0], 0.5)]


def test_the_text_is_what_prometheus_client_writes() -> None:
    own = MetricsRegistry()
    hard = 'q"\\\n{},='
    counts = LabelCounts("polyhost_x", "X \\ of\nlines.", ["b", "a"], own)
    counts.add(2.5, hard, "ok")
    times = TimeHistogram("polyhost_t", "T.", (0.001, 1.0, 7680.0), own)
    for value_s in (0.0005, 0.5, 1.0, 99999.0):
        times.of(hard).observe(value_s)
    odd = Gauge("polyhost_odd", "Odd.", ["how"], registry=own)
    for value in (math.inf, -math.inf, math.nan, 1e-7, 1e21):
        odd.labels(str(value)).set(value)
    Counter("polyhost_c", "C.", registry=own).inc(3)
    watch_process(own)
    text = MetricsText().text(own.take()(), 0.0)
    ours, theirs = samples(text), samples(generate_latest(own))
    changing = {key for key in theirs if key[0].startswith("process_")}
    assert ours.keys() == theirs.keys()
    for key in theirs.keys() - changing:
        assert ours[key] == pytest.approx(theirs[key], nan_ok=True), key
    heads = [line for line in text.decode().splitlines() if line.startswith("#")]
    theirs_heads = generate_latest(own).decode().splitlines()
    assert not [head for head in heads if head not in theirs_heads]


def test_histograms_of_silent_models_are_left_out_until_they_are_asked_again() -> None:
    own = MetricsRegistry()
    times = TimeHistogram("polyhost_t", "T.", (1.0,), own)
    shown = MetricsText(silent_s=10.0)

    def models(now_s: float) -> set[str]:
        found = samples(shown.text(own.take()(), now_s))
        return {labels for name, labels in found if name == "polyhost_t_count"}

    for name in "ab":
        times.of(name).observe(0.0)
    assert len(models(0.0)) == 2
    times.of("a").observe(0.0)
    assert len(models(9.0)) == 2
    assert models(12.0) == {"[('model_name', 'a')]"}
    times.of("b").observe(0.0)
    assert len(models(18.0)) == 2
    assert samples(shown.text(own.take()(), 18.0))["polyhost_t_count", "[('model_name', 'b')]"] == 2


def test_counters_of_a_hosted_model_exist_before_its_first_request() -> None:
    own = MetricsRegistry()
    Metrics(own, lambda: ["m"])
    found = samples(MetricsText().text(own.take()(), 0.0))
    for name in ("prompt_tokens", "generation_tokens", "posted_cost_nanos"):
        assert found[f"polyhost_{name}_total", "[('model_name', 'm')]"] == 0
    ended = [labels for name, labels in found if name == "polyhost_requests_ended_total"]
    assert len(ended) == 4


def test_every_gauge_says_how_it_is_merged() -> None:
    """Else a figure that many processes see would be told N times too large."""
    own = MetricsRegistry()
    Metrics(own)
    CacheMetrics(own)
    watch_process(own)
    a: dict[str, typing.Any] = {
        field.name: {"a": 1} if "Mapping" in str(field.type) else 1
        for field in dataclasses.fields(DispatcherSnapshot)
    }
    a["accounts"] = Accounts({"a": 1.0}, {"a": 1.0})
    ledger: dict[str, typing.Any] = {f.name: 1 for f in dataclasses.fields(LedgerSnapshot)}
    model = ModelStatus("a", "resident", 1, 1, 1, 1, 1.0)
    worker = WorkerStatus("e", "w", 1, 1, 1.0, 1, 1, {"a/kv": 1}, [model], [], [], {})
    dispatcher = mock.Mock(ready=True)
    dispatcher.worker_statuses.return_value = [worker]
    dispatcher.snapshot.return_value = DispatcherSnapshot(**a)
    figures = mock.Mock()
    figures.snapshot.return_value = LedgerSnapshot(**ledger)
    own.register(StateCollector(dispatcher, figures, lambda: 1))
    gauges = {family.name for family in families_of(own) if family.kind == "gauge"}
    assert gauges <= SUM | MAX, gauges - SUM - MAX
    assert not SUM & MAX


def test_a_cache_that_all_processes_see_is_told_once() -> None:
    def size(is_shared: bool) -> float:
        parts = []
        for _ in range(2):
            own = MetricsRegistry()
            dispatcher, ledger = mock.Mock(ready=True), mock.Mock()
            dispatcher.worker_statuses.return_value = []
            dispatcher.snapshot.return_value = DispatcherSnapshot()
            numbers: dict[str, typing.Any] = {f.name: 0 for f in dataclasses.fields(LedgerSnapshot)}
            ledger.snapshot.return_value = LedgerSnapshot(**numbers)
            about = dispatcher, ledger, lambda: 0, lambda: CacheSize(7, 70, is_shared)
            own.register(StateCollector(*about))
            parts.append(families_of(own))
        return values(merge(parts))["polyhost_semantic_cache_entries"]

    assert size(is_shared=True) == 7
    assert size(is_shared=False) == 14


def test_a_plain_registry_shows_the_same() -> None:
    """For whoever asks prometheus-client."""
    plain, own = CollectorRegistry(), MetricsRegistry()
    for target in (plain, own):
        note = AnswerNote("m")
        note.fail(SERVER_ERROR)
        note.has_status(500)
        Metrics(target, lambda: ["m"]).answers.add("/v1/x", note)
    assert samples(generate_latest(plain)) == samples(MetricsText().text(own.take()(), 0.0))
