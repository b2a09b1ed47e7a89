"""Loads in the order they were asked for, and the way of the first one to its pages.

Nobody overtakes the head. Where the memory suffices once cached KV gives way, it is placed: KV and
the weights of others are moved out of its way, so that it never fails for want of a hole. Where it
does not suffice, models leave by policy first. `Placer` carries out the plan of `compaction.py`, a
little at every poll:

    begin      every page of the plan that is free or fenced is claimed, so that nobody else can
               get it any more
    advance    KV in the way is cleared and its pages are claimed; when the targets of the moves
               are ripe, weights of other models move; what they leave is claimed. Once all pages of
               the runs are the model's own, it only waits for them to ripen
    call_off   everything claimed goes back

Nothing waits for a page that somebody else might take. A plan that is overtaken by events (a model
that was to be moved drains, the memory is needed otherwise) is called off and made anew; moves are
made and booked at one go, so that no model is ever half moved.

Weights move in device order: steps in flight read the old place before it is overwritten, later
ones the new place after it was written. What leaves device order is fenced: loaders write a page
only when it is ripe.
"""

from collections import deque
from collections.abc import Collection, Mapping

from engine.backend import Backend
from engine.memory import Owner, PagePool
from engine.residency.loaded_models import (
    PLAIN_LOAD,
    LoadedModels,
    LoadRequest,
    ModelInstance,
    Placement,
    Turn,
)
from engine.residency.weight_space import KvSpace, WeightSpace, may_move

# A plan costs milliseconds on a large device: one that was not found is not looked for again at
# every step as long as the same models stand in the way.
REPLAN_S = 0.25


class Placer:
    """Places one load after the other. `num_moved_pages` counts pages of weights."""

    def __init__(self, pool: PagePool, kv: KvSpace, backend: Backend, space: WeightSpace) -> None:
        self._pool = pool
        self._kv = kv
        self._backend = backend
        self._space = space
        self._found_none: tuple[object, ...] = ()
        self._found_none_s = 0.0
        self.num_moved_pages = 0

    def holds(self, model: ModelInstance, models: Mapping[str, ModelInstance]) -> bool:
        """Whether what the model's plan rests on is still so."""
        placement = model.placement
        assert placement is not None
        return self._space.num_pages_short(model) <= 0 and all(
            move.instance_id in models
            and may_move(models[move.instance_id])
            and models[move.instance_id].runs[move.segment] == move.source
            for move in placement.plan.moves
        )

    def may_begin(
        self, model: ModelInstance, models: Mapping[str, ModelInstance], now_s: float
    ) -> bool:
        """Whether looking for a plan may find what it did not find before."""
        return self._scene(model, models) != self._found_none or (
            now_s - self._found_none_s >= REPLAN_S
        )

    def begin(
        self, model: ModelInstance, models: Mapping[str, ModelInstance], now_s: float
    ) -> bool:
        """Plan, and claim what can be claimed. False: there is no plan as things are."""
        plan = self._space.plan(model, models.values(), model.kv_stays)
        if plan is None:
            self._found_none, self._found_none_s = self._scene(model, models), now_s
            model.kv_stays = False  # for the next try
            return False
        model.placement = placement = Placement(plan, set(plan.kv_pages), plan.moves)
        sources = {page for move in plan.moves for page in move.source.pages}
        mine = {page for run in plan.runs for page in run.pages} | placement.targets
        self._claim(model, placement, mine - sources - placement.kv_left)
        return True

    def advance(
        self, model: ModelInstance, models: Mapping[str, ModelInstance]
    ) -> list[ModelInstance]:
        """Do what can be done now; `model.runs` are set once all is. Returns the models it
        moved."""
        placement = model.placement
        assert placement is not None
        self._claim_cleared(model, placement)
        if placement.kv_left and not self._clear(model, placement):
            return []
        moved: list[ModelInstance] = []
        if placement.moves_left:
            if not self._pool.is_ripe(placement.targets & placement.claimed):
                return []
            moved = self._move(model, placement, models)
        model.runs = list(placement.plan.runs)
        model.placement = None
        model.kv_stays = False
        return moved

    def call_off(self, model: ModelInstance) -> None:
        """Give back what the model has claimed."""
        if model.placement is not None:
            self._pool.release(model.weights_owner, model.placement.claimed)
            model.placement = None

    def _scene(
        self, model: ModelInstance, models: Mapping[str, ModelInstance]
    ) -> tuple[object, ...]:
        return (model, *[(m.model_id, m.state, m.job is None) for m in models.values() if m.runs])

    def _claim(self, model: ModelInstance, placement: Placement, pages: Collection[int]) -> None:
        self._pool.claim(model.weights_owner, pages)
        placement.claimed.update(pages)
        placement.kv_left.difference_update(pages)

    def _claim_cleared(self, model: ModelInstance, placement: Placement) -> None:
        """Take the pages that KV has left, by itself or because it was told to."""
        left = [page for page in placement.kv_left if self._pool.owner_of(page) is None]
        self._claim(model, placement, left)

    def _clear(self, model: ModelInstance, placement: Placement) -> bool:
        """Get KV out of the way. False: not yet, or the plan had to be called off."""
        if self._kv.clear(sorted(placement.kv_left)):
            self._claim_cleared(model, placement)
            return not placement.kv_left
        evictable = self._kv.evictable_mask()
        num_live = sum(not evictable[page] for page in placement.kv_left)
        num_lacking = num_live - self._pool.num_free
        num_coming = self._pool.num_fenced
        if num_lacking > num_coming:
            num_coming += self._kv.evict(num_lacking - num_coming)
        if num_lacking <= 0 or not num_coming:
            # It has room to go to and does not go: plan around it.
            self.call_off(model)
            model.kv_stays = True
        return False

    def _move(
        self, model: ModelInstance, placement: Placement, models: Mapping[str, ModelInstance]
    ) -> list[ModelInstance]:
        """Copy, and book the new places. The copies are the device's next work, in their order."""
        moves, placement.moves_left = placement.moves_left, ()
        self._pool.begin_copies()
        size = self._pool.page_bytes
        self._backend.copy_within(
            [
                (move.source.first * size, move.target.first * size, move.source.num_pages * size)
                for move in moves
            ]
        )
        moved: dict[str, ModelInstance] = {}
        for move in moves:
            instance = moved[move.instance_id] = models[move.instance_id]
            instance.runs[move.segment] = move.target
            self.num_moved_pages += move.target.num_pages
            for giver, pages in self._by_owner(move.target.pages).items():
                if giver != instance.weights_owner:
                    self._pool.hand_over(giver, instance.weights_owner, pages)
        placement.claimed -= placement.targets
        left = {page for move in moves for page in move.source.pages} - placement.targets
        for giver, pages in self._by_owner(left).items():
            self._pool.release(giver, pages)
        self._claim(model, placement, left)
        return list(moved.values())

    def _by_owner(self, pages: Collection[int]) -> dict[Owner, list[int]]:
        owners: dict[Owner, list[int]] = {}
        for page in pages:
            owner = self._pool.owner_of(page)
            assert owner is not None  # the loading model's, or those of the weights that move
            owners.setdefault(owner, []).append(page)
        return owners


class LoadQueue:
    """Models in the state "loading" that do not own all their pages yet."""

    def __init__(self, models: LoadedModels, space: WeightSpace, placer: Placer) -> None:
        self._models = models
        self._space = space
        self._placer = placer
        self._waiting: deque[ModelInstance] = deque()

    def add(
        self, model: ModelInstance, now_s: float, load_request: LoadRequest = PLAIN_LOAD
    ) -> None:
        """Ask for a load of a cold or warm model. Prefetches stand behind all others."""
        model.on("load", "waits for memory")
        model.load_request = load_request
        model.queued_at_s = now_s - load_request.waited_s
        if load_request.prefetch:
            self._waiting.append(model)
        else:
            self._stand_before_prefetches(model)

    def ask_again(self, model: ModelInstance, now_s: float, load_request: LoadRequest) -> None:
        """A model that loads already is wanted, perhaps more than before."""
        was_prefetch = model.load_request.prefetch
        model.load_request = model.load_request.with_newer(load_request)
        if was_prefetch and not model.load_request.prefetch:
            model.queued_at_s = now_s  # nobody has waited for it so far
            if model in self._waiting and self._waiting[0] is not model:
                self._waiting.remove(model)
                self._stand_before_prefetches(model)
        model.queued_at_s = min(model.queued_at_s, now_s - load_request.waited_s)

    def call_off(self, model: ModelInstance) -> None:
        """Forget the load of a model that waits here; others are left alone."""
        if model in self._waiting:
            self._placer.call_off(model)
            self._waiting.remove(model)
            model.on("call_off")
            self._models.refresh(model)

    def hold(self) -> bool:
        """Give back what the head has claimed; it keeps its turn. True if that was anything."""
        if not self._waiting or self._waiting[0].placement is None:
            return False
        self._placer.call_off(self._waiting[0])
        return True

    @property
    def is_waiting(self) -> bool:
        """Whether a load has not got all its pages."""
        return bool(self._waiting)

    def count(self, model: ModelInstance) -> int:
        """How often the model waits here (once at most, where the books are right)."""
        return self._waiting.count(model)

    def num_pages_pending(self) -> int:
        """Pages that the head needs and has not got."""
        return self._space.num_pages_pending(self._waiting[0]) if self._waiting else 0

    def num_pages_waited_for(self) -> int:
        """The same where others than class batch wait for the head; else 0."""
        head = self._waiting[0] if self._waiting else None
        return 0 if head is None or head.load_request.takes_leftovers else self.num_pages_pending()

    def serve(self, turn: Turn) -> None:
        """Lead one head after the other to its pages, until one has to wait."""
        while self._waiting:
            model = self._waiting[0]
            problem = self._space.why_never(model, self._models.all())
            if problem:
                self._placer.call_off(model)
                self._waiting.popleft()
                self._models.fail(model, problem, True, turn.events)
            elif self._place(model, turn):
                self._waiting.popleft()
            elif model.load_request.prefetch and model.placement is None:
                self.call_off(model)  # nobody waits for it, so nobody has to make way
            else:
                return

    def _stand_before_prefetches(self, model: ModelInstance) -> None:
        first = next((n for n, m in enumerate(self._waiting) if m.load_request.prefetch), None)
        if first is None:
            self._waiting.append(model)
            return
        self._placer.call_off(self._waiting[first])  # only the head can have claimed anything
        self._waiting.insert(first, model)

    def _place(self, model: ModelInstance, turn: Turn) -> bool:
        """Bring a load nearer to its pages; True once all of them are its own."""
        models = self._models.by_id
        if model.placement is not None and not self._placer.holds(model, models):
            self._placer.call_off(model)
        if model.placement is None:
            while (num_short := self._space.num_pages_short(model)) > 0:
                if not self._send_away(model, num_short, turn):
                    return False
            if not self._placer.may_begin(model, models, turn.now_s):
                return False
            if not self._placer.begin(model, models, turn.now_s):
                # Those that come or go stand in the way for a while only. KV that cannot be moved
                # may stay for long: whoever goes next may open a hole.
                if all(may_move(other) for other in self._models.on_device()):
                    self._send_away(model, 1, turn)
                return False
        for instance in self._placer.advance(model, models):
            self._models.moved(instance, turn)
        return model.holds_pages

    def _send_away(self, model: ModelInstance, num_pages: int, turn: Turn) -> bool:
        """Models leave by policy, so that so many pages come free. True if some have left."""
        models = self._models
        busy = turn.uses if model.load_request.takes_leftovers else turn.busy
        victims = self._space.victims(model, num_pages, models.all(), turn.now_s, busy)
        for model_id in (*victims.evict, *victims.drain):
            models.drain(models.by_id[model_id], turn.now_s, f"room for {model.model_id}")
        for model_id in victims.evict:
            # Nobody has asked for it since: who did would have found it resident.
            models.evict(models.by_id[model_id], turn)
        return bool(victims.evict)
