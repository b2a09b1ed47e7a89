"""The engine's spine: `step()` is schedule -> run -> postprocess, for all models of one device.

Comes in: token ids (`submit`), residency wishes (`load`, `unload`), time. Goes out: token deltas,
residency, leases. Knows no text, no sockets and no tenants' limits. Owned by one thread; the only
other threads are the loaders inside `residency`.

A failure of one model (a broken weight, an impossible shape) ends that model's requests of the
step with an error and leaves the others running; an IntegrityError ends the worker.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.backend.base import Backend
from engine.batch import ScheduledRow, build_batch
from engine.config import EngineConfig
from engine.errors import IntegrityError, RequestRefused
from engine.leases import check_submit, make_leases
from engine.model_runner import ModelRunner
from engine.pack import PackIndex
from engine.page_pool import PagePool
from engine.policy.batching import split_time
from engine.protocol import (
    Finish,
    FinishReason,
    Lease,
    ModelSpec,
    ModelStatus,
    Submit,
    SwapRecord,
    TokenDelta,
    Usage,
)
from engine.request import Request
from engine.residency import Residency
from engine.sampler import SampleRow, broken_rows, sample
from engine.scheduler import ModelQueue, Scheduler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What a worker tells its gateways about the engine; see protocol.WorkerStatus."""

    free_requests: int
    free_kv_bytes: int
    page_bytes: int
    num_pages: int
    pages: dict[str, int]
    models: list[ModelStatus]
    leases: list[Lease]
    counters: dict[str, float]


class Engine:
    """Many models on one device. Not thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        backend: Backend,
        residency: Residency | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config = config
        self._backend = backend
        self._clock = clock
        self.pool = PagePool(config.num_pages, config.resolved_page_bytes)
        self._residency = residency or Residency(config, self.pool, backend)
        self._scheduler = Scheduler(
            config.max_num_seqs, config.max_batch_tokens, config.min_run_steps, self._reclaim
        )
        self._runners: dict[str, ModelRunner] = {}
        self._aborts: list[Request] = []
        self._ended: list[TokenDelta] = []
        self._kv_claim: Request | None = None  # models leave for it until it runs
        self._stalled = False
        self._step = 0
        self._counters = {
            "steps": 0.0,
            "busy_seconds": 0.0,
            "prompt_tokens": 0.0,
            "generation_tokens": 0.0,
            "batch_tokens": 0.0,
        }

    def set_catalog(self, models: Sequence[ModelSpec], now_s: float) -> None:
        """The whole list of models; one that is not named any more is drained and forgotten."""
        for model_id in self._residency.set_catalog(models):
            self._residency.begin_drain(model_id, now_s, "removed from the catalog")

    def submit(self, request: Submit, now_s: float) -> None:
        """Take a request in. Raises RequestRefused, changing nothing."""
        queues = self._scheduler.queues()
        check_submit(request, self._config, self.pool, self._residency, self._runners, queues)
        self._scheduler.add(Request.of(request, now_s))
        self._stalled = False

    def abort(self, request_id: str, attempt: int) -> None:
        """End a request at the next step; unknown ones have ended already."""
        request = self._scheduler.find((request_id, attempt))
        if request is not None and request not in self._aborts:
            self._aborts.append(request)

    def load(self, model_id: str, now_s: float) -> None:
        """Make a model resident, making room by policy. Idempotent."""
        if not self._residency.knows(model_id):
            raise RequestRefused("unknown_model", f"model {model_id!r} is not in the catalog")
        self._residency.request_load(model_id, now_s)

    def unload(self, model_id: str, now_s: float) -> None:
        """Drain a model and give its pages back. Idempotent."""
        if self._residency.knows(model_id):
            self._residency.begin_drain(model_id, now_s, "unload was asked for")

    def has_work(self) -> bool:
        """Whether a step would run or end something now.

        Not while the last step ran nothing and no page is on its way back: then all wait for loads.
        """
        return bool(self._aborts or self._ended) or (
            not self._stalled and self._scheduler.has_work()
        )

    def step(self, now_s: float) -> list[TokenDelta]:
        """Schedule, run, postprocess. Empty when nothing ran or ended."""
        self._reclaim()
        self._end_aborted()
        self._advance_residency(now_s)
        planned = self._scheduler.schedule()
        self._stalled = False
        if planned is not None:
            self._run(*planned, now_s)
        elif self.pool.num_fenced:
            self._pass_fence()
        else:
            self._make_kv_room(now_s)
            self._stalled = not self.pool.num_fenced
        deltas, self._ended = self._ended, []
        return deltas

    def take_swaps(self) -> list[SwapRecord]:
        """Loads and evictions finished since the last call."""
        return self._residency.take_swaps()

    def status(self, now_s: float) -> EngineStatus:
        """Residency, pages and what may be submitted."""
        queues = {queue.model_id: queue for queue in self._scheduler.queues()}
        pages = {f"{o.model_id}/{o.kind}": n for o, n in self.pool.pages_by_owner().items()}
        pages["free"] = self.pool.num_free + self.pool.num_fenced
        free_requests, free_bytes, leases = make_leases(
            self._config, self.pool, self._residency, self._runners, queues
        )
        counters = dict(self._counters)
        counters["preemptions"] = float(self._scheduler.num_preemptions)
        return EngineStatus(
            free_requests=free_requests,
            free_kv_bytes=free_bytes,
            page_bytes=self.pool.page_bytes,
            num_pages=self.pool.num_pages,
            pages=pages,
            models=self._residency.status_rows(
                {m: (len(q.running), len(q.waiting)) for m, q in queues.items()}
            ),
            leases=leases,
            counters=counters,
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError unless pool, residency, caches and queues agree."""
        self.pool.check_integrity()
        self._residency.check_integrity()
        self._scheduler.check_integrity()
        owned = {o.model_id for o in self.pool.pages_by_owner() if o.kind == "kv"}
        resident = {m for m, q in self._bound_queues()}
        if not owned <= resident:
            raise IntegrityError(f"KV pages of models that are not resident: {owned - resident}")

    def close(self) -> None:
        """Stop the loaders."""
        self._residency.close()

    def _bound_queues(self) -> list[tuple[str, ModelQueue]]:
        return [(q.model_id, q) for q in self._scheduler.queues() if q.cache is not None]

    def _reclaim(self) -> tuple[int, int]:
        freed = self.pool.retire(self._backend.last_done())
        return len(freed), self.pool.num_fenced

    def _pass_fence(self) -> None:
        """Nothing ran, but freed pages wait for a later step: count an empty one."""
        self._step += 1
        self.pool.begin_step(self._step)
        self._backend.launched(self._step)

    def _make_kv_room(self, now_s: float) -> None:
        """Nothing runs and no page is on its way back, but somebody may wait for KV memory.

        What is lacking is held by the weights of other models, and nobody would ever give it back:
        one model goes, and until the request runs no load may take the room.
        """
        request = self._kv_claim = self._scheduler.oldest_waiting()
        if request is not None and not self._residency.make_kv_room(
            request.submit.model_id, now_s, self._is_busy, self._drop_kv
        ):
            reason = "its KV does not fit on the device beside the models that may not leave"
            self._finish(request, [], "error", reason)

    def _holds_loads(self) -> bool:
        claim = self._kv_claim
        if claim is not None and (
            claim.state != "waiting" or self._scheduler.queue(claim.submit.model_id).cache is None
        ):
            self._kv_claim = claim = None
        return claim is not None

    def _end_aborted(self) -> None:
        for request in self._aborts:
            if request.state != "finished":
                self._finish(request, [], "abort")
        self._aborts.clear()

    def _advance_residency(self, now_s: float) -> None:
        events = self._residency.poll(now_s, self._is_busy, self._drop_kv, self._holds_loads())
        for event in events:
            if event.kind == "loaded":
                self._start_model(event.model_id)
            elif event.kind == "failed":
                self._fail_queue(event.model_id, event.reason)
        for queue in self._scheduler.queues():
            if queue.cache is None and queue.num_unfinished:
                # Preempted by an eviction: its requests want the model back.
                self._want_back(queue, now_s)
            if not self._residency.knows(queue.model_id):
                self._runners.pop(queue.model_id, None)
                self._scheduler.forget(queue)

    def _want_back(self, queue: ModelQueue, now_s: float) -> None:
        if not self._residency.knows(queue.model_id):
            self._fail_queue(queue.model_id, "the model was removed")
            return
        state = self._residency.state(queue.model_id)
        if state in ("cold", "warm"):
            self._residency.request_load(queue.model_id, now_s)
        elif state == "failed":
            self._fail_queue(queue.model_id, self._residency.reason(queue.model_id))

    def _is_busy(self, model_id: str) -> bool:
        return self._scheduler.queue(model_id).num_unfinished > 0

    def _start_model(self, model_id: str) -> None:
        """A model has come: point its modules at its weights."""
        index = self._residency.index(model_id)
        runner = self._runners.get(model_id)
        if runner is not None and runner.index.revision != index.revision:
            self._fail_queue(model_id, "the model was replaced while the request ran")
            runner = None
        try:
            runner = self._bind(model_id, index, runner)
        except Exception as error:  # modelling code and packs of another version: no contract
            logger.exception("model %s cannot be run", model_id)
            reason = f"its modules do not take the pack: {type(error).__name__}: {error}"
            self._runners.pop(model_id, None)
            self._residency.reject(model_id, reason)
            self._fail_queue(model_id, reason)
            return
        self._runners[model_id] = runner
        self._scheduler.bind(self._scheduler.queue(model_id), runner.cache)

    def _bind(self, model_id: str, index: PackIndex, runner: ModelRunner | None) -> ModelRunner:
        runner = runner or ModelRunner(
            model_id,
            self._residency.pack_dir(model_id),
            index,
            self._backend.arena,
            self.pool,
            self._config.block_tokens,
        )
        views = self._residency.weights(model_id)
        runner.bind(views.tensors, views.generation)
        return runner

    def _drop_kv(self, model_id: str) -> None:
        queue = self._scheduler.queue(model_id)
        if queue.cache is not None:
            self._scheduler.preempt_all(queue)
            self._runners[model_id].unbind()
            queue.cache = None

    def _fail_queue(self, model_id: str, reason: str) -> None:
        for request in list(self._scheduler.queue(model_id).requests()):
            self._finish(request, [], "error", reason)

    def _run(self, queue: ModelQueue, rows: list[ScheduledRow], now_s: float) -> None:
        assert queue.cache is not None
        started = self._clock()
        self._step += 1
        self.pool.begin_step(self._step)
        batch = build_batch(rows, queue.cache.plan, self._backend.device)
        try:
            logits = self._runners[queue.model_id].run(batch)
            broken = set(broken_rows(logits))
            tokens = self._sample(batch.sampling_rows, logits, broken)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            # One model's failure must not take the others down: the named boundary for it.
            logger.exception("step of model %s failed", queue.model_id)
            self._backend.launched(self._step)
            for row in rows:
                self._finish(row.request, [], "error", f"{type(error).__name__}: {error}")
            return
        self._backend.launched(self._step)
        self._charge(queue, rows, self._clock() - started, now_s)
        for row in rows:
            row.request.num_computed += row.num_tokens
        for i, row in enumerate(batch.sampling_rows):
            if i in broken:
                self._finish(row.request, [], "error", "the model's logits are not finite")
            else:
                self._append(row.request, tokens[i])

    def _sample(
        self, rows: Sequence[ScheduledRow], logits: torch.Tensor, broken: set[int]
    ) -> list[int]:
        if not rows:
            return []
        if broken:
            logits = logits.index_fill(0, torch.tensor(sorted(broken), device=logits.device), 0.0)
        return sample(
            logits,
            [
                SampleRow(
                    row.request.submit.sampling.temperature,
                    row.request.submit.sampling.top_p,
                    row.request.submit.sampling.seed,
                    len(row.request.token_ids),
                )
                for row in rows
            ],
        )

    def _charge(
        self, queue: ModelQueue, rows: list[ScheduledRow], step_s: float, now_s: float
    ) -> None:
        shares = split_time(
            step_s, [(r.num_tokens, r.request.num_computed + r.num_tokens) for r in rows]
        )
        for row, share in zip(rows, shares, strict=True):
            row.request.service_s += share
        queue.tag += step_s
        self._residency.touch(queue.model_id, step_s, now_s)
        self._counters["steps"] += 1
        self._counters["busy_seconds"] += step_s
        self._counters["batch_tokens"] += sum(row.num_tokens for row in rows)

    def _append(self, request: Request, token: int) -> None:
        request.token_ids.append(token)
        if request.num_generated == 1:
            self._counters["prompt_tokens"] += request.num_prompt
        self._counters["generation_tokens"] += 1
        if token in request.submit.stop_token_ids:
            self._finish(request, [token], "stop")
        elif request.num_generated >= request.submit.max_tokens:
            self._finish(request, [token], "length")
        else:
            self._ended.append(TokenDelta(*request.key, [token]))

    def _finish(
        self, request: Request, tokens: list[int], reason: FinishReason, error: str = ""
    ) -> None:
        self._scheduler.finish(request, reason, error)
        usage = Usage(
            prompt_tokens=request.num_prompt,
            cached_tokens=0,
            generated_tokens=request.num_generated,
            service_s=request.service_s,
        )
        self._ended.append(TokenDelta(*request.key, tokens, Finish(reason, usage, error)))
