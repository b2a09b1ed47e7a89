"""What the HTTP edge owns: built once from `Services` by `app.create_app`, used by the routes.

No HTTP in here, so that everything behind the routes can be built and tested without a server.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from gateway.batches.batches_service import BatchesService, build_batches
from gateway.cache.cache_handler import CacheHandler
from gateway.cache.calibrations import Calibrations
from gateway.cache.embedder import Embedder, HostedEmbedder, NoEmbedder
from gateway.cache.lookup import AnswerCache, open_stores
from gateway.files.files_service import FilesService, build_files
from gateway.ipc.control_socket import listening
from gateway.limits.limits import Limiter
from gateway.limits.store import LimitStore
from gateway.metrics.cache_metrics import CacheMetrics
from gateway.metrics.families import MetricsText
from gateway.metrics.metrics import Metrics
from gateway.metrics.state_metrics import StateCollector
from gateway.pipeline.active_request import Clocks
from gateway.pipeline.pipeline import Pipeline, Services
from gateway.pipeline.token_requests import TokenRequests
from gateway.prepare.encode_prepare import EncodePreparer
from gateway.prepare.lengths import PrepareBounds
from gateway.prepare.prepare import Preparer
from gateway.sealing.master_keys import read_keys
from gateway.sealing.seals import Seals
from gateway.settings.http_settings import REASONING_FIELDS
from gateway.state.responses_service import ResponsesService, build_responses
from gateway.text.codecs import Codecs
from gateway.text.prepare_pool import PreparePool

REAL_CLOCKS = Clocks(now_s=time.monotonic, now_at=time.time)


@dataclass(frozen=True, slots=True)
class Edge:
    """The pipeline with its surroundings."""

    services: Services
    pipeline: Pipeline
    token_requests: TokenRequests
    limiter: Limiter
    preparer: Preparer
    store: LimitStore
    metrics: Metrics
    clocks: Clocks
    cache: AnswerCache
    codecs: Codecs
    responses: ResponsesService
    metrics_text: MetricsText
    files: FilesService
    batches: BatchesService

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While requests may come: the operator can ask about cached answers."""
        path, store = self.services.cache_socket, self.cache.store
        await store.start()
        await self.responses.start()
        self.batches.start()
        reading = asyncio.create_task(self.codecs.read_ahead(self.services.directory.models()))
        try:
            if path is None:
                yield
                return
            async with listening(path, self._handler()):
                yield
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def close(self, timeout_s: float) -> None:
        """At shutdown, when no more requests come: let what has ended be posted."""
        await asyncio.gather(self.responses.close(timeout_s), self.batches.close(timeout_s))
        await self.files.close()
        await self.pipeline.drain(timeout_s)
        self.preparer.close()
        await self.cache.calibrations.close()
        await self.cache.store.close()

    def _handler(self) -> CacheHandler:
        cache = self.cache
        return CacheHandler(cache.store, cache.purged, forget=cache.calibrations.forget)


def build_edge(
    services: Services, clocks: Clocks = REAL_CLOCKS, pool: PreparePool | None = None
) -> Edge:
    """Build stages 1 to 4, 9 and 10, and register their metrics. `pool`: instead of its own."""
    settings = services.settings
    metrics = Metrics(services.metrics_registry, services.directory.model_names)
    store = services.limit_store
    limiter = Limiter(
        store,
        clocks.now_s,
        on_rejection=lambda meter: metrics.limit_rejections.labels(meter).inc(),
        gateway_limits=lambda: services.directory.limits,
        wall_clock=clocks.now_at,
        unread=services.directory.unread,
        budgets_fail_open=settings.budgets_fail_open,
    )
    codecs = Codecs(
        pool or PreparePool.of(settings),
        settings.max_tokenizers,
        clocks.now_s,
        on_offence=lambda name: metrics.prepare_offences.labels(name).inc(),
    )
    cache_metrics = CacheMetrics(services.metrics_registry)
    cache = _answer_cache(services, codecs, cache_metrics, clocks)
    fields = REASONING_FIELDS[settings.reasoning_fields]
    bounds = PrepareBounds(
        settings.default_max_tokens, settings.max_choices, fields, settings.max_prompts
    )
    has_embedder = cache.embedder.is_configured
    judges = settings.cache_least_logprob < 0
    preparer = Preparer(services.directory, codecs, bounds, has_embedder, judges)
    encode_preparer = EncodePreparer(services.directory, codecs, settings.max_encode_tokens)
    services.dispatcher.add_swap_listener(metrics.on_swap)
    services.metrics_registry.register(_state_collector(services, cache))
    seals = Seals(partial(read_keys, settings))
    stages = preparer, encode_preparer, limiter, cache
    pipeline = Pipeline(services, *stages, metrics, cache_metrics, clocks, seals)
    token_requests = TokenRequests(
        services.directory,
        preparer,
        codecs,
        limiter,
        clocks,
        seals,
        settings.unknown_fields == "tell",
    )
    about = settings, services.directory, metrics, pipeline.handle
    files = build_files(settings, metrics, clocks.now_at)
    times = services.owner, clocks.now_s, clocks.now_at
    return Edge(
        services,
        pipeline,
        token_requests,
        limiter,
        preparer,
        store,
        metrics,
        clocks,
        cache,
        codecs,
        build_responses(*about, services.owner, clocks.now_at, seals),
        MetricsText(settings.metrics_silent_s),
        files,
        build_batches(settings, files, services.directory, pipeline.handle, *times),
    )


def _state_collector(services: Services, cache: AnswerCache) -> StateCollector:
    store = services.limit_store
    return StateCollector(
        services.dispatcher,
        services.ledger,
        num_open_holds=lambda: store.num_open,
        cache_size=lambda: cache.size,
        limits_degraded=lambda: store.is_degraded,
        models=services.directory.model_names,
    )


def _answer_cache(
    services: Services, codecs: Codecs, metrics: CacheMetrics, clocks: Clocks
) -> AnswerCache:
    settings, worker = services.settings, services.embedding_worker
    embedder: Embedder = NoEmbedder()
    if worker is not None:
        embedder = HostedEmbedder(codecs, worker, settings.cache_embed_timeout_s)
    unreported = metrics.store_failures.labels("write")
    store, learnt = open_stores(settings, clocks.now_at, unreported.inc)
    calibrations = Calibrations(learnt, clocks.now_s)
    return AnswerCache(store, calibrations, embedder, metrics, settings, clocks.now_at)
