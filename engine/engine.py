"""The engine: one `step()` for all models of one device.

    reclaim           pages whose steps have ended are free again
    _end_requests     aborted, out of time, or complete by their constraint
    _advance_models   loads, evictions and moves go on; cached KV gives way below the watermark
    schedule          which model runs, and which rows with how many tokens each
    _launch           the step goes to the device
    _collect          a step before it comes back: charged, tokens appended, requests finished
    _when_idle        nothing could be scheduled

Comes in: token ids (`submit`), load requests (`load`, `unload`), time. Goes out: token deltas
(an encoder's rows with their end), residency, leases. Knows no text, no sockets and no tenants'
limits. Owned by one thread; the others are the loaders inside `residency` and perhaps the one in
which the backend runs the steps.

With `steps_ahead` 1 the next step is scheduled and launched before the last one's tokens are known:
`step()` then returns the tokens of the step before. The scheduler counts on tokens in flight, and
on nothing else that a step in flight will tell.

A failure of one model (a broken weight, an impossible shape) ends that model's requests of the
step with an error and leaves the others running; an IntegrityError ends the worker.
"""

import logging
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from engine.backend import Backend
from engine.config import EngineConfig
from engine.constraints import ConstrainedRows
from engine.dependencies import EngineDependencies
from engine.encoding import Rows
from engine.errors import IntegrityError
from engine.memory import KvMemory, PagePool
from engine.models import AnyRunner, ModelManager, make_layout, make_status
from engine.protocol import (
    Finish,
    FinishReason,
    Layout,
    ModelSpec,
    Submit,
    SwapChoice,
    SwapRecord,
    TokenDelta,
    TokenLogprobs,
    WorkerStatus,
)
from engine.request import Request
from engine.residency import PLAIN_LOAD, LoadRequest, Residency
from engine.running import ScheduledRow
from engine.scheduling import (
    Charges,
    Collected,
    Deadlines,
    ModelQueue,
    SampledToken,
    Scheduler,
    StepPipeline,
)

logger = logging.getLogger(__name__)


class Engine:
    """Many models on one device. Not thread-safe."""

    def __init__(
        self, config: EngineConfig, backend: Backend, dependencies: EngineDependencies | None = None
    ) -> None:
        """`dependencies`: siblings for a modelled device."""
        dependencies = dependencies or EngineDependencies()
        self._config = config
        self.pool = PagePool(config.num_pages, config.resolved_page_bytes)
        low, high = (
            int(share * self.pool.num_pages)
            for share in (config.kv_low_watermark, config.kv_high_watermark)
        )
        self._kv = KvMemory(self.pool, backend, low, high)
        self._scheduler = Scheduler(
            config.max_num_seqs,
            config.max_batch_tokens,
            config.min_run_steps,
            self._kv,
            config.tenant_kv_share,
        )
        self._pipeline = StepPipeline(backend, self.pool, dependencies.lay_out)
        self._residency = Residency(
            config,
            self.pool,
            backend,
            dependencies.packs,
            dependencies.make_weight_store(backend, config),
            self._kv,
            dependencies.eviction,
        )
        self._manager = ModelManager(
            config,
            self.pool,
            backend,
            self._kv,
            self._residency,
            self._scheduler,
            dependencies.make_runner,
            settle=self._settle,
            end_request=self._end_with_error,
        )
        self._runners = self._manager.runners
        # Every request there may be, and those whose end has not been answered yet.
        self._constrained = ConstrainedRows(2 * (config.max_num_seqs + config.max_waiting))
        self._deadlines = Deadlines()
        self._aborts: list[Request] = []
        self._deltas: list[TokenDelta] = []
        self._stalled = False
        self._counters = {
            "steps": 0.0,
            "steps_failed": 0.0,
            "busy_seconds": 0.0,
            "unbilled_seconds": 0.0,
            "recompute_seconds": 0.0,
            "batch_seconds": 0.0,
            "prompt_tokens": 0.0,
            "generation_tokens": 0.0,
            "batch_tokens": 0.0,
            "batch_rows": 0.0,
            "deadline_timeouts": 0.0,
        }
        self._device_counters = dependencies.counters
        self._charges = Charges(self.pool.num_pages, self._counters)

    def set_catalog(self, models: Sequence[ModelSpec], now_s: float) -> None:
        """The whole list of models; one that is not named any more is drained and forgotten."""
        self._manager.set_catalog(models, now_s)

    def submit(self, request: Submit, now_s: float) -> None:
        """Take a request in. Raises RequestRefused, changing nothing."""
        instance_id = self._manager.check_submit(request)
        taken = Request.of(request, now_s, instance_id, self._config.request_timeout_s)
        taken.encoding = self._manager.encoding(request, instance_id)
        if request.constraint is not None:
            source = self._manager.tokenizer_source(instance_id, request.stop_token_ids)
            self._constrained.open(taken, request.constraint, source)
        self._scheduler.add(taken)
        self._deadlines.add(taken)
        self._stalled = False

    def abort(self, request_id: str, attempt: int) -> None:
        """End a request at the next step; unknown ones have ended already."""
        self.abort_all([(request_id, attempt)])

    def abort_all(self, keys: Collection[tuple[str, int]]) -> None:
        """`abort` of many, by (request_id, attempt)."""
        found = self._scheduler.find(keys)
        self._aborts += [request for request in found if request not in self._aborts]

    def load(self, model_id: str, now_s: float, load_request: LoadRequest = PLAIN_LOAD) -> None:
        """Make a model resident, making room by policy. Idempotent."""
        self._manager.load(model_id, now_s, load_request)

    def unload(self, model_id: str, now_s: float) -> None:
        """Drain a model and give its pages back. Idempotent."""
        self._manager.unload(model_id, now_s)

    def has_work(self) -> bool:
        """Whether a step would run, end or tell something now.

        Not while the last step ran nothing and no page is on its way back: then all wait for loads.
        """
        return bool(self._aborts or self._deltas or self._pipeline.num_in_flight) or (
            not self._stalled and self._scheduler.has_work()
        )

    def step(self, now_s: float) -> list[TokenDelta]:
        """Schedule, launch, collect. Empty when nothing was collected and nothing ended."""
        self._kv.reclaim()
        self._end_requests(now_s)
        self._advance_models(now_s)
        self._stalled = False
        scheduled = self._scheduler.schedule(now_s)
        if scheduled is None:
            self._when_idle(now_s)
        else:
            queue, rows = scheduled
            self._launch(queue, rows, now_s)
            self._collect(self._config.steps_ahead, now_s)
            if queue.encodes and self._scheduler.only_encodes and not self.pool.has_fences:
                self._manager.make_kv_space(now_s)
        deltas, self._deltas = self._deltas, []
        return deltas

    def runner(self, instance_id: str) -> AnyRunner:
        """Of a model that is resident or was."""
        return self._runners[instance_id]

    def unfinished(self) -> Iterator[Request]:
        """Requests that wait or run, to be looked at only."""
        for queue in self._scheduler.queues():
            yield from queue.requests()

    @property
    def num_cached_pages(self) -> int:
        """KV pages that only hold what later requests may find."""
        return self._kv.num_evictable()

    def take_swaps(self) -> tuple[list[SwapRecord], list[SwapChoice]]:
        """Loads and evictions finished, and choices made, since the last call."""
        return self._manager.take_swaps()

    @property
    def in_transition(self) -> bool:
        """Some model loads or drains."""
        return self._residency.in_transition

    @property
    def residency_key(self) -> int:
        """How often a model has changed its state."""
        return self._residency.num_moves

    def status(self, now_s: float) -> WorkerStatus:
        """Residency, pages and what may be submitted."""
        counters = {**self._counters, **self._constrained.counters(), **self._device_counters}
        return make_status(self._manager, counters)

    def layout(self) -> Layout:
        """Who lies where in the arena, in the rough."""
        return make_layout(self.pool, self._manager.catalog)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless pool, residency, caches and queues agree."""
        self.pool.check_integrity()
        self._residency.check_integrity()
        self._manager.catalog.check_integrity()
        self._scheduler.check_integrity()
        self._kv.check_integrity()
        for queue in self._scheduler.queues():
            for request in queue.requests():
                if request.num_pending > self._pipeline.num_in_flight:
                    raise IntegrityError(f"request {request.key} waits for a step that ended")

    def close(self) -> None:
        """Stop the loaders and end the constraint process. What is in flight is left to the
        backend's close."""
        self._constrained.shutdown()
        self._residency.close()

    def _end_requests(self, now_s: float) -> None:
        """Requests that end before the step, in whatever state they are: aborted, out of time, or
        with a constraint that cannot be had, cannot go on, or is fulfilled."""
        for request in self._aborts:
            if request.state != "finished":
                self._finish(request, [], "abort", now_s)
        self._aborts.clear()
        for request in self._deadlines.pop_due(now_s):
            self._counters["deadline_timeouts"] += 1
            self._finish(request, [], "timeout", now_s)
        for request, ending, reason in self._constrained.poll():
            if ending == "complete":
                self._finish(request, [], "stop", now_s)
            elif ending == "refused":
                self._finish(request, [], "refused", now_s, reason)
            else:
                self._end_with_error(request, now_s, f"its constraint broke: {reason}")

    def _advance_models(self, now_s: float) -> None:
        """Loads, evictions and moves go on; below the low watermark idle weights or cached KV are
        evicted, what is worth less first."""
        self._manager.advance(now_s)
        self._manager.rank_idle_weights(now_s)
        self._kv.keep_watermark()

    def _when_idle(self, now_s: float) -> None:
        """No request can run: for a token in flight, a fence, a mask, or memory that weights hold.

        The first that applies is dealt with, one in each step.
        """
        if self._pipeline.num_in_flight:
            self._settle(now_s)
        elif self.pool.has_fences:
            self._pipeline.pass_fence()
        elif self._constrained.rest():
            pass  # what runs waits for masks or grammars, and memory is not what is lacking
        else:
            self._manager.make_kv_space(now_s)
            self._stalled = not self.pool.has_fences

    def _launch(self, queue: ModelQueue, rows: list[ScheduledRow], now_s: float) -> None:
        assert queue.cache is not None
        runner = self._runners[queue.instance_id]
        error = self._pipeline.launch(queue, runner, queue.cache, rows)
        if error is not None:
            self._fail_step(queue, [row.request for row in rows], error, now_s)

    def _settle(self, now_s: float) -> None:
        """Nothing is in flight after this."""
        self._collect(0, now_s)

    def _collect(self, num_in_flight: int, now_s: float) -> None:
        """Take the oldest steps back until so many are left in flight."""
        while self._pipeline.num_in_flight > num_in_flight:
            ended = self._pipeline.collect()
            if ended.error is not None:
                requests = [item.row.request for item in ended.rows]
                self._fail_step(ended.queue, requests, ended.error, now_s)
                # The step launched on this one computes nothing; nor may another be built on it.
                num_in_flight = 0
            elif not ended.abandoned:
                self._charge(ended, now_s)
                if ended.encoded is not None:
                    self._take_rows(ended, ended.encoded, now_s)
                    continue
                self._take_tokens(ended, now_s)
                self._constrained.flush()

    def _take_tokens(self, ended: Collected, now_s: float) -> None:
        cache = ended.queue.cache
        broken = False
        for request, first, scores in ended.scores:
            request.prompt_scores += scores[len(request.prompt_scores) - first :]
        for item, token in zip(ended.rows, ended.tokens, strict=True):
            request = item.row.request
            if token is not None and token.broken:
                broken = True
                if request.state != "finished":
                    reason = "the model's logits are not finite"
                    self._finish(request, [], "error", now_s, reason)
                continue
            computed = item.row.end
            settled = "kept" if token is None else self._constrained.settle(request, token.token)
            if settled == "lost":
                # It means nothing; its logits are computed once more. A state cannot be taken back
                # by a token, but to what it was before the row.
                token = None
                keeps_states = cache is not None and bool(cache.states.groups)
                computed = item.row.first if keeps_states else computed - 1
                if item.still_runs:
                    request.num_computed = computed
            if item.still_runs and cache is not None:
                assert request.kv is not None
                cache.advance(request.kv, request.token_ids, computed, now_s)
            if settled == "complete":
                # Only the end could follow. Whether that was known before the step is a matter of
                # chance, so the end is never one of its tokens.
                self._finish(request, [], "stop", now_s)
            elif token is not None and request.state != "finished":
                self._append(request, token, now_s)
        if broken and cache is not None:
            cache.drop_cached()  # what came from broken weights must not reach anybody else

    def _take_rows(self, ended: Collected, encoded: Sequence[Rows], now_s: float) -> None:
        for row, vectors in zip((item.row for item in ended.rows), encoded, strict=True):
            request, encoding = row.request, row.request.encoding
            if request.state == "finished" or encoding is None:
                continue
            if not np.isfinite(vectors).all():
                self._end_with_error(request, now_s, "the model's rows are not finite")
                continue
            encoding.take(row.first, row.end, vectors)
            if encoding.is_complete:
                self._counters["prompt_tokens"] += request.num_prompt
                self._finish(request, [], "stop", now_s)

    def _fail_step(
        self, queue: ModelQueue, requests: Sequence[Request], error: Exception, now_s: float
    ) -> None:
        """One model's failure must not take the others down: the named boundary for it."""
        logger.error("step of model %s failed", queue.instance_id, exc_info=error)
        self._counters["steps_failed"] += 1
        for request in requests:
            if request.state != "finished":
                self._end_with_error(request, now_s, f"{type(error).__name__}: {error}")
        if queue.cache is not None:
            queue.cache.drop_cached()

    def _charge(self, ended: Collected, now_s: float) -> None:
        # What class batch uses makes no model more wanted. A turn that others had is theirs, too,
        # with all rows in it: it is as long for those who wait for another model.
        live_s = self._charges.step(ended)
        if all(item.row.request.is_batch for item in ended.rows):
            ended.queue.batch_tag += ended.device_s
        else:
            ended.queue.tag += ended.device_s
        self._residency.touch(ended.queue.instance_id, live_s, now_s, produced=ended.produced)
        self._counters["steps"] += 1

    def _append(self, request: Request, sampled: SampledToken, now_s: float) -> None:
        token = sampled.token
        logprobs = [] if sampled.logprobs is None else [sampled.logprobs]
        request.token_ids.append(token)
        if request.has_one_new:
            self._counters["prompt_tokens"] += request.num_prompt
        self._counters["generation_tokens"] += 1
        if token in request.submit.stop_token_ids:
            self._finish(request, [token], "stop", now_s, logprobs=logprobs)
        elif request.num_generated >= request.submit.max_tokens:
            self._finish(request, [token], "length", now_s, logprobs=logprobs)
        elif request.has_one_new:
            scores, cached = request.prompt_scores, request.cached_tokens or 0
            self._deltas.append(
                TokenDelta(*request.key, [token], None, logprobs, scores, cached_tokens=cached)
            )
        else:
            self._deltas.append(TokenDelta(*request.key, [token], None, logprobs))

    def _end_with_error(self, request: Request, now_s: float, error: str) -> None:
        self._finish(request, [], "error", now_s, error)

    def _finish(
        self,
        request: Request,
        tokens: list[int],
        reason: FinishReason,
        now_s: float,
        error: str = "",
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        self._scheduler.finish(request, reason, now_s, error)
        self._constrained.close(request)
        finish = Finish(reason, request.usage, error)
        # With its first delta, which is the last one where it has one token.
        scores = request.prompt_scores if tokens and request.has_one_new else []
        done = request.encoding if reason == "stop" else None
        vectors = b"" if done is None else done.vectors()
        self._deltas.append(
            TokenDelta(*request.key, tokens, finish, list(logprobs), scores, vectors)
        )
