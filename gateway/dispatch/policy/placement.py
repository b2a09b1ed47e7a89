"""Which worker loads which model, and when (pure). Victims of a load are the worker's own choice.

A model is wanted where tickets wait for it and no worker offers a lease, or where it is pinned. Of
the wanted ones, in the order of their heads in the fair queue:

1. One claim per model at a time: no herd of workers loads the same model. A claim ends when the
   model is resident or failed there, when the worker is lost, or when it expires.
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
   (`LoadBudget`), in the fair order; they are `forced`: the worker makes room whatever its
   models are worth.
5. A second worker takes a model that is resident elsewhere only when the backlog would take longer
   than the load, and only room that costs nobody.

Every model that waits has an `Outlook`: when it is expected, and why not yet.

A model larger than every worker's arena is never claimed; `unplaceable` says why.

KV pressure: where a worker is out of KV memory while a model that nobody uses lies beside it, that
model goes (`relieve`), one at a time, the least worth first; no load takes free pages there.
"""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

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
from gateway.dispatch.policy.reasons import Reason

MIN_TIMED = 3
"""Loads that have to end on a worker before anybody is refused for what loads take there."""
UNTIMED_S = 1.0
"""A load takes at most so much out of the bucket before, the rest when it has ended."""
BURST_S = 10.0
"""Unused share is kept for so long."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One worker's, as of `at_s`: what it holds, and what it holds at most."""

    share: float
    level_s: float
    at_s: float

    @property
    def most_s(self) -> float:
        """When it is full."""
        return self.share * BURST_S

    def level(self, now_s: float) -> float:
        """What it holds at a later time."""
        return min(self.most_s, self.level_s + self.share * max(0.0, now_s - self.at_s))

    def ready_s(self, load_s: float, now_s: float) -> float:
        """When a load that takes so long may begin, if none begins before it."""
        lacking_s = min(load_s, self.most_s) - self.level(now_s)
        # A hair of tolerance: levels are sums of many small additions.
        return now_s if lacking_s <= 1e-9 else now_s + lacking_s / self.share

    def taken(self, load_s: float, at_s: float) -> "Bucket":
        """After a load of so many seconds has begun."""
        return Bucket(self.share, self.level(at_s) - load_s, max(at_s, self.at_s))


class LoadBudget:
    """The share of a worker's time that loads against models in demand may take, by worker.

    A bucket of load seconds: it fills by `share` seconds a second, up to BURST_S of that, and a
    load takes what it is estimated to last. A load may begin when the bucket holds what it takes,
    or is full: one that takes more than the bucket holds is not shut out for ever, and leaves a
    debt that is filled up first. So within any window of T seconds the loads begun take at most

        share * T + max(share * BURST_S, the longest load)

    seconds. When a load has ended, what it really took is settled (`settle`), and one that came to
    nothing gives back what it took. A worker's first estimates are guesses, so its first loads take
    little beforehand, the rest when they have ended. A worker that comes begins with a full bucket.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._buckets: dict[str, Bucket] = {}
        self._charged: dict[tuple[str, str], float] = {}
        self._num_timed: dict[str, int] = {}

    def bucket(self, worker_id: str, now_s: float) -> Bucket:
        """As of now."""
        bucket = self._buckets.get(worker_id)
        return bucket or Bucket(self._share, self._share * BURST_S, now_s)

    def take(self, worker_id: str, model_id: str, load_s: float, now_s: float) -> None:
        """A load begins."""
        self._buckets[worker_id] = self.bucket(worker_id, now_s).taken(load_s, now_s)
        self._charged[worker_id, model_id] = load_s

    def settle(self, worker_id: str, model_id: str, took_s: float, now_s: float) -> None:
        """A load has ended: it took so long. Loads that took nothing out of the bucket are free."""
        self._num_timed[worker_id] = self._num_timed.get(worker_id, 0) + 1
        charged_s = self._charged.pop((worker_id, model_id), None)
        if charged_s is not None:
            self._buckets[worker_id] = self.bucket(worker_id, now_s).taken(
                took_s - charged_s, now_s
            )

    def call_off(self, worker_id: str, model_id: str, now_s: float) -> None:
        """A load came to nothing: what it took is given back."""
        charged_s = self._charged.pop((worker_id, model_id), None)
        if charged_s is not None:
            self._buckets[worker_id] = self.bucket(worker_id, now_s).taken(-charged_s, now_s)

    def is_sure(self, worker_id: str) -> bool:
        """Whether what loads take there has been measured: the first estimates are guesses."""
        return self._num_timed.get(worker_id, 0) >= MIN_TIMED

    def charge_s(self, worker_id: str, load_s: float) -> float:
        """What a load that is expected to last so long takes out of the bucket beforehand."""
        return load_s if self.is_sure(worker_id) else min(load_s, UNTIMED_S)

    def forget(self, worker_ids: Iterable[str]) -> None:
        """Workers that are gone."""
        gone = set(worker_ids)
        self._buckets = {w: bucket for w, bucket in self._buckets.items() if w not in gone}
        self._num_timed = {w: num for w, num in self._num_timed.items() if w not in gone}
        self._charged = {key: s for key, s in self._charged.items() if key[0] not in gone}


MIN_CLAIM_S = 5.0
MIN_IDLE_S = 1.0
"""A model goes for others' KV when nobody has used it for so long."""
MARGIN = 1.5
"""A model is worth more than those it pushes out from so many times their worth on."""
EPSILON_S = 1e-6
"""Sums of waits are not exact."""
AGAIN_S = 0.05
"""What is known to go on, and not for how long, is expected to last so long."""
CLAIM_LOADS = 4.0
"""A claim lives this many estimated loads, and MIN_CLAIM_S at least."""


@dataclass(frozen=True, slots=True)
class _Claim:
    worker_id: str
    expires_s: float
    weight_bytes: int
    ready_s: float  # when the load is expected to end
    load_s: float
    forced: bool


@dataclass(frozen=True, slots=True)
class _Turn:
    """A load against models in demand, on one worker: when it may begin, and what it waits for."""

    start_s: float
    loss_s: float
    place: int  # in the order of the options
    room: WeightRoom
    model: ModelView
    reason: Reason  # why not before
    rests: bool  # nobody is at work with what it pushes out
    gathered_s: float
    bucket: Bucket


class Placement:
    """Claims, the loads' share of each worker's time, and what waits for what."""

    def __init__(self, max_load_share: float, gather_wait_s: float = 0.0) -> None:
        self._max_load_share = max_load_share
        self._gather_wait_s = gather_wait_s
        self._budget = LoadBudget(max_load_share)
        self._claims: dict[str, _Claim] = {}
        self._outlooks: dict[str, Outlook] = {}

    @property
    def outlooks(self) -> Mapping[str, Outlook]:
        """Of the models that `decide` was asked about last and that are not claimed."""
        return self._outlooks

    def decide(
        self,
        now_s: float,
        demands: Sequence[Demand],
        workers: Sequence[WorkerView],
        wanted: Container[str] = frozenset(),
        asks_s: AskRate = nobody_asks,
    ) -> list[LoadDecision]:
        """Loads to start now. `demands` come in the order in which they should be served.

        Models that are `wanted` by somebody are not idle, whatever a worker says.
        """
        by_id = {worker.worker_id: worker for worker in workers}
        self.drop_claims(
            now_s, lambda w, model_id: by_id[w].state(model_id) if w in by_id else None
        )
        claimed = self._claimed_bytes(by_id)
        rooms = [
            WeightRoom(worker, claimed.get(worker.worker_id, 0), wanted, asks_s)
            for worker in workers
        ]
        self._outlooks = {}
        buckets: dict[str, Bucket] = {}
        decisions = []
        for demand in demands:
            if demand.model_id in self._claims:
                continue
            decision = self._place(now_s, demand, rooms, buckets, asks_s)
            if decision is not None:
                decisions.append(decision)
        return decisions

    def claim(
        self, now_s: float, demand: Demand, workers: Sequence[WorkerView]
    ) -> LoadDecision | None:
        """An operator's request: place it now, whatever the share; None where it cannot be."""
        options = [w for w in workers if w.may_load(demand, and_failed=True)]
        if not options or any(w.has(demand.model_id) for w in workers):
            return None
        worker = max(options, key=lambda w: (_idle_room(w, demand.model_id), w.worker_id))
        return self._claim(
            now_s, WeightRoom(worker, 0, frozenset(), nobody_asks), demand, "operator"
        )

    def drop_claims(self, now_s: float, state_of: Callable[[str, str], str | None]) -> None:
        """End those that are done or too old. `state_of(worker, model)`: None: no such worker."""
        for model_id, claim in list(self._claims.items()):
            state = state_of(claim.worker_id, model_id)
            if state in (None, "resident", "failed") or now_s >= claim.expires_s:
                del self._claims[model_id]
                if state not in (None, "resident", "failed", "loading"):
                    self._budget.call_off(claim.worker_id, model_id, now_s)

    def loaded(self, worker_id: str, model_id: str, took_s: float, now_s: float) -> None:
        """A load has ended: the budget is charged what it took, not what was expected."""
        took_s = took_s if 0 <= took_s < math.inf else 0.0
        self._budget.settle(worker_id, model_id, took_s, now_s)

    def lose_worker(self, worker_id: str) -> None:
        """Its claims are void."""
        self._claims = {m: c for m, c in self._claims.items() if c.worker_id != worker_id}
        self._budget.forget([worker_id])

    def claimed_on(self, model_id: str) -> str | None:
        """The worker that is to load the model, if a claim stands."""
        claim = self._claims.get(model_id)
        return None if claim is None else claim.worker_id

    def claimed(self, model_id: str, now_s: float) -> Outlook | None:
        """When the claimed load is expected to end; None where no claim stands."""
        claim = self._claims.get(model_id)
        if claim is None:
            return None
        sure, there_s = self._budget.is_sure(claim.worker_id), max(now_s, claim.ready_s)
        return Outlook(model_id, there_s, worker_id=claim.worker_id, load_s=claim.load_s, sure=sure)

    @property
    def is_busy(self) -> bool:
        """Whether any claim stands."""
        return bool(self._claims)

    def _claimed_bytes(self, by_id: Mapping[str, WorkerView]) -> dict[str, int]:
        """By worker: what its claims have been promised and have not got."""
        claimed: dict[str, int] = {}
        for model_id, claim in self._claims.items():
            view = by_id.get(claim.worker_id)
            model = None if view is None else view.models.get(model_id)
            held = 0 if model is None else model.held_bytes
            missing = max(0, claim.weight_bytes - held)
            claimed[claim.worker_id] = claimed.get(claim.worker_id, 0) + missing
        return claimed

    def _place(
        self,
        now_s: float,
        demand: Demand,
        rooms: Sequence[WeightRoom],
        buckets: dict[str, Bucket],
        asks_s: AskRate,
    ) -> LoadDecision | None:
        model_id = demand.model_id
        options = [(room, room.view.model(demand)) for room in rooms if room.may_load(demand)]
        copies = sum(room.view.has(model_id) for room in rooms)
        if not options:
            if not copies:
                leaving = any(room.view.state(model_id) == "draining" for room in rooms)
                reason: Reason = "other loads in progress" if leaving else "not enough memory"
                reason = reason if rooms else "no worker connected"
                self._outlooks[model_id] = Outlook(model_id, math.inf, reason)
            return None
        load_s = min(load_seconds(model) for _, model in options)
        if copies and (demand.backlog_s / copies <= load_s or not demand.num_waiting):
            return None
        # A warm copy loads sooner than a cold one; then the emptier worker.
        options.sort(key=lambda o: (o[1].state != "warm", -o[0].free_bytes, o[0].view.worker_id))
        for room, model in options:
            if room.free_bytes >= model.weight_bytes:
                return self._claim(now_s, room, demand, "replica" if copies else "free memory")
        turns = []
        for place, (room, model) in enumerate(options):
            pushed = room.push_out(demand, self._max_load_share)
            if pushed is not None and not pushed.num_in_demand:
                reason = "replica" if copies else "idle models evicted"
                return self._claim(now_s, room, demand, reason)
            gain = asks_s(model_id) * load_seconds(model)
            if pushed is not None and not copies and gain > MARGIN * pushed.worth:
                return self._claim(now_s, room, demand, "higher value")
            if not copies and demand.num_waiting:
                turns.append(self._turn(now_s, demand, room, model, pushed, place, buckets))
        if not turns:
            if not copies:
                self._outlooks[model_id] = Outlook(model_id, math.inf, "not enough memory")
            return None  # a replica, or a pin nobody waits for, pushes nobody out
        turn = min(turns, key=lambda t: (t.start_s, t.loss_s, t.place))
        return self._take(now_s, demand, turn, buckets)

    def _turn(
        self,
        now_s: float,
        demand: Demand,
        room: WeightRoom,
        model: ModelView,
        pushed: PushedOut | None,
        place: int,
        buckets: dict[str, Bucket],
    ) -> _Turn:
        """When the load may begin there against models in demand."""
        worker_id = room.view.worker_id
        loss_s = math.inf if pushed is None else pushed.loss_s
        rests = pushed is not None and not pushed.num_used
        gathered_s = now_s if rests else self._gathered_s(now_s, demand, loss_s)
        moved_s = self._moved_s(now_s, room.view)
        bucket = buckets.get(worker_id) or self._budget.bucket(worker_id, now_s)
        charge_s = self._budget.charge_s(worker_id, load_seconds(model))
        afforded_s = bucket.ready_s(charge_s, max(now_s, bucket.at_s))
        waits: list[tuple[float, Reason]] = [
            (afforded_s, "load budget used up"),
            (moved_s, "other loads in progress"),
            (gathered_s, "too few requests waiting"),
        ]
        start_s, reason = max(waits, key=lambda wait: wait[0])
        return _Turn(start_s, loss_s, place, room, model, reason, rests, gathered_s, bucket)

    def _take(
        self, now_s: float, demand: Demand, turn: _Turn, buckets: dict[str, Bucket]
    ) -> LoadDecision | None:
        """Begin the load, or say when. What is due keeps its place before all behind it."""
        load_s, worker_id = load_seconds(turn.model), turn.room.view.worker_id
        charge_s = self._budget.charge_s(worker_id, load_s)
        if turn.gathered_s <= now_s:
            buckets[worker_id] = turn.bucket.taken(charge_s, turn.start_s)
        if turn.start_s > now_s:
            self._outlooks[demand.model_id] = Outlook(
                demand.model_id,
                turn.start_s + load_s,
                turn.reason,
                turn.start_s,
                worker_id,
                load_s,
                self._budget.is_sure(worker_id),
            )
            return None
        self._budget.take(worker_id, demand.model_id, charge_s, now_s)
        reason: Reason = "next in line"
        if self._gather_wait_s > 0:
            overdue = now_s - demand.oldest_s >= self._gather_wait_s
            reason = "maximum wait reached" if overdue else "enough requests waiting"
            reason = "inactive models evicted" if turn.rests else reason
        return self._claim(now_s, turn.room, demand, reason, forced=True)

    def _gathered_s(self, now_s: float, demand: Demand, loss_s: float) -> float:
        """When waiting for more tickets ends, if no more come."""
        if self._gather_wait_s <= 0 or not demand.num_waiting:
            return now_s
        pays_s = now_s + (loss_s - demand.waited_s) / demand.num_waiting
        due_s = min(pays_s, demand.oldest_s + self._gather_wait_s)
        return due_s if due_s > now_s + EPSILON_S else now_s

    def _moved_s(self, now_s: float, view: WorkerView) -> float:
        """When the forced load, or the drain, under way there is expected to be through."""
        ends = [
            claim.ready_s
            for claim in self._claims.values()
            if claim.forced and claim.worker_id == view.worker_id
        ]
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
        forced: bool = False,
    ) -> LoadDecision:
        worker, model = room.view, room.view.model(demand)
        load_s = load_seconds(model)
        # Loads of one worker share its way to the disk: one after the other, as seen from here.
        before = [c.ready_s for c in self._claims.values() if c.worker_id == worker.worker_id]
        self._claims[demand.model_id] = _Claim(
            worker.worker_id,
            now_s + max(MIN_CLAIM_S, CLAIM_LOADS * load_s),
            model.weight_bytes,
            max([now_s, *before]) + load_s,
            load_s,
            forced,
        )
        room.claimed_bytes += model.weight_bytes
        return LoadDecision(
            demand.model_id,
            worker.worker_id,
            reason,
            forced=forced,
            waited_s=max(0.0, now_s - demand.oldest_s) if demand.num_waiting else 0.0,
            backlog_s=demand.backlog_s,
            load_s=load_s,
            num_waiting=demand.num_waiting,
        )


def relieve(
    workers: Sequence[WorkerView],
    now_s: float,
    wanted: Container[str] = frozenset(),
    asks_s: AskRate = nobody_asks,
) -> list[LoadDecision]:
    """Idle models that should make room for others' KV; one a worker, and none while one moves.

    The one whose way back costs least for what it holds, at the rate it is asked for; of those that
    nobody asks for, the longest idle.
    """
    decisions = []
    for worker in workers:
        if not worker.kv_short or worker.is_moving:
            continue
        idle = [
            (
                asks_s(model_id) * load_seconds(model) / max(1, model.weight_bytes),
                model.idle_since_s,
                model_id,
            )
            for model_id, model in worker.models.items()
            if model.state == "resident"
            and model.idle
            and model_id not in wanted
            and now_s - model.idle_since_s >= MIN_IDLE_S
        ]
        if idle:
            decisions.append(LoadDecision(min(idle)[2], worker.worker_id, "kv"))
    return decisions


def unplaceable(weight_bytes: int, largest_arena_bytes: int) -> str | None:
    """Why no worker could ever hold a model; None if some could, or nothing is known (0)."""
    if not largest_arena_bytes or weight_bytes < largest_arena_bytes:
        return None
    return (
        f"its weights take {weight_bytes} bytes, more than the largest device budget of "
        f"{largest_arena_bytes} bytes"
    )


def _idle_room(worker: WorkerView, model_id: str) -> int:
    """Free bytes and those of idle models other than this one."""
    return worker.free_bytes + sum(
        model.weight_bytes
        for name, model in worker.models.items()
        if model.idle and model.state == "resident" and name != model_id
    )
