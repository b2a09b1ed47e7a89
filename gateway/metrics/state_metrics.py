"""What dispatcher, workers, ledger and stores know, read when somebody looks: nothing twice.

A look copies what there is, on the event loop; families are made of it wherever it suits.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    UnknownMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.protocol import WorkerStatus
from gateway.dispatch.policy.reasons import REASONS_BEFORE_0_2
from gateway.metrics.cache_metrics import CacheSize
from gateway.metrics.families import Build, SharedGauge, by, family_of, gauge, total
from gateway.protocols import (
    Accounts,
    DispatcherFigures,
    DispatcherSnapshot,
    LedgerFigures,
    LedgerSnapshot,
)

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


# (name, text, how the worker counts them, the worker's sum)
_STEP_SIZES = (
    ("iteration_tokens_total", "Tokens of a step of the engine.", "step_tokens", "batch_tokens"),
    ("iteration_rows", "Requests in a step of the engine.", "step_rows", "batch_rows"),
)
_SIZE_BOUNDS = tuple(1 << n for n in range(17))


class StateCollector(Collector):
    """Gauges and totals read from dispatcher, workers, ledger and limiter at each scrape."""

    def __init__(
        self,
        dispatcher: DispatcherFigures,
        ledger: LedgerFigures,
        num_open_holds: Callable[[], int],
        cache_size: Callable[[], CacheSize] = CacheSize,
        limits_degraded: Callable[[], bool] = lambda: False,
        models: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """`models`: those hosted; each is waited for by 0 at least."""
        self._models = models
        self._limits_degraded = limits_degraded
        self._dispatcher = dispatcher
        self._ledger = ledger
        self._num_open = num_open_holds
        self._cache_size = cache_size

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not collect."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """One consistent look; runs on the event loop."""
        return self._look()()

    def take(self) -> Build:
        """See Source."""
        look = self._look()
        return lambda: map(family_of, look())

    def _look(self) -> Callable[[], Iterator[Metric]]:
        queue, workers = self._dispatcher.snapshot(), self._dispatcher.worker_statuses()
        models, ledger, num_open = list(self._models()), self._ledger.snapshot(), self._num_open()
        cache = self._cache_size()
        degraded = {"limits": self._limits_degraded(), "cache": cache.is_degraded}
        is_ready = self._dispatcher.ready and not ledger.refuses

        def metrics() -> Iterator[Metric]:
            yield from _dispatcher_metrics(queue, models)
            yield from _worker_metrics(workers)
            yield from _ledger_metrics(ledger)
            yield gauge("limit_reservations_open", "Open limit reservations.", num_open)
            rows = [([part], float(less)) for part, less in degraded.items()]
            doc = "1 if the part is degraded."
            yield by(GaugeMetricFamily, "degraded", doc, ["part"], rows)
            yield from _cache_metrics(cache)
            yield gauge("ready", "1 if requests can be served.", int(is_ready))

        return metrics


def _cache_metrics(cache: CacheSize) -> Iterator[Metric]:
    for name, doc, value in (
        ("size_bytes", "Size of cached answers.", cache.num_bytes),
        ("entries", "Cached answers.", cache.num_entries),
    ):
        # In Redis all processes see the same ones.
        metric = SharedGauge if cache.is_shared else GaugeMetricFamily
        yield metric(f"polyhost_semantic_cache_{name}", doc, value=value)


def _dispatcher_metrics(state: DispatcherSnapshot, models: Iterable[str]) -> Iterator[Metric]:
    zeros = dict.fromkeys(models, 0)
    queued, running = "Requests in the fair queue.", "Requests running on a worker."
    gauges = (
        ("num_requests_running", running, "model_name", {**zeros, **state.running_by_model}),
        ("num_requests_waiting", queued, "model_name", {**zeros, **state.waiting_by_model}),
        ("tenant_requests_waiting", queued, "tenant", state.waiting_by_tenant),
    )
    for name, doc, label, figures in gauges:
        rows = (([k], float(v)) for k, v in figures.items())
        yield by(GaugeMetricFamily, name, doc, [label], rows)
    service = (([tenant], s) for tenant, s in state.service_s_by_tenant.items())
    doc = "Service time of ended requests."
    yield by(CounterMetricFamily, "service_seconds", doc, ["tenant"], service)
    yield from _account_metrics(state.accounts)
    quarantined = (([model], 1.0) for model in state.quarantined)
    doc = "1 for a quarantined model."
    yield by(GaugeMetricFamily, "model_quarantined", doc, ["model_name"], quarantined)
    etas = (([model], eta_s) for model, eta_s in state.load_eta_s.items())
    doc = "Expected time until a requested model is loaded."
    yield by(GaugeMetricFamily, "model_load_eta_seconds", doc, ["model_name"], etas)
    doc = "Requests rejected because no load would finish in time."
    yield total("load_refusals", doc, state.num_load_refusals)
    made = [(key.split("/", 1), float(n)) for key, n in state.decisions.items() if "/" in key]
    doc = "Decisions about models and queues, by kind and reason."
    yield by(CounterMetricFamily, "dispatch_decisions", doc, ["kind", "reason"], made)
    old = (([kind, REASONS_BEFORE_0_2.get(reason, reason)], n) for (kind, reason), n in made)
    doc = "Until 0.3: polyhost_dispatch_decisions_total with the reasons of 0.1."
    yield by(CounterMetricFamily, "decisions", doc, ["kind", "reason"], old)
    doc = "Requests rejected by a full queue."
    yield total("queue_rejections", doc, state.num_queue_rejections)
    doc = "Requests that waited too long for a worker."
    yield total("queue_timeouts", doc, state.num_queue_timeouts)
    doc = "Requests sent again, before a first token, after a worker was lost or emptied."
    yield total("request_retries", doc, state.num_retries)
    doc = "Requests continued elsewhere, after tokens, when a worker was lost or emptied."
    yield total("request_resumes", doc, state.num_resumed)
    doc = "Workers whose process or connection ended."
    yield total("workers_lost", doc, state.num_workers_lost)
    doc = "Requests aborted because the client read too slowly."
    yield total("clients_too_slow", doc, state.num_clients_too_slow)
    yield total("late_messages", "Dropped messages of earlier attempts.", state.num_late_messages)


def _account_metrics(accounts: Accounts) -> Iterator[Metric]:
    device = (([tenant], s) for tenant, s in accounts.device_s.items())
    doc = "Device time of ended requests."
    yield by(CounterMetricFamily, "device_seconds", doc, ["tenant"], device)
    loads = (([tenant], s) for tenant, s in accounts.load_s.items())
    doc = "Load time charged and not paid back."
    yield by(GaugeMetricFamily, "load_charges_seconds", doc, ["tenant"], loads)
    system = ((["failed"], accounts.failed_s), (["loads"], accounts.system_load_s))
    doc = "Device time charged to no tenant."
    yield by(CounterMetricFamily, "system_seconds", doc, ["account"], system)
    yield total("unsound_figures", "Invalid times reported by workers.", accounts.num_unsound)


def _worker_metrics(workers: list[WorkerStatus]) -> Iterator[Metric]:
    pages = [
        ([worker.worker_id, *_owner(name)], float(count))
        for worker in workers
        for name, count in worker.pages.items()
    ]
    labels = ["worker", "model_name", "kind"]
    yield by(GaugeMetricFamily, "arena_pages", "Arena pages by owner.", labels, pages)
    sizes = (([w.worker_id], float(w.page_bytes)) for w in workers)
    doc = "Size of an arena page."
    yield by(GaugeMetricFamily, "arena_page_size_bytes", doc, ["worker"], sizes)
    totals = (([w.worker_id], float(w.num_pages)) for w in workers)
    yield by(GaugeMetricFamily, "arena_num_pages", "Arena pages in total.", ["worker"], totals)
    used = (([w.worker_id], _kv_share(w)) for w in workers)
    doc = "Share of arena pages that hold KV of requests."
    yield by(GaugeMetricFamily, "kv_cache_usage_ratio", doc, ["worker"], used)
    used = (([w.worker_id], _kv_share(w, "weights")) for w in workers)
    doc = "Share of arena pages without weights that hold KV of requests."
    yield by(GaugeMetricFamily, "kv_cache_usage_perc", doc, ["worker"], used)
    states = [
        ([worker.worker_id, model.model_id, model.state], 1.0)
        for worker in workers
        for model in worker.models
    ]
    labels = ["worker", "model_name", "state"]
    doc = "1 for the current state of the model."
    yield by(GaugeMetricFamily, "model_residency", doc, labels, states)
    yield from _step_sizes(workers)
    for name in sorted({name for worker in workers for name in worker.counters}):
        if "_le_" in name:
            continue
        rows = (([w.worker_id], w.counters[name]) for w in workers if name in w.counters)
        if name in _COUNTERS:
            metric, doc = _COUNTERS[name]
            yield by(CounterMetricFamily, metric, doc, ["worker"], rows)
        else:
            # Untyped: among the worker's own figures are counts and sizes.
            doc = "Figure reported by the worker."
            yield by(UnknownMetricFamily, f"engine_{name}", doc, ["worker"], rows)


def _step_sizes(workers: list[WorkerStatus]) -> Iterator[Metric]:
    """A worker counts its steps by powers of two."""
    for name, doc, kind, total_name in _STEP_SIZES:
        metric = HistogramMetricFamily(f"polyhost_{name}", doc, labels=["worker"])
        for worker in workers:
            num_steps, buckets = 0.0, []
            for bound in _SIZE_BOUNDS:
                num_steps += worker.counters.get(f"{kind}_le_{bound}", 0.0)
                buckets.append((str(float(bound)), num_steps))
            buckets.append(("+Inf", num_steps))
            metric.add_metric([worker.worker_id], buckets, worker.counters.get(total_name, 0.0))
        yield metric


def _ledger_metrics(ledger: LedgerSnapshot) -> Iterator[Metric]:
    lag = "Age of the oldest record that is not in the database."
    yield gauge("ledger_lag_seconds", lag, ledger.lag_s)
    yield gauge("ledger_pending", "Records waiting for the database.", ledger.num_pending)
    yield gauge("ledger_unsynced", "Records that are not durable yet.", ledger.num_unsynced)
    yield gauge("ledger_open", "Requests opened and not finished.", ledger.num_open)
    yield gauge("ledger_refusing", "1 if new requests are refused.", int(ledger.refuses))
    yield total("ledger_opened", "Open records written to the database.", ledger.num_opened)
    yield total("ledger_posted", "Postings written to the database.", ledger.num_posted)
    yield total("ledger_voided", "Open records closed without a charge.", ledger.num_voided)
    yield total("ledger_write_errors", "Failed commits.", ledger.num_write_errors)
    yield total("ledger_recovered", "Records left open by an earlier run.", ledger.num_recovered)
    yield total("ledger_rolled_up", "Postings added to roll-ups.", ledger.num_rolled)
    yield total("ledger_put_aside", "Records that the database rejected.", ledger.num_put_aside)
    yield total("ledger_differing", "Postings dropped for an earlier one.", ledger.num_differing)
    yield gauge(
        "journal_size_bytes", "Journal size that is not in the database yet.", ledger.journal_bytes
    )
    yield total("journal_sync_errors", "Failed journal writes and syncs.", ledger.num_sync_errors)
    yield total("journal_damaged", "Journal gaps with lost records.", ledger.num_damaged)


def _owner(name: str) -> tuple[str, str]:
    """ "model/kv" -> (model, kv); "free" belongs to nobody. Model names may hold slashes."""
    model, _, kind = name.rpartition("/")
    return model, kind


def _kv_share(worker: WorkerStatus, *without: str) -> float:
    """Of all pages but those of these kinds."""
    kinds: dict[str, int] = {}
    for name, count in worker.pages.items():
        _, kind = _owner(name)
        kinds[kind] = kinds.get(kind, 0) + count
    pages = worker.num_pages - sum(kinds.get(kind, 0) for kind in without)
    return kinds.get("kv", 0) / pages if pages > 0 else 0.0
