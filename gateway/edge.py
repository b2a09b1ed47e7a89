"""What the HTTP edge owns: built once from `Services` by `app.create_app`, used by the routes.

No HTTP in here, so that everything behind the routes can be built and tested without a server.
"""

import time
from dataclasses import dataclass

from gateway.ledger.settlement import Clocks
from gateway.limits.limits import Limiter
from gateway.metrics.metrics import Metrics, StateCollector
from gateway.pipeline import Pipeline
from gateway.prepare.codecs import Codecs, PreparePool
from gateway.prepare.encode_prepare import EncodePreparer
from gateway.prepare.prepare import PrepareBounds, Preparer
from gateway.semantic_cache import SemanticCache
from gateway.services import Services
from gateway.store.base import LimitStore

REAL_CLOCKS = Clocks(now_s=time.monotonic, now_at=time.time)


@dataclass(frozen=True, slots=True)
class Edge:
    """The pipeline with its surroundings."""

    services: Services
    pipeline: Pipeline
    preparer: Preparer
    store: LimitStore
    metrics: Metrics
    clocks: Clocks

    async def close(self, timeout_s: float) -> None:
        """At shutdown, when no more requests come: let what has ended be posted."""
        await self.pipeline.drain(timeout_s)
        self.preparer.close()


def build_edge(services: Services, clocks: Clocks = REAL_CLOCKS) -> Edge:
    """Build stages 1 to 4, 9 and 10, and register their metrics."""
    settings = services.settings
    metrics = Metrics(services.metrics_registry)
    store = services.limit_store
    cache = SemanticCache(settings.cache_max_bytes, settings.cache_ttl_s, clocks.now_s)
    limiter = Limiter(
        store,
        clocks.now_s,
        on_rejection=lambda meter: metrics.limit_rejections.labels(meter).inc(),
        gateway_limits=lambda: services.directory.limits,
        wall_clock=clocks.now_at,
    )
    codecs = Codecs(
        PreparePool(
            settings.prepare_threads, settings.max_prepare_pending, settings.prepare_inline_s
        ),
        settings.max_tokenizers,
    )
    bounds = PrepareBounds(settings.default_max_tokens, settings.max_choices)
    preparer = Preparer(services.directory, codecs, bounds)
    encode_preparer = EncodePreparer(services.directory, codecs, settings.max_encode_tokens)
    services.dispatcher.add_swap_listener(metrics.on_swap)
    services.metrics_registry.register(
        StateCollector(
            services.dispatcher,
            services.ledger,
            num_open_holds=lambda: store.num_open,
            cache_bytes=lambda: cache.size_bytes,
            limits_degraded=lambda: store.is_degraded,
        )
    )
    pipeline = Pipeline(services, preparer, encode_preparer, limiter, cache, metrics, clocks)
    return Edge(services, pipeline, preparer, store, metrics, clocks)
