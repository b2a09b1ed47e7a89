"""What a gateway process counts itself, as requests pass (state_metrics.py has what others know).

Names are vLLM's with the prefix `polyhost_` where the meaning is the same, buckets too, so that
dashboards made for it need one search and replace. vLLM's times begin at 0.3 s; here there are
bounds below it.

Labels are bounded: hosted models, routes, and fixed words. Nothing a caller writes becomes a label.
"""

import platform
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.protocol import SwapRecord
from gateway.metrics.counters import LabelCounts, TimeHistogram
from gateway.metrics.families import Build, by, family_of, gauge, total
from gateway.protocols import ConnectionCounts
from gateway.types import AnswerNote

# fmt: off
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
INTER_TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
QUEUE_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2,
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
PHASE_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2,
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
SWAP_BUCKETS = (
    0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0,
)
LENGTH_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000,
    200_000, 500_000, 1_000_000,
)
# fmt: on
OUTCOMES = ("finished", "disconnected", "failed", "void")
FINISH_REASONS = ("stop", "length")


class Metrics:
    """The edge's own counts. One object per registry. `models`: the names of those hosted, whose
    counters exist before their first request."""

    def __init__(
        self, registry: CollectorRegistry, models: Callable[[], Iterable[str]] = tuple
    ) -> None:
        def counter(name: str, doc: str, labels: list[str]) -> Counter:
            return Counter(f"polyhost_{name}", doc, labels, registry=registry)

        def counts(
            name: str, doc: str, labels: list[str], words: tuple[str, ...] | None = ()
        ) -> LabelCounts:
            """`words`: of the second label, those that each model has from the beginning; None:
            there is no second one, and the first is the model."""

            def zeros() -> Iterator[tuple[str, ...]]:
                for model in models():
                    if words is None:
                        yield (model,)
                    else:
                        yield from ((model, word) for word in words)

            return LabelCounts(f"polyhost_{name}", doc, labels, registry, zeros)

        self._measure(registry)
        self.prompt_tokens = counts(
            "prompt_tokens", "Prompt tokens of finished requests.", ["model_name"], None
        )
        self.generation_tokens = counts(
            "generation_tokens", "Generated tokens of finished requests.", ["model_name"], None
        )
        self.posted_cost = counts(
            "posted_cost_nanos", "Cost that was posted, in nanos.", ["model_name"], None
        )
        self.request_success = counts(
            "request_success",
            "Requests that finished successfully.",
            ["model_name", "finished_reason"],
            FINISH_REASONS,
        )
        self.requests_ended = counts(
            "requests_ended",
            "Queued requests that ended, by outcome; `void` had no tokens.",
            ["model_name", "outcome"],
            OUTCOMES,
        )
        self.answers = AnswerCounts(registry)
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
        self.coalesced = Counter(
            "polyhost_coalesced_requests",
            "Requests that shared the answer of an identical running request.",
            registry=registry,
        )
        self._registry = registry

    def _measure(self, registry: CollectorRegistry) -> None:
        """Times and lengths."""

        def histogram(name: str, doc: str, buckets: tuple[float, ...]) -> TimeHistogram:
            return TimeHistogram(f"polyhost_{name}", doc, buckets, registry)

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
            "request_queue_time_seconds", "Time spent in the fair queue.", QUEUE_BUCKETS
        )
        self.prefill_time = histogram(
            "request_prefill_time_seconds",
            "Time from arrival to the first token, less that in the queue.",
            PHASE_BUCKETS,
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "Time from the first token to the end.", PHASE_BUCKETS
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "Decode time of a request by its tokens but the first.",
            INTER_TOKEN_BUCKETS,
        )
        lengths = tuple(map(float, LENGTH_BUCKETS))
        self.prompt_length = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", lengths
        )
        self.output_length = histogram(
            "request_generation_tokens", "Generated tokens of a request.", lengths
        )
        self.swap_duration = Histogram(
            "polyhost_swap_duration_seconds",
            "Duration of loads and evictions, by source of the weights.",
            ["kind", "tier"],
            buckets=SWAP_BUCKETS,
            registry=registry,
        )

    def watch_connections(self, connections: ConnectionCounts) -> None:
        """Show these, too."""
        self._registry.register(ConnectionCollector(connections))

    def on_swap(self, worker_id: str, swap: SwapRecord) -> None:
        """Dispatcher's swap listener. Which worker it was stands in the log, not in a label."""
        del worker_id
        self.swaps.labels(swap.model_id, swap.kind).inc()
        self.swap_bytes.labels(swap.model_id, swap.kind).inc(swap.size_bytes)
        self.swap_duration.labels(swap.kind, swap.tier).observe(swap.duration_s)


def watch_process(registry: CollectorRegistry) -> None:
    """Show the process (its CPU time, memory, descriptors) and what was built."""
    ProcessCollector(registry=registry)
    doc = "1; what the server was built from."
    build = Gauge("polyhost_build_info", doc, ["version", "python_version"], registry=registry)
    build.labels(metadata.version("polyhost"), platform.python_version()).set(1)


class AnswerCounts(Collector):
    """HTTP requests by how they were answered, each once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counts: dict[tuple[str, ...], float] = {}
        self._errors: dict[str, float] = {}
        registry.register(self)

    def add(self, route: str, note: AnswerNote) -> None:
        """One more."""
        key = route, note.model, note.code, note.fault
        self._counts[key] = self._counts.get(key, 0.0) + 1
        if note.status >= 400:
            self._errors[note.code] = self._errors.get(note.code, 0.0) + 1

    def describe(self) -> Iterable[Metric]:
        """The names alone."""
        return self._metrics({}, {})

    def collect(self) -> Iterable[Metric]:
        """As of now."""
        return self._metrics(self._counts, self._errors)

    def take(self) -> Build:
        """See Source."""
        about = self._counts.copy(), self._errors.copy()
        return lambda: map(family_of, self._metrics(*about))

    def _metrics(
        self, counts: dict[tuple[str, ...], float], errors: dict[str, float]
    ) -> Iterator[Metric]:
        labels = ["route", "model_name", "code", "fault"]
        doc = "HTTP requests by how they were answered."
        answers = CounterMetricFamily("polyhost_answers", doc, labels=labels)
        for key, number in counts.items():
            answers.add_metric(key, number)
        yield answers
        doc = "Responses other than 2xx."
        family = CounterMetricFamily("polyhost_request_errors", doc, labels=["code"])
        for code, number in errors.items():
            family.add_metric([code], number)
        yield family


class ConnectionCollector(Collector):
    """What the HTTP edge's connections are."""

    def __init__(self, connections: ConnectionCounts) -> None:
        self._connections = connections

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not collect."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Now."""
        return self._metrics(dict(self._connections.ended))

    def take(self) -> Build:
        """See Source."""
        ended = dict(self._connections.ended)
        return lambda: map(family_of, self._metrics(ended))

    def _metrics(self, by_reason: dict[str, int]) -> Iterator[Metric]:
        yield gauge("connections_open", "Open HTTP connections.", self._connections.num_open)
        delayed = "HTTP connections delayed by the rate limit of their address."
        yield total("connections_delayed", delayed, self._connections.num_delayed)
        ended = (([reason], float(n)) for reason, n in by_reason.items())
        doc = "HTTP connections closed by the server, by reason."
        yield by(CounterMetricFamily, "connections_ended", doc, ["reason"], ended)
