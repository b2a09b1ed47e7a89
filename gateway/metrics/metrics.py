"""What /metrics shows: the edge's own counts, and the state of dispatcher, workers and ledger.

Names are vLLM's with the prefix `polyhost_` where the meaning is the same, buckets too, so that
dashboards made for it need one search and replace. Counts that happen here are pushed (`Metrics`);
what others know is pulled when somebody looks (`StateCollector`), so nothing is kept twice.

Labels are bounded: hosted models, tenants, workers, and fixed words. Nothing a caller writes
becomes a label; requests for unknown models are counted by their error code.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, UnknownMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.protocol import SwapRecord, WorkerStatus
from gateway.metrics.cache_metrics import CacheSize
from gateway.metrics.label_counts import LabelCounts
from gateway.metrics.time_histogram import TimeHistogram
from gateway.server.connections import Connections
from gateway.services import (
    Accounts,
    DispatcherSnapshot,
    LedgerFigures,
    LedgerSnapshot,
    RequestDispatcher,
)

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
    "preemptions": ("num_preemptions", "Sent back for lack of KV memory."),
    "prefix_cache_queries": ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Tokens found there."),
    "deadline_timeouts": ("deadline_timeouts", "Requests that ended because their time was up."),
    "kv_evicted_pages": ("kv_evicted_pages", "Pages of cached KV given back."),
    "kv_moved_pages": ("kv_moved_pages", "Pages of KV copied out of the way of weights."),
    "kv_compactions": ("kv_compactions", "Sparse KV extents copied into others' room."),
    "constraints_refused": ("constraints_refused", "Schemas and other forms that cannot be had."),
    "constraints_broken": ("constraints_broken", "Forms that could not be followed to the end."),
    "constraint_restarts": ("constraint_restarts", "Ends of the process that computes masks."),
    "weights_moved_pages": ("weights_moved_pages", "Pages of weights copied to make room."),
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
            "time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between tokens of one request.", INTER_TOKEN_BUCKETS
        )
        self.e2e_request_latency = histogram(
            "e2e_request_latency_seconds", "From arrival to the end.", PHASE_BUCKETS
        )
        self.request_queue_time = histogram(
            "request_queue_time_seconds", "Waiting in the fair queue.", PHASE_BUCKETS
        )
        self.prompt_tokens = counts("prompt_tokens", "Prompt tokens posted.", ["model_name"])
        self.generation_tokens = counts(
            "generation_tokens", "Generated tokens posted.", ["model_name"]
        )
        self.request_success = counts(
            "request_success", "Requests that ended as asked.", ["model_name", "finished_reason"]
        )
        self.requests_ended = counts(
            "requests_ended",
            "Requests that reached the queue, by outcome; `void` had no tokens.",
            ["model_name", "outcome"],
        )
        self.request_errors = counter("request_errors", "Answers other than 2xx.", ["code"])
        self.limit_rejections = counter("limit_rejections", "Refused by a limit.", ["dimension"])
        self.cache_requests = counter(
            "semantic_cache_requests", "Requests that asked for the cache.", ["result"]
        )
        self.swaps = counter("swaps", "Finished loads and evictions.", ["model_name", "kind"])
        self.swap_bytes = counter("swap_bytes", "Weights moved.", ["model_name", "kind"])
        self.swap_duration = Histogram(
            "polyhost_swap_duration_seconds",
            "Loads and evictions, by where the weights came from.",
            ["kind", "tier"],
            buckets=SWAP_BUCKETS,
            registry=registry,
        )
        self.coalesced = Counter(
            "polyhost_coalesced_requests",
            "Answered with what another request was already being answered.",
            registry=registry,
        )
        self._registry = registry

    def watch_connections(self, connections: Connections) -> None:
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

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Now."""
        yield _gauge("connections_open", "HTTP connections.", self._connections.num_open)
        delayed = "HTTP connections that waited for the turn of their address."
        yield _total("connections_delayed", delayed, self._connections.num_delayed)
        ended = (([reason], float(n)) for reason, n in self._connections.ended.items())
        doc = "HTTP connections that the server ended, by why."
        yield _by(CounterMetricFamily, "connections_ended", doc, ["reason"], ended)


class StateCollector(Collector):
    """Gauges and totals read from dispatcher, workers, ledger and limiter at each scrape."""

    def __init__(
        self,
        dispatcher: RequestDispatcher,
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
        yield _gauge("limit_reservations_open", "Held and not settled.", self._num_open_holds())
        cache = self._cache_size()
        parts = {"limits": self._limits_degraded(), "cache": cache.is_degraded}
        degraded = [([part], float(less)) for part, less in parts.items()]
        doc = "1 where a part does with less than it should have."
        yield _by(GaugeMetricFamily, "degraded", doc, ["part"], degraded)
        yield _gauge("semantic_cache_size_bytes", "Answers kept.", cache.num_bytes)
        yield _gauge("semantic_cache_entries", "Answers kept.", cache.num_entries)
        is_ready = self._dispatcher.ready and not ledger.refuses
        yield _gauge("ready", "1 where a request could be served.", int(is_ready))


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
    gauges = (
        ("num_requests_running", "On a worker.", ["model_name"], state.running_by_model),
        ("num_requests_waiting", "In the fair queue.", ["model_name"], state.waiting_by_model),
        ("tenant_requests_waiting", "In the fair queue.", ["tenant"], state.waiting_by_tenant),
    )
    for name, doc, labels, figures in gauges:
        yield _by(
            GaugeMetricFamily, name, doc, labels, (([k], float(v)) for k, v in figures.items())
        )
    service = (([tenant], s) for tenant, s in state.service_s_by_tenant.items())
    yield _by(CounterMetricFamily, "service_seconds", "Of ended requests.", ["tenant"], service)
    yield from _account_metrics(state.accounts)
    quarantined = (([model], 1.0) for model in state.quarantined)
    yield _by(GaugeMetricFamily, "model_quarantined", "Not served.", ["model_name"], quarantined)
    etas = (([model], eta_s) for model, eta_s in state.load_eta_s.items())
    yield _by(
        GaugeMetricFamily,
        "model_load_eta_seconds",
        "Until a model that is waited for is there.",
        ["model_name"],
        etas,
    )
    yield _total("load_refusals", "Refused: no load in time.", state.num_load_refusals)
    made = ((key.split("/", 1), float(n)) for key, n in state.decisions.items() if "/" in key)
    doc = "About models and queues, by what and why."
    yield _by(CounterMetricFamily, "decisions", doc, ["kind", "reason"], made)
    yield _total("queue_rejections", "Refused by a full queue.", state.num_queue_rejections)
    yield _total("queue_timeouts", "Waited too long for a worker.", state.num_queue_timeouts)
    yield _total("request_retries", "Sent again after a worker died.", state.num_retries)
    yield _total("workers_lost", "Workers whose process or link ended.", state.num_workers_lost)
    yield _total("clients_too_slow", "Aborted: not read in time.", state.num_clients_too_slow)
    yield _total("late_messages", "Dropped, of an earlier attempt.", state.num_late_messages)


def _account_metrics(accounts: Accounts) -> Iterator[Metric]:
    device = (([tenant], s) for tenant, s in accounts.device_s.items())
    yield _by(CounterMetricFamily, "device_seconds", "Time of steps.", ["tenant"], device)
    loads = (([tenant], s) for tenant, s in accounts.load_s.items())
    yield _by(GaugeMetricFamily, "load_charges_seconds", "Less paid back.", ["tenant"], loads)
    system = ((["failed"], accounts.failed_s), (["loads"], accounts.system_load_s))
    yield _by(CounterMetricFamily, "system_seconds", "Of no tenant.", ["account"], system)
    yield _total("unsound_figures", "Workers' times that were none.", accounts.num_unsound)


def _worker_metrics(workers: list[WorkerStatus]) -> Iterator[Metric]:
    pages = [
        ([worker.worker_id, *_owner(name)], float(count))
        for worker in workers
        for name, count in worker.pages.items()
    ]
    labels = ["worker", "model_name", "kind"]
    yield _by(GaugeMetricFamily, "arena_pages", "Pages by owner.", labels, pages)
    sizes = (([w.worker_id], float(w.page_bytes)) for w in workers)
    yield _by(GaugeMetricFamily, "arena_page_size_bytes", "Size of a page.", ["worker"], sizes)
    totals = (([w.worker_id], float(w.num_pages)) for w in workers)
    yield _by(GaugeMetricFamily, "arena_num_pages", "All pages.", ["worker"], totals)
    used = (([w.worker_id], _kv_share(w)) for w in workers)
    yield _by(
        GaugeMetricFamily, "kv_cache_usage_ratio", "KV's share of all pages.", ["worker"], used
    )
    states = [
        ([worker.worker_id, model.model_id, model.state], 1.0)
        for worker in workers
        for model in worker.models
    ]
    labels = ["worker", "model_name", "state"]
    yield _by(GaugeMetricFamily, "model_residency", "1 for the state it is in.", labels, states)
    for name in sorted({name for worker in workers for name in worker.counters}):
        rows = (([w.worker_id], w.counters[name]) for w in workers if name in w.counters)
        if name in _COUNTERS:
            metric, doc = _COUNTERS[name]
            yield _by(CounterMetricFamily, metric, doc, ["worker"], rows)
        else:
            # Untyped: among the worker's own figures are counts and sizes.
            yield _by(UnknownMetricFamily, f"engine_{name}", "Of the worker.", ["worker"], rows)


def _ledger_metrics(ledger: LedgerSnapshot) -> Iterator[Metric]:
    lag = "Age of the oldest record that the database does not have."
    yield _gauge("ledger_lag_seconds", lag, ledger.lag_s)
    yield _gauge("ledger_pending", "Records not in the database yet.", ledger.num_pending)
    yield _gauge("ledger_unsynced", "Records not durable yet.", ledger.num_unsynced)
    yield _gauge("ledger_open", "Requests opened and not ended.", ledger.num_open)
    yield _gauge("ledger_refusing", "1 where nothing new is opened.", int(ledger.refuses))
    yield _total("ledger_opened", "Open records written.", ledger.num_opened)
    yield _total("ledger_posted", "Postings written.", ledger.num_posted)
    yield _total("ledger_voided", "Open records closed unbilled.", ledger.num_voided)
    yield _total("ledger_write_errors", "Commits that failed.", ledger.num_write_errors)
    yield _total("ledger_recovered", "Left open by an earlier run.", ledger.num_recovered)
    yield _total("ledger_rolled_up", "Postings added to roll-ups.", ledger.num_rolled)
    yield _total("ledger_put_aside", "Records no database takes.", ledger.num_put_aside)
    yield _gauge("journal_size_bytes", "Journal not in the database yet.", ledger.journal_bytes)
    yield _total("journal_sync_errors", "Writes and syncs that failed.", ledger.num_sync_errors)
    yield _total("journal_damaged", "Places where records were lost.", ledger.num_damaged)


def _owner(name: str) -> tuple[str, str]:
    """ "model/kv" -> (model, kv); "free" belongs to nobody. Model names may hold slashes."""
    model, _, kind = name.rpartition("/")
    return model, kind


def _kv_share(worker: WorkerStatus) -> float:
    kv = sum(count for name, count in worker.pages.items() if _owner(name)[1] == "kv")
    return kv / worker.num_pages if worker.num_pages else 0.0
