"""What the answer cache counts (gateway/cache/). How many asked for it is metrics.py's."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram

LOOK_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.05, 0.1)
EMBED_BUCKETS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What is kept, as it was seen last; in a store that others share: of all together."""

    num_entries: int = 0
    num_bytes: int = 0
    is_shared: bool = False
    """Other gateway processes see the same store."""
    is_degraded: bool = False
    """The store was not there when it was asked last."""


class CacheMetrics:
    """One object per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, doc: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"polyhost_semantic_cache_{name}", doc, labels, registry=registry)

        self.hits = counter("hits", "Cache hits by kind.", ("kind",))
        self.checks = counter(
            "checks",
            "Cached answers compared with the model's own answer.",
            ("outcome",),
        )
        self.saved_nanos = counter("saved_nanos", "Cost saved by cache hits, in nanos.")
        self.embed_failures = counter(
            "embed_failures", "Questions that could not be embedded in time."
        )
        self.store_failures = counter(
            "store_failures", "Failed store calls; a failed lookup is a miss.", ("call",)
        )
        self.not_kept = counter("not_kept", "Answers that were not stored.", ("reason",))
        self.look_time = Histogram(
            "polyhost_semantic_cache_lookup_seconds",
            "Time a request waited for the cache store, failures included.",
            ("call",),
            buckets=LOOK_BUCKETS,
            registry=registry,
        )
        self.embed_time = Histogram(
            "polyhost_semantic_cache_embed_seconds",
            "Time to embed a question.",
            buckets=EMBED_BUCKETS,
            registry=registry,
        )
