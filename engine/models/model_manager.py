"""Instances on the device as the engine uses them: from residency's events to runners and queues.

Comes in: the catalog, loads and unloads under hosted names, and one `advance` a step. Goes out:
runners whose modules point at their weights, queues with a cache, requests that ended because their
instance did. The weights under a step in flight are never exchanged: `settle` collects it first.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from engine.backend import Backend
from engine.config import EngineConfig
from engine.encoders import EncoderRunner
from engine.encoding import Encoding, check_encode
from engine.errors import RequestRefused
from engine.grammar import TokenizerSource
from engine.memory import KvMemory, PagePool
from engine.models.catalog import Catalog
from engine.models.reserve import step_bytes
from engine.pack import PackIndex
from engine.protocol import ModelSpec, Submit, SwapChoice, SwapRecord
from engine.request import Request, check_sampling
from engine.residency import PLAIN_LOAD, KvClaim, LoadRequest, Residency
from engine.running import InstanceRunner
from engine.scheduling import ModelQueue, Scheduler

logger = logging.getLogger(__name__)

AnyRunner: TypeAlias = InstanceRunner | EncoderRunner
MakeRunner: TypeAlias = Callable[[str, Path, PackIndex, Backend, PagePool, EngineConfig], AnyRunner]
"""(instance id, pack folder, index, backend, pool, config) -> its runner. May raise anything."""

EndRequest = Callable[[Request, float, str], None]
"""End a request with an error: (request, now_s, why)."""


class ModelManager:
    """All instances of one engine. Single-threaded."""

    def __init__(
        self,
        config: EngineConfig,
        pool: PagePool,
        backend: Backend,
        kv: KvMemory,
        residency: Residency,
        scheduler: Scheduler,
        make_runner: MakeRunner,
        settle: Callable[[float], None],
        end_request: EndRequest,
    ) -> None:
        """`settle` collects every step in flight."""
        self.config = config
        self._make_runner = make_runner
        self.pool = pool
        self._backend = backend
        self.kv = kv
        self.scheduler = scheduler
        self._settle = settle
        self._end_request = end_request
        self._kv_claim: Request | None = None  # instances leave for it; none takes its room
        self._now_s = 0.0
        self._instances_left = False  # some may have, and their runners should go
        self.residency = residency
        self.catalog = Catalog()
        self.runners: dict[str, AnyRunner] = {}

    def set_catalog(self, models: Sequence[ModelSpec], now_s: float) -> None:
        """The whole list; an instance that no name is left for is drained and forgotten."""
        for instance_id in self.residency.set_catalog(self.catalog.update(models, self._remains)):
            self.residency.begin_drain(instance_id, now_s, "removed from the catalog")
        self._instances_left = True

    def load(self, name: str, now_s: float, load_request: LoadRequest = PLAIN_LOAD) -> None:
        """Make a hosted model's instance resident, unless its steps need too much outside the
        arena."""
        instance_id = self.catalog.instance_of(name)
        if self.config.reserve_bytes and self.residency.state(instance_id) in ("cold", "warm"):
            needed = step_bytes(self.residency.index(instance_id), self.config)
            if needed > self.config.reserve_bytes:
                self.residency.reject(
                    instance_id,
                    f"a step needs {needed} bytes for activations and logits, more than the "
                    f"reserve_bytes of {self.config.reserve_bytes}: raise it, or lower "
                    "max_batch_tokens or max_num_seqs",
                )
                return
        self.residency.request_load(instance_id, now_s, load_request)

    def take_swaps(self) -> tuple[list[SwapRecord], list[SwapChoice]]:
        """Loads and evictions finished, and choices made, since the last call."""
        swaps = [self.catalog.swap(record) for record in self.residency.take_swaps()]
        return swaps, [self.catalog.choice(choice) for choice in self.residency.take_choices()]

    def unload(self, name: str, now_s: float) -> None:
        """Drain a hosted model's instance, unless another of its names needs it."""
        instance_id = self.catalog.instance_of(name)
        busy = {r.submit.model_id for r in self.scheduler.queue(instance_id).requests()}
        if self.catalog.may_unload(name, busy.__contains__):
            self.residency.begin_drain(instance_id, now_s, "an operator unloaded it")
        else:
            logger.info("not unloading model=%s: another model uses the same pack", name)

    def advance(self, now_s: float) -> None:
        """Loads, evictions and moves go on; what they did is brought to runners and queues."""
        self._now_s = now_s
        self.scheduler.leave_to_load(self.residency.pages_waited_for(), now_s)
        about = (self._drop_kv, self._claim(), self._is_busy)
        events = self.residency.poll(now_s, self.scheduler.is_live, *about)
        for event in events:
            if event.kind == "loaded":
                self._start(event.model_id)
            elif event.kind == "moved":
                self._settle(now_s)
                self._bind_again(event.model_id)
            elif event.kind == "failed":
                self._fail_queue(event.model_id, event.reason)
        for queue in self.scheduler.queues():
            if queue.cache is None and queue.num_unfinished:
                # Preempted by an eviction: its requests want the instance back.
                self._want_back(queue)
            if not self.residency.knows(queue.instance_id) and not queue.num_unfinished:
                self.scheduler.forget(queue)
        if events or self._instances_left:
            self._forget_runners()

    def check_submit(self, request: Submit) -> str:
        """The instance that would run it; asks for no lease. Raises RequestRefused."""
        model_id, residency = request.model_id, self.residency
        instance_id = self.catalog.instance_of(model_id)
        state = residency.state(instance_id)
        if state != "resident":
            code = "draining" if state == "draining" else "not_resident"
            raise RequestRefused(code, f"model {model_id!r} is {state}")
        index = residency.index(instance_id)
        if request.encode is not None or index.task != "generate":
            check_encode(request, index)
        else:
            self._check_generate(request, index, instance_id)
        queues = self.scheduler.queues()
        num_waiting = sum(r.is_batch <= request.is_batch for q in queues for r in q.waiting)
        if num_waiting >= self.config.max_waiting:
            raise RequestRefused(
                "overloaded", f"the worker's queue is full ({num_waiting} requests wait)"
            )
        return instance_id

    def tokenizer_source(self, instance_id: str, stop_ids: Sequence[int]) -> TokenizerSource:
        """What a constraint of one of its requests is compiled for."""
        return TokenizerSource(
            str(self.residency.pack_dir(instance_id) / "tokenizer.json"),
            self.residency.index(instance_id).vocab_size,
            tuple(sorted(set(stop_ids))),
        )

    def encoding(self, request: Submit, instance_id: str) -> Encoding | None:
        """The inputs of an encoder request that was checked; None for any other."""
        record = self.residency.index(instance_id).encoder
        return None if record is None else Encoding.of(request, record)

    def rank_idle_weights(self, now_s: float) -> None:
        """Pages are short, and cached KV would go: weights that nobody uses go before it, where
        they are worth less a byte."""
        if not self.kv.is_short:
            return
        cached = self.kv.least_worth(now_s)
        if cached is not None:
            self.residency.evict_idle(*cached, now_s, self._is_busy, self._drop_kv)

    def make_kv_space(self, now_s: float) -> None:
        """Nothing runs and no page is on its way back, but somebody may wait for KV memory.

        What is lacking is held by the weights of other instances, and nobody would ever give it
        back: one instance goes. Until the request has ended loads leave it all it may come to need:
        with its first chunk alone it would lose the rest to a load, be preempted, and ask for room
        again for ever.
        """
        self._now_s = now_s
        request = self._kv_claim = self.scheduler.oldest_waiting()
        if request is not None and not self.residency.make_kv_space(
            request.instance_id, now_s, self._is_busy, self._drop_kv
        ):
            reason = "its KV cache does not fit in memory beside the models that cannot be evicted"
            self._end_request(request, now_s, reason)

    def _check_generate(self, request: Submit, index: PackIndex, instance_id: str) -> None:
        total = len(request.prompt_token_ids) + request.max_tokens
        if not request.prompt_token_ids or request.max_tokens < 1 or total > index.max_context:
            raise RequestRefused(
                "context_length_exceeded",
                f"{len(request.prompt_token_ids)} prompt tokens and {request.max_tokens} new "
                f"tokens do not fit the maximum context length of {index.max_context}",
            )
        cache = self.runners[instance_id].cache
        num_kv_pages = cache.pages_for(total, repeats=request.constraint is not None)
        if num_kv_pages > self.residency.num_pages_for_kv(instance_id):
            raise RequestRefused(
                "context_length_exceeded",
                f"{total} tokens need {num_kv_pages * self.pool.page_bytes} bytes of KV cache, "
                "more than the device has beside the weights of this model and of pinned models",
            )
        _check_generated(request)
        ids = [*request.prompt_token_ids, *request.generated]
        if min(ids) < 0 or max(ids) >= index.vocab_size:
            raise RequestRefused(
                "context_length_exceeded",
                f"a token id is not between 0 and {index.vocab_size - 1}",
            )
        try:
            logprobs = (request.logprobs, request.prompt_logprobs)
            check_sampling(request.sampling, index.vocab_size, *logprobs)
        except ValueError as error:
            raise RequestRefused("invalid_sampling", str(error)) from error

    def _remains(self, instance_id: str) -> bool:
        """Whether an instance that is not named any more still has pages or requests."""
        return self.residency.knows(instance_id) or any(
            queue.instance_id == instance_id for queue in self.scheduler.queues()
        )

    def _claim(self) -> KvClaim | None:
        """What a request for which instances have left may still need, until its end.

        Its worst case, less what it holds. Requests that are let in beside it are younger, or
        older ones that go first anyhow: the younger are preempted for it, so only weights have to
        be kept from its pages.
        """
        request = self._kv_claim
        if request is None:
            return None
        cache = self.scheduler.queue(request.instance_id).cache
        if request.state == "finished" or cache is None:
            self._kv_claim = None
            return None
        held = request.kv if request.state == "running" else None
        demand = cache.demand(held, request.max_total_tokens)
        return KvClaim(request.instance_id, cache.pages_of(demand))

    def _forget_runners(self) -> None:
        """Those of instances that are gone."""
        gone = [
            instance_id for instance_id in self.runners if not self.residency.knows(instance_id)
        ]
        for instance_id in gone:
            if not self.scheduler.is_busy(instance_id):
                del self.runners[instance_id]
        self._instances_left = any(instance_id in self.runners for instance_id in gone)

    def _is_busy(self, instance_id: str) -> bool:
        return self.scheduler.is_busy(instance_id)

    def _want_back(self, queue: ModelQueue) -> None:
        if not self.residency.knows(queue.instance_id):
            self._fail_queue(queue.instance_id, "the model was removed")
            return
        state = self.residency.state(queue.instance_id)
        if state in ("cold", "warm") and queue.is_live:  # the dispatcher moves class batch off
            self.residency.request_load(queue.instance_id, self._now_s)
        elif state == "failed":
            self._fail_queue(queue.instance_id, self.residency.reason(queue.instance_id))

    def _start(self, instance_id: str) -> None:
        """An instance has come: point its modules at its weights."""
        index = self.residency.index(instance_id)
        runner = self.runners.get(instance_id)
        if runner is not None and runner.index.revision != index.revision:
            self._fail_queue(instance_id, "the model was replaced while the request ran")
            runner = None
        self._settle(self._now_s)
        try:
            runner = self._bind(instance_id, index, runner)
        except Exception as error:  # modelling code and packs of another version: no contract
            logger.exception("cannot run model %s", self.catalog.label(instance_id))
            reason = f"its weights cannot be bound to its modules: {type(error).__name__}: {error}"
            self.runners.pop(instance_id, None)
            self.residency.reject(instance_id, reason)
            self._fail_queue(instance_id, reason)
            return
        self.runners[instance_id] = runner
        # What a token costs to compute is taken to go with the weights it is multiplied with.
        queue = self.scheduler.queue(instance_id)
        self.kv.register(
            instance_id, runner.cache, float(index.total_bytes), lambda: queue.pace.token_s
        )
        self.scheduler.bind(queue, runner.cache)

    def _bind(self, instance_id: str, index: PackIndex, runner: AnyRunner | None) -> AnyRunner:
        if runner is None:
            pack_dir = self.residency.pack_dir(instance_id)
            runner = self._make_runner(
                instance_id, pack_dir, index, self._backend, self.pool, self.config
            )
        views = self.residency.weights(instance_id)
        runner.bind(views.tensors, views.generation)
        return runner

    def _bind_again(self, instance_id: str) -> None:
        """The instance's weights lie elsewhere now."""
        runner = self.runners.get(instance_id)
        if runner is not None and self.residency.state(instance_id) in ("resident", "draining"):
            views = self.residency.weights(instance_id)
            runner.bind(views.tensors, views.generation)

    def _drop_kv(self, instance_id: str) -> None:
        """The instance is about to leave the device."""
        queue = self.scheduler.queue(instance_id)
        if queue.cache is not None:
            self._settle(self._now_s)
            self.scheduler.unbind(queue, self._now_s)
            self.kv.forget(instance_id)
            self.runners[instance_id].unbind()

    def _fail_queue(self, instance_id: str, reason: str) -> None:
        for request in list(self.scheduler.queue(instance_id).requests()):
            self._end_request(request, self._now_s, reason)


def _check_generated(request: Submit) -> None:
    """Raises RequestRefused where a request cannot go on from what earlier attempts have made."""
    num_prompt, num_generated = len(request.prompt_token_ids), len(request.generated)
    if num_generated >= request.max_tokens:
        raise RequestRefused(
            "context_length_exceeded",
            f"{num_generated} tokens were generated before, of {request.max_tokens} at most",
        )
    if not 0 <= request.cached_tokens < num_prompt:
        raise RequestRefused(
            "context_length_exceeded",
            f"{request.cached_tokens} cached tokens of a prompt of {num_prompt}",
        )
