"""Units on the device as the engine uses them: from residency's events to runners and queues.

Comes in: wishes (catalog, load, unload) under hosted names, and one `advance` a step. Goes out:
runners whose modules point at their weights, queues with a cache, requests that ended because their
unit did. The weights under a step in flight are never exchanged: `settle` collects it first.
"""

import logging
from collections.abc import Callable, Sequence

from engine.backend.base import Backend
from engine.config import EngineConfig
from engine.constraints.constraint_child import TokenizerSource
from engine.encoders.encoder_requests import Encoding
from engine.memory.kv_memory import KvMemory
from engine.memory.page_pool import PagePool
from engine.memory.reserve import step_bytes
from engine.packs.pack import PackIndex
from engine.parts import AnyRunner, EngineParts
from engine.protocol import ModelSpec, Submit, SwapChoice, SwapRecord
from engine.request import Request
from engine.residency.catalog import Catalog
from engine.residency.residency import Residency
from engine.residency.residency_state import PLAIN_WISH, Wish
from engine.residency.room import KvClaim
from engine.scheduling.model_queue import ModelQueue
from engine.scheduling.scheduler import Scheduler

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
        parts: EngineParts | None = None,
    ) -> None:
        """`settle` collects every step in flight."""
        self._config = config
        self._make_runner = (parts or EngineParts()).make_runner
        self._pool = pool
        self._backend = backend
        self._kv = kv
        self._scheduler = scheduler
        self._settle = settle
        self._end_request = end_request
        self._kv_claim: Request | None = None  # units leave for it; none takes its room
        self._now_s = 0.0
        self._units_left = False  # some may have, and their runners should go
        self.residency = residency
        self.catalog = Catalog()
        self.runners: dict[str, AnyRunner] = {}

    def set_catalog(self, models: Sequence[ModelSpec], now_s: float) -> None:
        """The whole list; a unit that no name is left for is drained and forgotten."""
        for unit_id in self.residency.set_catalog(self.catalog.update(models, self._remains)):
            self.residency.begin_drain(unit_id, now_s, "removed from the catalog")
        self._units_left = True

    def load(self, name: str, now_s: float, wish: Wish = PLAIN_WISH) -> None:
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
        self.residency.request_load(unit_id, now_s, wish)

    def take_swaps(self) -> tuple[list[SwapRecord], list[SwapChoice]]:
        """Loads and evictions finished, and choices made, since the last call."""
        swaps = [self.catalog.swap(record) for record in self.residency.take_swaps()]
        return swaps, [self.catalog.choice(choice) for choice in self.residency.take_choices()]

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
        events = self.residency.poll(now_s, self._is_busy, self._drop_kv, self._claim())
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
                self._scheduler.forget(queue)
        if events or self._units_left:
            self._forget_runners()

    def tokenizer_source(self, unit_id: str, stop_ids: Sequence[int]) -> TokenizerSource:
        """What a constraint of one of its requests is compiled for."""
        return TokenizerSource(
            str(self.residency.pack_dir(unit_id) / "tokenizer.json"),
            self.residency.index(unit_id).vocab_size,
            tuple(sorted(set(stop_ids))),
        )

    def encoding(self, request: Submit, unit_id: str) -> Encoding | None:
        """The inputs of an encoder request that was checked; None for any other."""
        record = self.residency.index(unit_id).encoder
        return None if record is None else Encoding.of(request, record)

    def make_kv_room(self, now_s: float) -> None:
        """Nothing runs and no page is on its way back, but somebody may wait for KV memory.

        What is lacking is held by the weights of other units, and nobody would ever give it back:
        one unit goes. Until the request has ended loads leave it all it may come to need: with
        its first chunk alone it would lose the rest to a load, be preempted, and ask for room
        again for ever.
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

    def _claim(self) -> KvClaim | None:
        """What a request for which units have left may still need, until its end.

        Its worst case, less what it holds. Requests that are let in beside it are younger, or
        older ones that go first anyhow: the younger are preempted for it, so only weights have to
        be kept from its pages.
        """
        request = self._kv_claim
        if request is None:
            return None
        cache = self._scheduler.queue(request.unit_id).cache
        if request.state == "finished" or cache is None:
            self._kv_claim = None
            return None
        held = request.kv if request.state == "running" else None
        demand = cache.demand(held, request.max_total_tokens)
        return KvClaim(request.unit_id, cache.pages_of(demand))

    def _forget_runners(self) -> None:
        """Those of units that are gone."""
        gone = [unit_id for unit_id in self.runners if not self.residency.knows(unit_id)]
        for unit_id in gone:
            if not self._scheduler.is_busy(unit_id):
                del self.runners[unit_id]
        self._units_left = any(unit_id in self.runners for unit_id in gone)

    def _is_busy(self, unit_id: str) -> bool:
        return self._scheduler.is_busy(unit_id)

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

    def _bind(self, unit_id: str, index: PackIndex, runner: AnyRunner | None) -> AnyRunner:
        if runner is None:
            pack_dir = self.residency.pack_dir(unit_id)
            runner = self._make_runner(
                unit_id, pack_dir, index, self._backend, self._pool, self._config
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
