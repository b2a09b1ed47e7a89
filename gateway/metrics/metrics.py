"""What /metrics shows: the edge's own counts, and the state of dispatcher, workers and ledger.

Names are vLLM's with the prefix `polyhost_` where the meaning is the same, buckets too, so that
dashboards made for it need one search and replace. Counts that happen here are pushed (`Metrics`);
what others know is pulled when somebody looks (`StateCollector`), so nothing is kept twice.

`TimeHistogram` and `LabelCounts` are for what is counted once a token or once a request: without
locks, and used on the event loop only, scrapes included.

Labels are bounded: hosted models, tenants, workers, and fixed words. Nothing a caller writes
becomes a label; requests for unknown models are counted by their error code.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    UnknownMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.protocol import SwapRecord, WorkerStatus
from gateway.dispatch.policy.reasons import REASONS_BEFORE_0_2
from gateway.metrics.cache_metrics import CacheSize
from gateway.protocols import (
    Accounts,
    ConnectionCounts,
    DispatcherFigures,
    DispatcherSnapshot,
    LedgerFigures,
    LedgerSnapshot,
)


class Times:
    """Of one model."""

    __slots__ = ("_bounds", "counts", "sum_s")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def observe(self, value_s: float, count: int = 1) -> None:
        """`count` times so long."""
        self.counts[bisect_left(self._bounds, value_s)] += count
        self.sum_s += value_s * count


class TimeHistogram(Collector):
    """Times by label `model_name`. `buckets` are upper bounds, rising.

    prometheus-client's `observe` walks the buckets and takes two locks: 3 us a token. Here it is
    one search by halving and two additions.
    """

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
        names = [*(_text(bound) for bound in self._buckets), "+Inf"]
        for model, times in self._by_model.items():
            total, rows = 0, []
            for name, count in zip(names, times.counts, strict=True):
                total += count
                rows.append((name, float(total)))
            family.add_metric([model], rows, times.sum_s)
        yield family


def _text(bound: float) -> str:
    return repr(float(bound))


class LabelCounts(Collector):
    """Sums by the values of `labels`, without a lock and without a search for a child."""

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


# fmt: off
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
INTER_TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
PHASE_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
SWAP_BUCKETS = (
    0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0,
)
# fmt: on


# Counters of the worker that vLLM has a name for, or that are surely counts.
_COUNTERS = {
    "preemptions": ("num_preemptions", "Requests preempted for lack of KV memory."),
    "prefix_cache_queries": ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Tokens found in the prefix cache."),
    "deadline_timeouts": ("deadline_timeouts", "Requests that reached their deadline."),
    "kv_evicted_pages": ("kv_evicted_pages", "Pages of cached KV evicted."),
    "kv_moved_pages": ("kv_moved_pages", "KV pages moved to make room for weights."),
    "kv_compactions": ("kv_compactions", "Sparse KV extents merged into others."),
    "state_snapshots": ("state_snapshots", "States kept for prompts that begin alike."),
    "constraints_refused": ("constraints_refused", "Output constraints that did not compile."),
    "constraints_spent": ("constraints_spent", "Output constraints that cost too much."),
    "constraints_broken": ("constraints_broken", "Output constraints that failed while in use."),
    "constraint_restarts": ("constraint_restarts", "Restarts of the process for token masks."),
    "weights_moved_pages": ("weights_moved_pages", "Weight pages moved to make room."),
}


class Metrics:
    """The edge's own counts. One object per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, doc: str, buckets: tuple[float, ...]) -> TimeHistogram:
            return TimeHistogram(f"polyhost_{name}", doc, buckets, registry)

        def counter(name: str, doc: str, labels: list[str]) -> Counter:
            return Counter(f"polyhost_{name}", doc, labels, registry=registry)

        def counts(name: str, doc: str, labels: list[str]) -> LabelCounts:
            return LabelCounts(f"polyhost_{name}", doc, labels, registry)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token.", TTFT_BUCKETS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds",
            "Time between tokens of one request.",
            INTER_TOKEN_BUCKETS,
        )
        self.e2e_request_latency = histogram(
            "e2e_request_latency_seconds", "Time from arrival to the end.", PHASE_BUCKETS
        )
        self.request_queue_time = histogram(
            "request_queue_time_seconds", "Time spent in the fair queue.", PHASE_BUCKETS
        )
        self.prompt_tokens = counts(
            "prompt_tokens", "Prompt tokens of finished requests.", ["model_name"]
        )
        self.generation_tokens = counts(
            "generation_tokens", "Generated tokens of finished requests.", ["model_name"]
        )
        self.request_success = counts(
            "request_success",
            "Requests that finished successfully.",
            ["model_name", "finished_reason"],
        )
        self.requests_ended = counts(
            "requests_ended",
            "Queued requests that ended, by outcome; `void` had no tokens.",
            ["model_name", "outcome"],
        )
        self.request_errors = counter("request_errors", "Responses other than 2xx.", ["code"])
        self.ignored_fields = counts("ignored_fields", "Fields without effect.", ["field"])
        self.responses_stored = counter("responses_stored", "Responses to be stored.", ["result"])
        self.files_received = counter("files_received", "Files and parts to be kept.", ["result"])
        self.limit_rejections = counter("limit_rejections", "Requests over a limit.", ["dimension"])
        self.prepare_offences = counter(
            "prepare_offences",
            "Requests that made a model's chat template or tokenizer take more than it may.",
            ["model_name"],
        )
        self.cache_requests = counter(
            "semantic_cache_requests", "Requests that use the cache.", ["result"]
        )
        self.swaps = counter("swaps", "Completed loads and evictions.", ["model_name", "kind"])
        self.swap_bytes = counter(
            "swap_bytes", "Bytes of weights loaded or evicted.", ["model_name", "kind"]
        )
        self.swap_duration = Histogram(
            "polyhost_swap_duration_seconds",
            "Duration of loads and evictions, by source of the weights.",
            ["kind", "tier"],
            buckets=SWAP_BUCKETS,
            registry=registry,
        )
        self.coalesced = Counter(
            "polyhost_coalesced_requests",
            "Requests that shared the answer of an identical running request.",
            registry=registry,
        )
        self._registry = registry

    def watch_connections(self, connections: ConnectionCounts) -> None:
        """Show these, too."""
        self._registry.register(ConnectionCollector(connections))

    def on_swap(self, worker_id: str, swap: SwapRecord) -> None:
        """Dispatcher's swap listener. Which worker it was stands in the log, not in a label."""
        del worker_id
        self.swaps.labels(swap.model_id, swap.kind).inc()
        self.swap_bytes.labels(swap.model_id, swap.kind).inc(swap.size_bytes)
        self.swap_duration.labels(swap.kind, swap.tier).observe(swap.duration_s)


class ConnectionCollector(Collector):
    """What the HTTP edge's connections are."""

    def __init__(self, connections: ConnectionCounts) -> None:
        self._connections = connections

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Now."""
        yield _gauge("connections_open", "Open HTTP connections.", self._connections.num_open)
        delayed = "HTTP connections delayed by the rate limit of their address."
        yield _total("connections_delayed", delayed, self._connections.num_delayed)
        ended = (([reason], float(n)) for reason, n in self._connections.ended.items())
        doc = "HTTP connections closed by the server, by reason."
        yield _by(CounterMetricFamily, "connections_ended", doc, ["reason"], ended)


class StateCollector(Collector):
    """Gauges and totals read from dispatcher, workers, ledger and limiter at each scrape."""

    def __init__(
        self,
        dispatcher: DispatcherFigures,
        ledger: LedgerFigures,
        num_open_holds: Callable[[], int],
        cache_size: Callable[[], CacheSize] = CacheSize,
        limits_degraded: Callable[[], bool] = lambda: False,
    ) -> None:
        self._limits_degraded = limits_degraded
        self._dispatcher = dispatcher
        self._ledger = ledger
        self._num_open_holds = num_open_holds
        self._cache_size = cache_size

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One consistent look; runs on the event loop."""
        yield from _dispatcher_metrics(self._dispatcher.snapshot())
        yield from _worker_metrics(self._dispatcher.worker_statuses())
        ledger = self._ledger.snapshot()
        yield from _ledger_metrics(ledger)
        yield _gauge("limit_reservations_open", "Open limit reservations.", self._num_open_holds())
        cache = self._cache_size()
        parts = {"limits": self._limits_degraded(), "cache": cache.is_degraded}
        degraded = [([part], float(less)) for part, less in parts.items()]
        doc = "1 if the part is degraded."
        yield _by(GaugeMetricFamily, "degraded", doc, ["part"], degraded)
        yield _gauge("semantic_cache_size_bytes", "Size of cached answers.", cache.num_bytes)
        yield _gauge("semantic_cache_entries", "Cached answers.", cache.num_entries)
        is_ready = self._dispatcher.ready and not ledger.refuses
        yield _gauge("ready", "1 if requests can be served.", int(is_ready))


def _gauge(name: str, doc: str, value: float) -> Metric:
    return GaugeMetricFamily(f"polyhost_{name}", doc, value=value)


def _total(name: str, doc: str, value: float) -> Metric:
    return CounterMetricFamily(f"polyhost_{name}", doc, value=value)


def _by(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily] | type[UnknownMetricFamily],
    name: str,
    doc: str,
    labels: list[str],
    rows: Iterable[tuple[list[str], float]],
) -> Metric:
    metric = family(f"polyhost_{name}", doc, labels=labels)
    for values, value in rows:
        metric.add_metric(values, value)
    return metric


def _dispatcher_metrics(state: DispatcherSnapshot) -> Iterator[Metric]:
    queued, running = "Requests in the fair queue.", "Requests running on a worker."
    gauges = (
        ("num_requests_running", running, "model_name", state.running_by_model),
        ("num_requests_waiting", queued, "model_name", state.waiting_by_model),
        ("tenant_requests_waiting", queued, "tenant", state.waiting_by_tenant),
    )
    for name, doc, label, figures in gauges:
        rows = (([k], float(v)) for k, v in figures.items())
        yield _by(GaugeMetricFamily, name, doc, [label], rows)
    service = (([tenant], s) for tenant, s in state.service_s_by_tenant.items())
    doc = "Service time of ended requests."
    yield _by(CounterMetricFamily, "service_seconds", doc, ["tenant"], service)
    yield from _account_metrics(state.accounts)
    quarantined = (([model], 1.0) for model in state.quarantined)
    doc = "1 for a quarantined model."
    yield _by(GaugeMetricFamily, "model_quarantined", doc, ["model_name"], quarantined)
    etas = (([model], eta_s) for model, eta_s in state.load_eta_s.items())
    doc = "Expected time until a requested model is loaded."
    yield _by(GaugeMetricFamily, "model_load_eta_seconds", doc, ["model_name"], etas)
    doc = "Requests rejected because no load would finish in time."
    yield _total("load_refusals", doc, state.num_load_refusals)
    made = [(key.split("/", 1), float(n)) for key, n in state.decisions.items() if "/" in key]
    doc = "Decisions about models and queues, by kind and reason."
    yield _by(CounterMetricFamily, "dispatch_decisions", doc, ["kind", "reason"], made)
    old = (([kind, REASONS_BEFORE_0_2.get(reason, reason)], n) for (kind, reason), n in made)
    doc = "Until 0.3: polyhost_dispatch_decisions_total with the reasons of 0.1."
    yield _by(CounterMetricFamily, "decisions", doc, ["kind", "reason"], old)
    doc = "Requests rejected by a full queue."
    yield _total("queue_rejections", doc, state.num_queue_rejections)
    doc = "Requests that waited too long for a worker."
    yield _total("queue_timeouts", doc, state.num_queue_timeouts)
    doc = "Requests sent again, before a first token, after a worker was lost or emptied."
    yield _total("request_retries", doc, state.num_retries)
    doc = "Requests continued elsewhere, after tokens, when a worker was lost or emptied."
    yield _total("request_resumes", doc, state.num_resumed)
    doc = "Workers whose process or connection ended."
    yield _total("workers_lost", doc, state.num_workers_lost)
    doc = "Requests aborted because the client read too slowly."
    yield _total("clients_too_slow", doc, state.num_clients_too_slow)
    yield _total("late_messages", "Dropped messages of earlier attempts.", state.num_late_messages)


def _account_metrics(accounts: Accounts) -> Iterator[Metric]:
    device = (([tenant], s) for tenant, s in accounts.device_s.items())
    doc = "Device time of ended requests."
    yield _by(CounterMetricFamily, "device_seconds", doc, ["tenant"], device)
    loads = (([tenant], s) for tenant, s in accounts.load_s.items())
    doc = "Load time charged and not paid back."
    yield _by(GaugeMetricFamily, "load_charges_seconds", doc, ["tenant"], loads)
    system = ((["failed"], accounts.failed_s), (["loads"], accounts.system_load_s))
    doc = "Device time charged to no tenant."
    yield _by(CounterMetricFamily, "system_seconds", doc, ["account"], system)
    yield _total("unsound_figures", "Invalid times reported by workers.", accounts.num_unsound)


def _worker_metrics(workers: list[WorkerStatus]) -> Iterator[Metric]:
    pages = [
        ([worker.worker_id, *_owner(name)], float(count))
        for worker in workers
        for name, count in worker.pages.items()
    ]
    labels = ["worker", "model_name", "kind"]
    yield _by(GaugeMetricFamily, "arena_pages", "Arena pages by owner.", labels, pages)
    sizes = (([w.worker_id], float(w.page_bytes)) for w in workers)
    doc = "Size of an arena page."
    yield _by(GaugeMetricFamily, "arena_page_size_bytes", doc, ["worker"], sizes)
    totals = (([w.worker_id], float(w.num_pages)) for w in workers)
    yield _by(GaugeMetricFamily, "arena_num_pages", "Arena pages in total.", ["worker"], totals)
    used = (([w.worker_id], _kv_share(w)) for w in workers)
    doc = "Share of arena pages that hold KV of requests."
    yield _by(GaugeMetricFamily, "kv_cache_usage_ratio", doc, ["worker"], used)
    states = [
        ([worker.worker_id, model.model_id, model.state], 1.0)
        for worker in workers
        for model in worker.models
    ]
    labels = ["worker", "model_name", "state"]
    doc = "1 for the current state of the model."
    yield _by(GaugeMetricFamily, "model_residency", doc, labels, states)
    for name in sorted({name for worker in workers for name in worker.counters}):
        rows = (([w.worker_id], w.counters[name]) for w in workers if name in w.counters)
        if name in _COUNTERS:
            metric, doc = _COUNTERS[name]
            yield _by(CounterMetricFamily, metric, doc, ["worker"], rows)
        else:
            # Untyped: among the worker's own figures are counts and sizes.
            doc = "Figure reported by the worker."
            yield _by(UnknownMetricFamily, f"engine_{name}", doc, ["worker"], rows)


def _ledger_metrics(ledger: LedgerSnapshot) -> Iterator[Metric]:
    lag = "Age of the oldest record that is not in the database."
    yield _gauge("ledger_lag_seconds", lag, ledger.lag_s)
    yield _gauge("ledger_pending", "Records waiting for the database.", ledger.num_pending)
    yield _gauge("ledger_unsynced", "Records that are not durable yet.", ledger.num_unsynced)
    yield _gauge("ledger_open", "Requests opened and not finished.", ledger.num_open)
    yield _gauge("ledger_refusing", "1 if new requests are refused.", int(ledger.refuses))
    yield _total("ledger_opened", "Open records written to the database.", ledger.num_opened)
    yield _total("ledger_posted", "Postings written to the database.", ledger.num_posted)
    yield _total("ledger_voided", "Open records closed without a charge.", ledger.num_voided)
    yield _total("ledger_write_errors", "Failed commits.", ledger.num_write_errors)
    yield _total("ledger_recovered", "Records left open by an earlier run.", ledger.num_recovered)
    yield _total("ledger_rolled_up", "Postings added to roll-ups.", ledger.num_rolled)
    yield _total("ledger_put_aside", "Records that the database rejected.", ledger.num_put_aside)
    yield _gauge(
        "journal_size_bytes", "Journal size that is not in the database yet.", ledger.journal_bytes
    )
    yield _total("journal_sync_errors", "Failed journal writes and syncs.", ledger.num_sync_errors)
    yield _total("journal_damaged", "Journal gaps with lost records.", ledger.num_damaged)


def _owner(name: str) -> tuple[str, str]:
    """ "model/kv" -> (model, kv); "free" belongs to nobody. Model names may hold slashes."""
    model, _, kind = name.rpartition("/")
    return model, kind


def _kv_share(worker: WorkerStatus) -> float:
    kv = sum(count for name, count in worker.pages.items() if _owner(name)[1] == "kv")
    return kv / worker.num_pages if worker.num_pages else 0.0
