"""Loads in the order they were asked for; the head is led to its pages, nobody overtakes it.

Where the memory suffices once cached KV gives way, the head is placed (`placement.py`): KV and the
weights of others are moved out of its way, so that it never fails for want of a hole. Where it does
not suffice, models leave by policy first.
"""

from collections import deque

from engine.residency.placement import Placer
from engine.residency.residency_state import PLAIN_WISH, Hosted, Wish
from engine.residency.room import Room, may_move
from engine.residency.units import Turn, Units


class LoadQueue:
    """Units in the state "loading" that do not own all their pages yet."""

    def __init__(self, units: Units, room: Room, placer: Placer) -> None:
        self._units = units
        self._room = room
        self._placer = placer
        self._waiting: deque[Hosted] = deque()

    def add(self, model: Hosted, now_s: float, wish: Wish = PLAIN_WISH) -> None:
        """Ask for a load of a cold or warm unit. Prefetches stand behind all others."""
        model.move("loading", "waits for memory")
        model.wish = wish
        model.queued_at_s = now_s - wish.waited_s
        if wish.prefetch:
            self._waiting.append(model)
        else:
            self._stand_before_prefetches(model)

    def ask_again(self, model: Hosted, now_s: float, wish: Wish) -> None:
        """A unit that loads already is wanted, perhaps more than before."""
        was_prefetch = model.wish.prefetch
        model.wish = model.wish.with_newer(wish)
        if was_prefetch and not model.wish.prefetch:
            model.queued_at_s = now_s  # nobody has waited for it so far
            if model in self._waiting and self._waiting[0] is not model:
                self._waiting.remove(model)
                self._stand_before_prefetches(model)
        model.queued_at_s = min(model.queued_at_s, now_s - wish.waited_s)

    def call_off(self, model: Hosted) -> None:
        """Forget the load of a unit that waits here; others are left alone."""
        if model in self._waiting:
            self._placer.call_off(model)
            self._waiting.remove(model)
            model.move("cold")
            self._units.refresh(model)

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

    def count(self, model: Hosted) -> int:
        """How often the unit waits here (once at most, where the books are right)."""
        return self._waiting.count(model)

    def num_pages_pending(self) -> int:
        """Pages that the head needs and has not got."""
        return self._room.num_pages_pending(self._waiting[0]) if self._waiting else 0

    def serve(self, turn: Turn) -> None:
        """Lead one head after the other to its pages, until one has to wait."""
        while self._waiting:
            model = self._waiting[0]
            problem = self._room.why_never(model, self._units.all())
            if problem:
                self._placer.call_off(model)
                self._waiting.popleft()
                self._units.fail(model, problem, True, turn.events)
            elif self._place(model, turn):
                self._waiting.popleft()
            elif model.wish.prefetch and model.placement is None:
                self.call_off(model)  # nobody waits for it, so nobody has to make way
            else:
                return

    def _stand_before_prefetches(self, model: Hosted) -> None:
        first = next((n for n, m in enumerate(self._waiting) if m.wish.prefetch), None)
        if first is None:
            self._waiting.append(model)
            return
        self._placer.call_off(self._waiting[first])  # only the head can have claimed anything
        self._waiting.insert(first, model)

    def _place(self, model: Hosted, turn: Turn) -> bool:
        """Bring a load nearer to its pages; True once all of them are its own."""
        units = self._units.by_id
        if model.placement is not None and not self._placer.holds(model, units):
            self._placer.call_off(model)
        if model.placement is None:
            while (num_short := self._room.num_pages_short(model)) > 0:
                if not self._send_away(model, num_short, turn):
                    return False
            if not self._placer.may_begin(model, units, turn.now_s):
                return False
            if not self._placer.begin(model, units, turn.now_s):
                # Those that come or go stand in the way for a while only. KV that cannot be moved
                # may stay for long: whoever goes next may open a hole.
                if all(may_move(other) for other in self._units.on_device()):
                    self._send_away(model, 1, turn)
                return False
        for unit in self._placer.advance(model, units):
            self._units.moved(unit, turn)
        return model.holds_pages

    def _send_away(self, model: Hosted, num_pages: int, turn: Turn) -> bool:
        """Models leave by policy, so that so many pages come free. True if some have left."""
        units = self._units
        victims = self._room.victims(model, num_pages, units.all(), turn.now_s, turn.busy)
        for model_id in (*victims.evict, *victims.drain):
            units.drain(units.by_id[model_id], turn.now_s, f"room for {model.model_id}")
        for model_id in victims.evict:
            # Nobody has asked for it since: who did would have found it resident.
            units.evict(units.by_id[model_id], turn)
        return bool(victims.evict)
