"""Which worker loads which model, and when (pure). Victims of a load are the worker's own choice.

A model is wanted where tickets wait for it and no worker offers a lease, or where it is pinned. Of
the wanted ones, in the order of their heads in the fair queue:

1. As many claims of a model at a time as workers have its bytes, on the device or in host memory,
   and one at least, each on another worker: no herd of workers loads the same model, and where one
   worker has it a crowd that needs 32 copies has them after five rounds of loads. A claim ends when
   the model is resident or failed there, when the worker is lost, or when it expires.
2. Room that costs nobody is taken at once: free pages, and pages of models that are not in demand:
   nobody waits for them, nothing runs, and they are asked for so seldom that swapping them out and
   in again each time would keep within `max_load_share` (`fleet_view.WeightRoom.push_out`).
3. A load that pushes models in demand out is held back until it pays: until its tickets have waited
   together as long as the swap takes, which is this load and the way back of those it pushes out.
   What is asked once in a while then shares loads with what is asked next, and waiting never costs
   more than twice what the best choice in hindsight would (the rule of ski rental, in the form of
   Dooly, Goldman and Scott 1998, "TCP dynamic acknowledgment delay"). Nobody waits for that longer
   than `gather_wait_s`, and nobody at all while all that it pushes out is at rest: a moment later
   somebody may be at work there, and the load would have to wait for a drain.
   Not held back is what is worth more than what it pushes out by MARGIN: asked for so much oftener,
   times the seconds of its load. That changes who is in demand, once, and is no swapping back and
   forth; the worker judges it by its own margin and residence. It takes nothing out of the budget:
   a debt for it is waited off by those who come after, beyond their bound.
4. Loads that are held back also keep within `max_load_share` of the worker's time
   (`load_budget.LoadBudget`), in the fair order; they are `forced`: the worker makes room whatever
   its models are worth.
5. Another worker takes a model that is resident elsewhere only while the backlog of each copy, of
   those on their way too, would take longer than the load, and only room that costs nobody. What is
   not needed any more leaves: `relief.surplus`.

Every model that waits has an `Outlook`: when it is expected, and why not yet.

Not every worker is judged for every model: `FleetSight.candidates` has those worth it.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gateway.dispatch.policy.claims import Claims
from gateway.dispatch.policy.fleet_sight import FleetSight, most_claims
from gateway.dispatch.policy.fleet_view import (
    AskRate,
    Demand,
    LoadDecision,
    ModelView,
    Outlook,
    PushedOut,
    WeightRoom,
    WorkerView,
    load_seconds,
    nobody_asks,
)
from gateway.dispatch.policy.load_budget import Bucket, LoadBudget
from gateway.dispatch.policy.load_options import Option, considered
from gateway.dispatch.policy.reasons import Reason
from gateway.dispatch.policy.relief import idle_room

MARGIN = 1.5
"""A model is worth more than those it pushes out from so many times their worth on."""
EPSILON_S = 1e-6
"""Sums of waits are not exact."""
REJUDGE_S = 1.0
"""In a large fleet a load that is held back stays with its worker for so long, unless it would come
later there than was expected, or somewhere pages are free. One that can go nowhere is looked at
again after as long: those behind it have their turn before."""
MOST_JUDGED = 96
"""Workers that are judged in one look, of a large fleet, for loads that have none yet."""
AGAIN_S = 0.05
"""What is known to go on, and not for how long, is expected to last so long."""

_USED_UP: Reason = "load budget used up"
_MOVING: Reason = "other loads in progress"
_TOO_FEW: Reason = "too few requests waiting"


class _Turn(NamedTuple):
    """A load against models in demand, on one worker: when it may begin, and what it waits for. The
    least of the first three is taken."""

    start_s: float
    loss_s: float
    place: int  # in the order of the options
    room: WeightRoom
    model: ModelView
    reason: Reason  # why not before
    rests: bool  # nobody is at work with what it pushes out
    gathered_s: float
    bucket: Bucket


@dataclass(frozen=True, slots=True)
class _Kept:
    """Of a load that is held back: since when it is where it is, for whom, and what was said. One
    that can go nowhere has no worker; one more copy that can go nowhere has no outlook either."""

    judged_s: float
    num_waiting: int
    outlook: Outlook | None


class _Look:
    """One round of decisions: rooms of the workers that were looked at, and loads planned there."""

    def __init__(
        self,
        sight: FleetSight,
        claims: Claims,
        wanted: Container[str],
        asks_s: AskRate,
        in_debt: Container[str],
    ) -> None:
        self.sight = sight
        self.asks_s = asks_s
        self.buckets: dict[str, Bucket] = {}
        """As loads that are planned in this round leave them."""
        self.moved_s: dict[str, float] = {}
        """When what is under way on a worker is through."""
        self.num_judged = 0
        self._claims = claims
        self._wanted = wanted
        self._in_debt = in_debt
        self._rooms: dict[str, WeightRoom] = {}

    def options(self, demand: Demand) -> list[Option]:
        """Where the load could go: a warm copy loads sooner than a cold one, then the emptier."""
        views = self.sight.candidates(demand, self)
        self.num_judged += len(views)
        found = [
            (model.state != "warm", -room.free_bytes, room.view.worker_id, room, model)
            for room in map(self._room, views)
            if (model := self._loadable(room, demand))
        ]
        if not found:
            self.sight.none_loadable(demand)
        found.sort()  # no two have the same worker: it goes no further
        return [(room, model) for _, _, _, room, model in found]

    def free_room(self, demand: Demand) -> WeightRoom | None:
        """Where it has room that costs nobody, if there is any."""
        for view in self.sight.with_room(demand):
            room = self._room(view)
            model = self._loadable(room, demand)
            if model is not None and room.free_bytes >= model.weight_bytes:
                return room
        return None

    def option(self, demand: Demand, worker_id: str) -> list[Option]:
        """The same of one worker."""
        view = self.sight.view(worker_id)
        room = None if view is None else self._room(view)
        model = None if room is None else self._loadable(room, demand)
        return [] if room is None or model is None else [(room, model)]

    def __contains__(self, worker_id: object) -> bool:
        """Of workers to avoid: a load is planned there, or an earlier one not paid off."""
        return worker_id in self.buckets or worker_id in self._in_debt

    def _loadable(self, room: WeightRoom, demand: Demand) -> ModelView | None:
        """Not where the worker has been told to load it already and does not say so yet."""
        if demand.model_id in self._claims.on(room.view.worker_id):
            return None
        return room.loadable(demand)

    def _room(self, view: WorkerView) -> WeightRoom:
        room = self._rooms.get(view.worker_id)
        if room is None:
            claimed = self._claimed_bytes(view)
            room = WeightRoom(view, claimed, self._wanted, self.asks_s)
            self._rooms[view.worker_id] = room
        return room

    def _claimed_bytes(self, view: WorkerView) -> int:
        """What its claims have been promised and have not got."""
        missing = 0
        for model_id, claim in self._claims.on(view.worker_id).items():
            model = view.models.get(model_id)
            held = 0 if model is None else model.held_bytes
            missing += max(0, claim.weight_bytes - held)
        return missing


class Placement:
    """Claims, the loads' share of each worker's time, and what waits for what."""

    def __init__(self, max_load_share: float, gather_wait_s: float = 0.0) -> None:
        self._max_load_share = max_load_share
        self._gather_wait_s = gather_wait_s
        self._budget = LoadBudget(max_load_share)
        self._claims = Claims()
        self._outlooks: dict[str, Outlook] = {}
        self._kept: dict[str, _Kept] = {}

    @property
    def outlooks(self) -> Mapping[str, Outlook]:
        """Of the models that `decide` was asked about last and that are not claimed."""
        return self._outlooks

    def decide(
        self,
        now_s: float,
        demands: Sequence[Demand],
        sight: FleetSight,
        wanted: Container[str] = frozenset(),
        asks_s: AskRate = nobody_asks,
    ) -> list[LoadDecision]:
        """Loads to start now. `demands` come in the order in which they should be served.

        Models that are `wanted` by somebody are not idle, whatever a worker says.
        """
        self.drop_claims(now_s, sight.state)
        look = _Look(sight, self._claims, wanted, asks_s, self._budget.in_debt(now_s))
        self._outlooks, before, self._kept = {}, self._kept, {}
        decisions = []
        for demand in demands:
            model_id = demand.model_id
            most, loading = most_claims(sight, model_id), sight.having(model_id, "loading")
            there = len(loading) + len(sight.having(model_id, "resident"))
            while len(claims := self._claims.of(model_id)) < most:
                copies = there + sum(worker_id not in loading for worker_id in claims)
                decision = self._place(now_s, demand, copies, look, before.get(model_id))
                if decision is None:
                    break
                decisions.append(decision)
        return decisions

    def claim(self, now_s: float, demand: Demand, sight: FleetSight) -> LoadDecision | None:
        """An operator's request: place it now, whatever the share; None where it cannot be, or
        is there or on its way."""
        model_id = demand.model_id
        self.drop_claims(now_s, sight.state)
        views = sight.candidates(demand, and_failed=True)
        options = [w for w in views if w.may_load(demand, and_failed=True)]
        there = sight.having(model_id, "resident") or sight.having(model_id, "loading")
        if not options or there or self.num_claims(model_id):
            return None
        worker = max(options, key=lambda w: (idle_room(w, model_id), w.worker_id))
        room = WeightRoom(worker, 0, frozenset(), nobody_asks)
        look = _Look(sight, self._claims, frozenset(), nobody_asks, frozenset())
        return self._claim(now_s, room, demand, "operator", look)

    def drop_claims(self, now_s: float, state_of: Callable[[str, str], str | None]) -> None:
        """End those that are done or too old. `state_of(worker, model)`: None: no such worker."""
        for claim in self._claims.drop_ended(now_s, state_of):
            self._budget.call_off(claim.worker_id, claim.model_id, now_s)

    def loaded(self, worker_id: str, model_id: str, took_s: float, now_s: float) -> None:
        """A load has ended: the budget is charged what it took, not what was expected."""
        took_s = took_s if 0 <= took_s < math.inf else 0.0
        self._budget.settle(worker_id, model_id, took_s, now_s)

    def lose_worker(self, worker_id: str) -> None:
        """Its claims are void."""
        self._claims.lose_worker(worker_id)
        self._budget.forget([worker_id])

    def num_claims(self, model_id: str) -> int:
        """Workers that are to load the model."""
        return len(self._claims.of(model_id))

    def claimed(self, model_id: str, now_s: float) -> Outlook | None:
        """When the first claimed load is expected to end; None where no claim stands."""
        claim = min(self._claims.of(model_id).values(), key=lambda c: c.ready_s, default=None)
        if claim is None:
            return None
        sure, there_s = self._budget.is_sure(claim.worker_id), max(now_s, claim.ready_s)
        return Outlook(model_id, there_s, worker_id=claim.worker_id, load_s=claim.load_s, sure=sure)

    @property
    def is_busy(self) -> bool:
        """Whether any claim stands."""
        return bool(self._claims)

    def _place(
        self, now_s: float, demand: Demand, copies: int, look: _Look, kept: _Kept | None
    ) -> LoadDecision | None:
        """`copies`: workers that have it on the device, or on its way there."""
        if copies and not demand.num_waiting:
            return None
        if copies and demand.backlog_s / copies <= look.sight.load_s(demand):
            return None
        if look.sight.is_large:
            room = look.free_room(demand)
            if room is not None:
                reason: Reason = "replica" if copies else "free memory"
                return self._claim(now_s, room, demand, reason, look)
            if kept is not None and (kept.outlook is None) != (copies > 0):
                kept = None  # what was found out is not of a first copy, or not of one more
            if kept is not None and self._is_as_expected(now_s, demand, look, kept):
                return None
            if look.num_judged >= MOST_JUDGED:
                return None  # the next look goes on
        return self._judge(now_s, demand, look, look.options(demand), copies)

    def _is_as_expected(self, now_s: float, demand: Demand, look: _Look, kept: _Kept) -> bool:
        """Whether a load that is held back stays where it was, with an outlook as of now."""
        # Half of the look is left to those who have not been judged yet.
        if now_s - kept.judged_s >= REJUDGE_S and 2 * look.num_judged < MOST_JUDGED:
            return False
        outlook = kept.outlook
        if outlook is None:
            return self._stays(demand, kept)
        if not outlook.worker_id:
            return bool(kept.num_waiting) == bool(demand.num_waiting) and self._stays(demand, kept)
        until_s = outlook.until_s
        if (
            outlook.reason == _TOO_FEW
            and kept.num_waiting == demand.num_waiting
            and until_s > now_s + AGAIN_S
        ):  # nothing but time changes that
            return self._stays(demand, kept)
        for room, model in look.option(demand, outlook.worker_id):
            pushed = room.push_out(model, demand, self._max_load_share)
            if pushed is None or not pushed.num_in_demand:
                return False
            turn = self._turn(now_s, demand, room, model, pushed, 0, look)
            if turn.start_s <= now_s or turn.start_s > max(until_s, now_s) + AGAIN_S:
                return False
            self._take(now_s, demand, turn, look, kept.judged_s)
            return True
        return False

    def _stays(self, demand: Demand, kept: _Kept) -> bool:
        self._kept[demand.model_id] = kept
        if kept.outlook is not None:
            self._outlooks[demand.model_id] = kept.outlook
        return True

    def _judge(
        self,
        now_s: float,
        demand: Demand,
        look: _Look,
        options: Sequence[Option],
        copies: int,
    ) -> LoadDecision | None:
        model_id = demand.model_id
        if not options:
            leaving = look.sight.having(model_id, "draining")
            reason: Reason = "other loads in progress" if leaving else "not enough memory"
            reason = reason if len(look.sight) else "no worker connected"
            self._nowhere(now_s, demand, copies, reason)
            return None
        reason = "replica" if copies else "free memory"
        for room, model in options:
            if room.free_bytes >= model.weight_bytes:
                return self._claim(now_s, room, demand, reason, look, options)
        turn: _Turn | None = None
        for place, (room, model) in enumerate(options):
            pushed = room.push_out(model, demand, self._max_load_share)
            if pushed is not None and not pushed.num_in_demand:
                reason = "replica" if copies else "idle models evicted"
                return self._claim(now_s, room, demand, reason, look, options)
            if copies:
                continue  # a replica pushes nobody out
            gain = look.asks_s(model_id) * load_seconds(model)
            if pushed is not None and gain > MARGIN * pushed.worth:
                return self._claim(now_s, room, demand, "higher value", look, options)
            if demand.num_waiting:
                turn = self._turn(now_s, demand, room, model, pushed, place, look, turn)
        if turn is None:  # nor does a pin nobody waits for push anybody out
            self._nowhere(now_s, demand, copies, "not enough memory")
            return None
        return self._take(now_s, demand, turn, look, now_s, options)

    def _nowhere(self, now_s: float, demand: Demand, copies: int, reason: Reason) -> None:
        """Of those looked at no worker can load it, or none at nobody's cost."""
        outlook = None if copies else Outlook(demand.model_id, math.inf, reason)
        if outlook is not None:
            self._outlooks[demand.model_id] = outlook
        self._kept[demand.model_id] = _Kept(now_s, demand.num_waiting, outlook)

    def _turn(
        self,
        now_s: float,
        demand: Demand,
        room: WeightRoom,
        model: ModelView,
        pushed: PushedOut | None,
        place: int,
        look: _Look,
        best: _Turn | None = None,
    ) -> _Turn:
        """When the load may begin there against models in demand; or `best`, if that is better."""
        worker_id = room.view.worker_id
        loss_s = math.inf if pushed is None else pushed.loss_s
        rests = pushed is not None and not pushed.num_used
        gathered_s = now_s if rests else self._gathered_s(now_s, demand, loss_s)
        if best is not None and gathered_s > best.start_s:
            return best  # whatever else it waits for
        moved_s = look.moved_s.get(worker_id)
        if moved_s is None:
            moved_s = look.moved_s[worker_id] = self._moved_s(now_s, room.view)
        bucket = look.buckets.get(worker_id) or self._budget.bucket(worker_id, now_s)
        charge_s = self._budget.charge_s(worker_id, load_seconds(model))
        afforded_s = bucket.ready_s(charge_s, max(now_s, bucket.at_s))
        start_s, reason = afforded_s, _USED_UP
        if moved_s > start_s:
            start_s, reason = moved_s, _MOVING
        if gathered_s > start_s:
            start_s, reason = gathered_s, _TOO_FEW
        if best is not None and (start_s, loss_s, place) > best[:3]:
            return best
        return _Turn(start_s, loss_s, place, room, model, reason, rests, gathered_s, bucket)

    def _take(
        self,
        now_s: float,
        demand: Demand,
        turn: _Turn,
        look: _Look,
        judged_s: float,
        options: Sequence[Option] = (),
    ) -> LoadDecision | None:
        """Begin the load, or say when. What is due keeps its place before all behind it."""
        load_s, worker_id = load_seconds(turn.model), turn.room.view.worker_id
        charge_s = self._budget.charge_s(worker_id, load_s)
        if turn.gathered_s <= now_s:
            look.buckets[worker_id] = turn.bucket.taken(charge_s, turn.start_s)
        if turn.start_s > now_s:
            outlook = Outlook(
                demand.model_id,
                turn.start_s + load_s,
                turn.reason,
                turn.start_s,
                worker_id,
                load_s,
                self._budget.is_sure(worker_id),
            )
            self._outlooks[demand.model_id] = outlook
            self._kept[demand.model_id] = _Kept(judged_s, demand.num_waiting, outlook)
            return None
        self._budget.take(worker_id, demand.model_id, charge_s, now_s)
        reason: Reason = "next in line"
        if self._gather_wait_s > 0:
            overdue = now_s - demand.oldest_s >= self._gather_wait_s
            reason = "maximum wait reached" if overdue else "enough requests waiting"
            reason = "inactive models evicted" if turn.rests else reason
        return self._claim(now_s, turn.room, demand, reason, look, options, forced=True)

    def _gathered_s(self, now_s: float, demand: Demand, loss_s: float) -> float:
        """When waiting for more tickets ends, if no more come."""
        if self._gather_wait_s <= 0 or not demand.num_waiting:
            return now_s
        pays_s = now_s + (loss_s - demand.waited_s) / demand.num_waiting
        due_s = min(pays_s, demand.oldest_s + self._gather_wait_s)
        return due_s if due_s > now_s + EPSILON_S else now_s

    def _moved_s(self, now_s: float, view: WorkerView) -> float:
        """When the forced load, or the drain, under way there is expected to be through."""
        ends = [claim.ready_s for claim in self._claims.on(view.worker_id).values() if claim.forced]
        if not ends and not any(model.state == "draining" for model in view.models.values()):
            return now_s
        # Nothing is known of a drain, or of a load that lasts: look again soon.
        return max([now_s + AGAIN_S, *ends])

    def _claim(
        self,
        now_s: float,
        room: WeightRoom,
        demand: Demand,
        reason: Reason,
        look: _Look,
        options: Sequence[Option] = (),
        forced: bool = False,
    ) -> LoadDecision:
        def cost(room: WeightRoom, model: ModelView) -> tuple[float, PushedOut | None]:
            pushed = room.push_out(model, demand, self._max_load_share)
            if pushed is None or not pushed.num_in_demand:
                return 0.0, pushed
            turn = self._turn(now_s, demand, room, model, pushed, 0, look)
            return turn.start_s - now_s, pushed

        shown = considered(options, room, reason, cost)
        worker, model = room.view, room.view.model(demand)
        load_s, num_bytes = load_seconds(model), model.weight_bytes
        look.moved_s.pop(worker.worker_id, None)
        self._claims.add(demand.model_id, worker.worker_id, num_bytes, load_s, now_s, forced=forced)
        room.claimed_bytes += num_bytes
        look.sight.taken(worker.worker_id, num_bytes)
        return LoadDecision(
            demand.model_id,
            worker.worker_id,
            reason,
            forced=forced,
            waited_s=max(0.0, now_s - demand.oldest_s) if demand.num_waiting else 0.0,
            backlog_s=demand.backlog_s,
            load_s=load_s,
            num_waiting=demand.num_waiting,
            options=shown,
        )
