"""A load's way to its pages: carries out the plan of `compaction.py`, a little at every poll.

    begin      every page of the plan that is free or fenced is claimed, so that nobody else can
               get it any more
    advance    KV in the way is cleared and its pages are claimed; when the targets of the moves
               are ripe, weights of other units move; what they leave is claimed. Once all pages of
               the runs are the model's own, it only waits for them to ripen
    call_off   everything claimed goes back

Nothing waits for a page that somebody else might take. A plan that is overtaken by events (a unit
that was to be moved drains, the memory is needed otherwise) is called off and made anew; moves are
made and booked at one go, so that no unit is ever half moved.

Weights move in device order: steps in flight read the old place before it is overwritten, later
ones the new place after it was written. What leaves device order is fenced: loaders write a page
only when it is ripe.
"""

from collections.abc import Collection, Mapping, Sequence

from engine.backend.base import Backend
from engine.memory.compaction import Move
from engine.memory.page_pool import Owner, PagePool
from engine.residency.residency_state import Hosted, Placement
from engine.residency.room import KvRoom, Room, may_move, weights_of

# A plan costs milliseconds on a large device: one that was not found is not looked for again at
# every step as long as the same models stand in the way.
REPLAN_S = 0.25


class Placer:
    """Places one load after the other. `num_moved_pages` counts pages of weights."""

    def __init__(self, pool: PagePool, kv: KvRoom, backend: Backend, room: Room) -> None:
        self._pool = pool
        self._kv = kv
        self._backend = backend
        self._room = room
        self._found_none: tuple[object, ...] = ()
        self._found_none_s = 0.0
        self.num_moved_pages = 0

    def holds(self, model: Hosted, units: Mapping[str, Hosted]) -> bool:
        """Whether what the model's plan rests on is still so."""
        placement = model.placement
        assert placement is not None
        return self._room.num_pages_short(model) <= 0 and all(
            move.unit_id in units
            and may_move(units[move.unit_id])
            and units[move.unit_id].runs[move.segment] == move.source
            for move in placement.plan.moves
        )

    def may_begin(self, model: Hosted, units: Mapping[str, Hosted], now_s: float) -> bool:
        """Whether looking for a plan may find what it did not find before."""
        return self._scene(model, units) != self._found_none or (
            now_s - self._found_none_s >= REPLAN_S
        )

    def begin(self, model: Hosted, units: Mapping[str, Hosted], now_s: float) -> bool:
        """Plan, and claim what can be claimed. False: there is no plan as things are."""
        plan = self._room.plan(model, units.values(), model.kv_stays)
        if plan is None:
            self._found_none, self._found_none_s = self._scene(model, units), now_s
            model.kv_stays = False  # for the next try
            return False
        model.placement = placement = Placement(plan, set(plan.kv_pages), plan.moves)
        sources = {page for move in plan.moves for page in move.source.pages}
        mine = {page for run in plan.runs for page in run.pages} | placement.targets
        self._claim(model, placement, mine - sources - placement.kv_left)
        return True

    def advance(self, model: Hosted, units: Mapping[str, Hosted]) -> list[Hosted]:
        """Do what can be done now; `model.runs` are set once all is. Returns the units it moved."""
        placement = model.placement
        assert placement is not None
        self._claim_cleared(model, placement)
        if placement.kv_left and not self._clear(model, placement):
            return []
        moved: list[Hosted] = []
        if placement.moves_left:
            if not self._pool.is_ripe(placement.targets & placement.claimed):
                return []
            moved = self._move(model, placement, units)
        model.runs = list(placement.plan.runs)
        model.placement = None
        model.kv_stays = False
        return moved

    def call_off(self, model: Hosted) -> None:
        """Give back what the model has claimed."""
        if model.placement is not None:
            self._pool.release(weights_of(model), model.placement.claimed)
            model.placement = None

    def _scene(self, model: Hosted, units: Mapping[str, Hosted]) -> tuple[object, ...]:
        return (model, *[(m.model_id, m.state, m.job is None) for m in units.values() if m.runs])

    def _claim(self, model: Hosted, placement: Placement, pages: Collection[int]) -> None:
        self._pool.claim(weights_of(model), pages)
        placement.claimed.update(pages)
        placement.kv_left.difference_update(pages)

    def _claim_cleared(self, model: Hosted, placement: Placement) -> None:
        """Take the pages that KV has left, by itself or because it was told to."""
        left = [page for page in placement.kv_left if self._pool.owner_of(page) is None]
        self._claim(model, placement, left)

    def _clear(self, model: Hosted, placement: Placement) -> bool:
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
        self, model: Hosted, placement: Placement, units: Mapping[str, Hosted]
    ) -> list[Hosted]:
        """Copy, and book the new places. The copies are the device's next work, in their order."""
        moves, placement.moves_left = placement.moves_left, ()
        self._pool.begin_copies()
        self._backend.copy_within(_copies(moves, self._pool.page_bytes))
        moved: dict[str, Hosted] = {}
        for move in moves:
            unit = moved[move.unit_id] = units[move.unit_id]
            unit.runs[move.segment] = move.target
            self.num_moved_pages += move.target.num_pages
            for giver, pages in self._by_owner(move.target.pages).items():
                if giver != weights_of(unit):
                    self._pool.hand_over(giver, weights_of(unit), pages)
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


def _copies(moves: Sequence[Move], page_bytes: int) -> list[tuple[int, int, int]]:
    """(source offset, target offset, bytes), none of which overlaps itself."""
    copies = []
    for move in moves:
        way = move.source.first - move.target.first
        for start in range(0, move.source.num_pages, way):
            num_pages = min(way, move.source.num_pages - start)
            copies.append(
                (
                    (move.source.first + start) * page_bytes,
                    (move.target.first + start) * page_bytes,
                    num_pages * page_bytes,
                )
            )
    return copies
