"""The engine's spine: `step()` is schedule -> launch -> collect, for all models of one device.

Comes in: token ids (`submit`), residency wishes (`load`, `unload`), time. Goes out: token deltas
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
from collections.abc import Iterator, Sequence

import numpy as np

from engine.backend.base import Backend
from engine.config import EngineConfig
from engine.constraints.constrained_rows import ConstrainedRows
from engine.encoders.encoder_requests import Rows
from engine.engine_status import EngineStatus, make_layout, make_status
from engine.errors import IntegrityError
from engine.memory.kv_supply import PoolSupply
from engine.memory.page_pool import PagePool
from engine.parts import AnyRunner, EngineParts
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
)
from engine.request import Request
from engine.residency.hosting import Hosting
from engine.residency.residency import Residency
from engine.residency.residency_state import PLAIN_WISH, Wish
from engine.running.batch import ScheduledRow
from engine.scheduling.charges import Charges
from engine.scheduling.deadlines import Deadlines
from engine.scheduling.model_queue import ModelQueue
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.skip import Skipper
from engine.scheduling.step_pipeline import Collected, SampledToken, StepPipeline
from engine.worker.leases import check_submit

logger = logging.getLogger(__name__)


class Engine:
    """Many models on one device. Not thread-safe."""

    def __init__(
        self, config: EngineConfig, backend: Backend, parts: EngineParts | None = None
    ) -> None:
        """`parts`: siblings for a modelled device."""
        parts = parts or EngineParts()
        self._config = config
        self.pool = PagePool(config.num_pages, config.resolved_page_bytes)
        self._supply = PoolSupply(config, self.pool, backend)
        self._scheduler = Scheduler(
            config.max_num_seqs,
            config.max_batch_tokens,
            config.min_run_steps,
            self._supply,
            config.tenant_kv_share,
        )
        self._pipeline = StepPipeline(backend, self.pool, parts.lay_out)
        self._residency = Residency(config, self.pool, backend, self._supply.kv, parts)
        self._hosting = Hosting(
            config,
            self.pool,
            backend,
            self._supply.kv,
            self._residency,
            self._scheduler,
            settle=self._settle,
            end_request=self._end_with_error,
            parts=parts,
        )
        self._runners = self._hosting.runners
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
            "prompt_tokens": 0.0,
            "generation_tokens": 0.0,
            "batch_tokens": 0.0,
            "deadline_timeouts": 0.0,
        }
        self._charges = Charges(self.pool.num_pages, self._counters)

    def set_catalog(self, models: Sequence[ModelSpec], now_s: float) -> None:
        """The whole list of models; one that is not named any more is drained and forgotten."""
        self._hosting.set_catalog(models, now_s)

    def submit(self, request: Submit, now_s: float) -> None:
        """Take a request in. Raises RequestRefused, changing nothing."""
        queues = self._scheduler.queues()
        unit_id = check_submit(request, self._config, self.pool, self._hosting, queues)
        taken = Request.of(request, now_s, unit_id, self._config.request_timeout_s)
        taken.encoding = self._hosting.encoding(request, unit_id)
        if request.constraint is not None:
            source = self._hosting.tokenizer_source(unit_id, request.stop_token_ids)
            self._constrained.open(taken, request.constraint, source)
        self._scheduler.add(taken)
        self._deadlines.add(taken)
        self._stalled = False

    def abort(self, request_id: str, attempt: int) -> None:
        """End a request at the next step; unknown ones have ended already."""
        request = self._scheduler.find((request_id, attempt))
        if request is not None and request not in self._aborts:
            self._aborts.append(request)

    def load(self, model_id: str, now_s: float, wish: Wish = PLAIN_WISH) -> None:
        """Make a model resident, making room by policy. Idempotent."""
        self._hosting.load(model_id, now_s, wish)

    def unload(self, model_id: str, now_s: float) -> None:
        """Drain a model and give its pages back. Idempotent."""
        self._hosting.unload(model_id, now_s)

    def has_work(self) -> bool:
        """Whether a step would run, end or tell something now.

        Not while the last step ran nothing and no page is on its way back: then all wait for loads.
        """
        return bool(self._aborts or self._deltas or self._pipeline.num_in_flight) or (
            not self._stalled and self._scheduler.has_work()
        )

    def step(self, now_s: float) -> list[TokenDelta]:
        """Schedule, launch, collect. Empty when nothing was collected and nothing ended."""
        self._supply.reclaim()
        self._end_early(now_s)
        self._end_constrained(now_s)
        self._hosting.advance(now_s)
        self._supply.kv.keep_watermark()
        planned = self._scheduler.schedule(now_s)
        self._stalled = False
        if planned is not None:
            self._launch(*planned, now_s)
            self._collect_down_to(self._config.steps_ahead, now_s)
            if planned[0].encodes and self._scheduler.only_encodes and not self.pool.has_fences:
                self._hosting.make_kv_room(now_s)
        elif self._pipeline.num_in_flight:
            self._settle(now_s)
        elif self.pool.has_fences:
            self._pipeline.pass_fence()
        elif self._constrained.rest():
            pass  # what runs waits for masks or grammars, and memory is not what is lacking
        else:
            self._hosting.make_kv_room(now_s)
            self._stalled = not self.pool.has_fences
        deltas, self._deltas = self._deltas, []
        return deltas

    def runner(self, unit_id: str) -> AnyRunner:
        """Of a unit that is resident or was."""
        return self._runners[unit_id]

    def skipper(self) -> Skipper:
        """For a modelled device: many decodes at one go."""
        return Skipper(
            self._config,
            self.pool,
            self._supply,
            self._scheduler,
            self._residency,
            self._pipeline,
            self._deadlines,
            self._counters,
        )

    def unfinished(self) -> Iterator[Request]:
        """Requests that wait or run, to be looked at only."""
        for queue in self._scheduler.queues():
            yield from queue.requests()

    @property
    def num_cached_pages(self) -> int:
        """KV pages that only hold what later requests may find."""
        return self._supply.kv.num_evictable()

    def take_swaps(self) -> tuple[list[SwapRecord], list[SwapChoice]]:
        """Loads and evictions finished, and choices made, since the last call."""
        return self._hosting.take_swaps()

    @property
    def in_transition(self) -> bool:
        """Some unit loads or drains."""
        return self._residency.in_transition

    @property
    def residency_key(self) -> int:
        """How often a unit has changed its state."""
        return self._residency.num_moves

    def status(self, now_s: float) -> EngineStatus:
        """Residency, pages and what may be submitted."""
        return make_status(
            self._config,
            self.pool,
            self._supply,
            self._hosting,
            self._scheduler,
            {**self._counters, **self._constrained.counters()},
        )

    def layout(self) -> Layout:
        """Who lies where in the arena, in the rough."""
        return make_layout(self.pool, self._hosting)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless pool, residency, caches and queues agree."""
        self.pool.check_integrity()
        self._residency.check_integrity()
        self._hosting.catalog.check_integrity()
        self._scheduler.check_integrity()
        self._supply.kv.check_integrity()
        for queue in self._scheduler.queues():
            for request in queue.requests():
                if request.num_pending > self._pipeline.num_in_flight:
                    raise IntegrityError(f"request {request.key} waits for a step that ended")

    def close(self) -> None:
        """Stop the loaders and end the constraint process. What is in flight is left to the
        backend's close."""
        self._constrained.shutdown()
        self._residency.close()

    def _end_early(self, now_s: float) -> None:
        """Requests that were aborted, or whose time is up, in whatever state they are."""
        for request in self._aborts:
            if request.state != "finished":
                self._finish(request, [], "abort", now_s)
        self._aborts.clear()
        for request in self._deadlines.pop_due(now_s):
            self._counters["deadline_timeouts"] += 1
            self._finish(request, [], "timeout", now_s)

    def _end_constrained(self, now_s: float) -> None:
        """Requests whose constraint cannot be had, cannot go on, or is fulfilled."""
        for request, ending, reason in self._constrained.poll():
            if ending == "complete":
                self._finish(request, [], "stop", now_s)
            elif ending == "refused":
                self._finish(request, [], "refused", now_s, reason)
            else:
                self._end_with_error(request, now_s, f"its constraint broke: {reason}")

    def _launch(self, queue: ModelQueue, rows: list[ScheduledRow], now_s: float) -> None:
        assert queue.cache is not None
        runner = self._runners[queue.unit_id]
        error = self._pipeline.launch(queue, runner, queue.cache, rows)
        if error is not None:
            self._fail_step(queue, [row.request for row in rows], error, now_s)

    def _settle(self, now_s: float) -> None:
        """Nothing is in flight after this."""
        self._collect_down_to(0, now_s)

    def _collect_down_to(self, num_in_flight: int, now_s: float) -> None:
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
                # It means nothing; its logits are computed once more.
                token = None
                computed -= 1
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
        logger.error("step of model %s failed", queue.unit_id, exc_info=error)
        self._counters["steps_failed"] += 1
        for request in requests:
            if request.state != "finished":
                self._end_with_error(request, now_s, f"{type(error).__name__}: {error}")
        if queue.cache is not None:
            queue.cache.drop_cached()

    def _charge(self, ended: Collected, now_s: float) -> None:
        self._charges.step(ended)
        ended.queue.tag += ended.device_s
        self._residency.touch(ended.queue.unit_id, ended.device_s, now_s, produced=ended.produced)
        self._counters["steps"] += 1
        self._counters["batch_tokens"] += sum(item.row.num_tokens for item in ended.rows)

    def _append(self, request: Request, sampled: SampledToken, now_s: float) -> None:
        token = sampled.token
        logprobs = [] if sampled.logprobs is None else [sampled.logprobs]
        request.token_ids.append(token)
        if request.num_generated == 1:
            self._counters["prompt_tokens"] += request.num_prompt
        self._counters["generation_tokens"] += 1
        if token in request.submit.stop_token_ids:
            self._finish(request, [token], "stop", now_s, logprobs=logprobs)
        elif request.num_generated >= request.submit.max_tokens:
            self._finish(request, [token], "length", now_s, logprobs=logprobs)
        else:
            scores = request.prompt_scores if request.num_generated == 1 else []
            self._deltas.append(TokenDelta(*request.key, [token], None, logprobs, scores))

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
        scores = request.prompt_scores if tokens and request.num_generated == 1 else []
        done = request.encoding if reason == "stop" else None
        vectors = b"" if done is None else done.vectors()
        self._deltas.append(
            TokenDelta(*request.key, tokens, finish, list(logprobs), scores, vectors)
        )
