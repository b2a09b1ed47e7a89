"""Units on the device as the engine uses them: from residency's events to runners and queues.

Comes in: wishes (catalog, load, unload) under hosted names, and one `advance` a step. Goes out:
runners whose modules point at their weights, queues with a cache, requests that ended because their
unit did. The weights under a step in flight are never exchanged: `settle` collects it first.
"""

import logging
from collections.abc import Callable, Sequence

from engine.backend.base import Backend
from engine.catalog import Catalog
from engine.config import EngineConfig
from engine.kv_memory import KvMemory
from engine.model_queue import ModelQueue
from engine.model_runner import ModelRunner
from engine.pack import PackIndex
from engine.page_pool import PagePool
from engine.protocol import ModelSpec
from engine.request import Request
from engine.reserve import step_bytes
from engine.residency import Residency
from engine.scheduler import Scheduler

logger = logging.getLogger(__name__)

EndRequest = Callable[[Request, float, str], None]
"""End a request with an error: (request, now_s, why)."""


class Hosting:
    """All units of one engine. Single-threaded."""

    def __init__(
        self,
        config: EngineConfig,
        pool: PagePool,
        backend: Backend,
        kv: KvMemory,
        residency: Residency,
        scheduler: Scheduler,
        settle: Callable[[float], None],
        end_request: EndRequest,
    ) -> None:
        """`settle` collects every step in flight."""
        self._config = config
        self._pool = pool
        self._backend = backend
        self._kv = kv
        self._scheduler = scheduler
        self._settle = settle
        self._end_request = end_request
        self._kv_claim: Request | None = None  # units leave for it; none comes until it has ended
        self._now_s = 0.0
        self.residency = residency
        self.catalog = Catalog()
        self.runners: dict[str, ModelRunner] = {}

    def set_catalog(self, models: Sequence[ModelSpec], now_s: float) -> None:
        """The whole list; a unit that no name is left for is drained and forgotten."""
        for unit_id in self.residency.set_catalog(self.catalog.update(models, self._remains)):
            self.residency.begin_drain(unit_id, now_s, "removed from the catalog")

    def load(self, name: str, now_s: float) -> None:
        """Make a hosted model's unit resident, unless its steps need too much outside the arena."""
        unit_id = self.catalog.unit(name)
        if self._config.reserve_bytes and self.residency.state(unit_id) in ("cold", "warm"):
            needed = step_bytes(self.residency.index(unit_id), self._config)
            if needed > self._config.reserve_bytes:
                self.residency.reject(
                    unit_id,
                    f"a step needs {needed} bytes for activations and logits, and reserve_bytes is "
                    f"{self._config.reserve_bytes}: raise it, or lower max_batch_tokens or "
                    "max_num_seqs",
                )
                return
        self.residency.request_load(unit_id, now_s)

    def unload(self, name: str, now_s: float) -> None:
        """Drain a hosted model's unit, unless another of its names needs it."""
        unit_id = self.catalog.unit(name)
        busy = {r.submit.model_id for r in self._scheduler.queue(unit_id).requests()}
        if self.catalog.may_unload(name, busy.__contains__):
            self.residency.begin_drain(unit_id, now_s, "unload was asked for")
        else:
            logger.info("not unloaded model=%s: another model of its pack needs it", name)

    def advance(self, now_s: float) -> None:
        """Loads, evictions and moves go on; what they did is brought to runners and queues."""
        self._now_s = now_s
        events = self.residency.poll(now_s, self._is_busy, self._drop_kv, self._holds_loads())
        for event in events:
            if event.kind == "loaded":
                self._start(event.model_id)
            elif event.kind == "moved":
                self._settle(now_s)
                self._bind_again(event.model_id)
            elif event.kind == "failed":
                self._fail_queue(event.model_id, event.reason)
        for queue in self._scheduler.queues():
            if queue.cache is None and queue.num_unfinished:
                # Preempted by an eviction: its requests want the unit back.
                self._want_back(queue)
            if not self.residency.knows(queue.unit_id) and not queue.num_unfinished:
                self.runners.pop(queue.unit_id, None)
                self._scheduler.forget(queue)

    def make_kv_room(self, now_s: float) -> None:
        """Nothing runs and no page is on its way back, but somebody may wait for KV memory.

        What is lacking is held by the weights of other units, and nobody would ever give it back:
        one unit goes, and until the request has ended no load may take the room: with its first
        chunk alone it would lose the rest to a load, be preempted, and ask for room again for ever.
        """
        self._now_s = now_s
        request = self._kv_claim = self._scheduler.oldest_waiting()
        if request is not None and not self.residency.make_kv_room(
            request.unit_id, now_s, self._is_busy, self._drop_kv
        ):
            reason = "its KV does not fit on the device beside the models that may not leave"
            self._end_request(request, now_s, reason)

    def _remains(self, unit_id: str) -> bool:
        """Whether a unit that is not named any more still has pages or requests."""
        return self.residency.knows(unit_id) or any(
            queue.unit_id == unit_id for queue in self._scheduler.queues()
        )

    def _holds_loads(self) -> bool:
        """Whether a request for which units have left still needs the room: until its end.

        Not only until it runs: with its first chunk computed, a load could take the pages of the
        next, and it would be preempted, and units would leave for it again, for ever.
        """
        claim = self._kv_claim
        if claim is not None and (
            claim.state == "finished" or self._scheduler.queue(claim.unit_id).cache is None
        ):
            self._kv_claim = claim = None
        return claim is not None

    def _is_busy(self, unit_id: str) -> bool:
        return self._scheduler.queue(unit_id).num_unfinished > 0

    def _want_back(self, queue: ModelQueue) -> None:
        if not self.residency.knows(queue.unit_id):
            self._fail_queue(queue.unit_id, "the model was removed")
            return
        state = self.residency.state(queue.unit_id)
        if state in ("cold", "warm"):
            self.residency.request_load(queue.unit_id, self._now_s)
        elif state == "failed":
            self._fail_queue(queue.unit_id, self.residency.reason(queue.unit_id))

    def _start(self, unit_id: str) -> None:
        """A unit has come: point its modules at its weights."""
        index = self.residency.index(unit_id)
        runner = self.runners.get(unit_id)
        if runner is not None and runner.index.revision != index.revision:
            self._fail_queue(unit_id, "the model was replaced while the request ran")
            runner = None
        self._settle(self._now_s)
        try:
            runner = self._bind(unit_id, index, runner)
        except Exception as error:  # modelling code and packs of another version: no contract
            logger.exception("model %s cannot be run", self.catalog.label(unit_id))
            reason = f"its modules do not take the pack: {type(error).__name__}: {error}"
            self.runners.pop(unit_id, None)
            self.residency.reject(unit_id, reason)
            self._fail_queue(unit_id, reason)
            return
        self.runners[unit_id] = runner
        # What a token costs to compute is taken to go with the weights it is multiplied with.
        self._kv.register(unit_id, runner.cache, float(index.total_bytes))
        self._scheduler.bind(self._scheduler.queue(unit_id), runner.cache)

    def _bind(self, unit_id: str, index: PackIndex, runner: ModelRunner | None) -> ModelRunner:
        runner = runner or ModelRunner(
            unit_id,
            self.residency.pack_dir(unit_id),
            index,
            self._backend.arena,
            self._pool,
            self._config.block_tokens,
            caching=self._config.prefix_cache,
            max_chunk=self._config.max_batch_tokens,
        )
        views = self.residency.weights(unit_id)
        runner.bind(views.tensors, views.generation)
        return runner

    def _bind_again(self, unit_id: str) -> None:
        """The unit's weights lie elsewhere now."""
        runner = self.runners.get(unit_id)
        if runner is not None and self.residency.state(unit_id) in ("resident", "draining"):
            views = self.residency.weights(unit_id)
            runner.bind(views.tensors, views.generation)

    def _drop_kv(self, unit_id: str) -> None:
        """The unit is about to leave the device."""
        queue = self._scheduler.queue(unit_id)
        if queue.cache is not None:
            self._settle(self._now_s)
            self._scheduler.unbind(queue, self._now_s)
            self._kv.forget(unit_id)
            self.runners[unit_id].unbind()

    def _fail_queue(self, unit_id: str, reason: str) -> None:
        for request in list(self._scheduler.queue(unit_id).requests()):
            self._end_request(request, self._now_s, reason)
