"""What one worker can still take, as of now: its last status less the grants still under way.

A status names the Submits that have come since the one before (`taken`); grants of which that has
not been said yet are not in its figures and are subtracted here, from the model's lease and from
what all leases share. A status too old (`lease_ttl_s`) offers nothing. A model the worker refused
offers nothing until the next status, so that a refusal is not asked for again at once.

For requests of class batch a worker offers what it does not run of them yet; for all others its
figures, and those here, are as if there were none of that class, because they give way.

One rule goes beyond the lease: a model that has nothing on the worker may send one request that
could be held there once all others had left, whatever the KV figures say. Otherwise a request
larger than what is free beside other models would wait for ever. What no worker that offers the
model could ever hold is refused by one of them: `may_refuse`. Where KV memory is short, `view` says
so, and placement has idle models make room.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.protocol import Lease, ModelStatus, WorkerStatus
from gateway.dispatch.policy.fleet_view import ModelView, WorkerView
from gateway.dispatch.policy.kept_worker import lacking_lifetimes
from gateway.dispatch.policy.relief import IdleCopy
from gateway.dispatch.tickets import IntegrityError, Ticket
from gateway.dispatch.worker_room import Room
from gateway.types import HostedModel


@dataclass(frozen=True, slots=True)
class Changes:
    """What a status brought: other models on offer, other states of models."""

    offers: bool
    states: bool


class _Grant(NamedTuple):
    model_id: str
    kv_tokens: int
    kv_bytes: int
    is_batch: bool


class _UnderWay(NamedTuple):
    """Grants that no status knows of yet, of one model."""

    num_requests: int
    kv_tokens: int


class _BatchUnderWay(NamedTuple):
    """The same of class batch, of all models."""

    num_requests: int
    kv_bytes: int


_NOTHING = _UnderWay(0, 0)


class WorkerCapacity:
    """One connection to one worker process (one epoch). A new epoch gets a new object."""

    def __init__(self, worker_id: str, epoch: str, now_s: float) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.status: WorkerStatus | None = None
        self.takes_loads = self.takes_requests = True
        """Not where the worker leaves: worker_drains.py."""
        self.pinned: frozenset[str] = frozenset()
        """Models that do not leave the worker once they are there."""
        self._connected_s = now_s
        self._received_s = now_s
        self._leases: dict[str, Lease] = {}
        self._models: dict[str, ModelStatus] = {}
        self._in_flight: dict[tuple[str, int], _Grant] = {}  # by the names of the requests
        # Sums of `_in_flight`: by model of those not of class batch, and of those of that class.
        self._under_way: dict[str, _UnderWay] = {}
        self._kv_bytes_under_way = 0
        self._batch_under_way = _BatchUnderWay(0, 0)
        self._kv_bytes_used = 0  # as of the last status
        self._unpromised_bytes = 0
        self._resting_bytes: dict[str, int] = {}  # of models that run nothing
        self._num_running: dict[str, int] = {}
        self._num_running_all = 0
        self._num_batch: dict[str, int] = {}  # of these, by model
        self.ahead_s = 0.0
        """Of the device, what requests there were predicted to use when they were granted."""
        self._idle_since_s: dict[str, float] = {}
        self._kv_short = False
        self._view: WorkerView | None = None
        self._hosted: Mapping[str, HostedModel] = {}

    def update(self, status: WorkerStatus, now_s: float) -> Changes:
        """Take in a heartbeat. Says what is not as it was."""
        is_first, self.status = self.status is None, status
        self._received_s = now_s
        before, leased = self._models, self._leases.keys()
        self._leases = {lease.model_id: lease for lease in status.leases}
        self._models = {model.model_id: model for model in status.models}
        self._kv_short = False
        self._view = None
        self._kv_bytes_used = 0
        self._resting_bytes = {}
        self._unpromised_bytes = self.free_kv_bytes()
        for model in status.models:
            busy = model.num_running or model.num_waiting or model.state != "resident"
            self._kv_bytes_used += model.kv_bytes_used
            if not busy:
                self._resting_bytes[model.model_id] = model.weight_bytes
            if model.state == "loading":
                held = status.pages.get(f"{model.model_id}/weights", 0) * status.page_bytes
                self._unpromised_bytes -= max(0, model.weight_bytes - held)
            if busy or model.model_id in self._num_running:
                self._idle_since_s[model.model_id] = now_s
        for key in status.taken:
            self.withdraw(key)
        return Changes(
            offers=is_first or leased != self._leases.keys(),
            states=is_first
            or bool(status.swaps)
            or before.keys() != self._models.keys()
            or any(before[name].state != model.state for name, model in self._models.items()),
        )

    def leased(self, model_id: str, now_s: float) -> bool:
        """Whether the worker offers the model at all, full or not."""
        return model_id in self._leases and self.takes_requests and self.is_fresh(now_s)

    def has_room(self, now_s: float) -> bool:
        """Whether anything at all could be granted."""
        has_room = self.free_requests() > 0 and bool(self._leases)
        return has_room and self.takes_requests and self.is_fresh(now_s)

    def fits(self, ticket: Ticket, now_s: float) -> bool:
        """Whether the ticket may be granted now."""
        lease = self._leases.get(ticket.model_name)
        if lease is None or self.worker_id in ticket.refused_by:
            return False
        if not self._has_slot(lease, now_s):
            return False
        if ticket.is_batch:
            return self._batch_fits(ticket, lease)
        alone = self._num_live(lease.model_id) == 0
        return self._kv_fits(ticket, lease) or (alone and self.can_hold(ticket))

    def may_refuse(self, ticket: Ticket, now_s: float) -> bool:
        """Whether the ticket, which can be held nowhere, may be sent to have the worker say so."""
        lease = self._leases.get(ticket.model_name)
        alone = not self._num_live(ticket.model_name) or self.worker_id in ticket.refused_by
        return alone and lease is not None and self._has_slot(lease, now_s)

    def can_hold(self, ticket: Ticket) -> bool:
        """Whether its KV memory fits beside the weights of its model and of those that are pinned,
        and the worker has not refused it. Its model must be on offer."""
        lease = self._leases.get(ticket.model_name)
        if lease is None or self.status is None or self.worker_id in ticket.refused_by:
            return False
        stay_bytes = sum(
            model.weight_bytes
            for name, model in self._models.items()
            if name == lease.model_id or (name in self.pinned and model.state == "resident")
        )
        room_bytes = self.status.num_pages * self.status.page_bytes - stay_bytes
        return _kv_bytes(_kv_tokens(ticket, lease), lease) <= room_bytes

    def lacks_kv(self, ticket: Ticket, now_s: float) -> bool:
        """Whether KV memory is what the ticket lacks here, and nothing else. What an encoder's
        lease lacks is time; nobody's memory would help."""
        lease = self._leases.get(ticket.model_name)
        if lease is None or ticket.is_batch or not self._has_slot(lease, now_s):
            return False
        return _kv_bytes(_kv_tokens(ticket, lease), lease) > 0 and not self._kv_fits(ticket, lease)

    def note_kv_short(self) -> None:
        """A request that is to run here lacks KV memory: until the next status."""
        self._kv_short = True

    def _has_slot(self, lease: Lease, now_s: float) -> bool:
        under_way = self._under_way.get(lease.model_id, _NOTHING)
        free = min(self.free_requests(), lease.num_requests - under_way.num_requests)
        return free >= 1 and self.is_fresh(now_s)

    def _batch_fits(self, ticket: Ticket, lease: Lease) -> bool:
        """The same for one of class batch, beside those that the worker has: nobody makes room."""
        held_bytes, held_tokens = self._held_by_batch(lease)
        kv_bytes = _kv_bytes(_kv_tokens(ticket, lease), lease)
        if self.free_batch_requests() < 1 or kv_bytes > self.free_kv_bytes() - held_bytes:
            return False
        under_way = self._under_way.get(lease.model_id, _NOTHING)
        left = lease.kv_tokens - under_way.kv_tokens - held_tokens
        return _kv_tokens(ticket, lease) <= left

    def _held_by_batch(self, lease: Lease) -> tuple[int, int]:
        """Of KV memory, and of the lease's tokens, what class batch has or is on its way for."""
        if self.status is None:
            return 0, 0
        num_bytes = self.status.batch_kv_bytes + self._batch_under_way.kv_bytes
        per_token = lease.kv_bytes_per_token
        return num_bytes, num_bytes // per_token if per_token else 0

    def _num_live(self, model_id: str) -> int:
        """Its requests granted to the worker that are not of class batch."""
        return self._num_running.get(model_id, 0) - self._num_batch.get(model_id, 0)

    def _kv_fits(self, ticket: Ticket, lease: Lease) -> bool:
        kv_tokens = _kv_tokens(ticket, lease)
        under_way = self._under_way.get(lease.model_id, _NOTHING)
        in_lease = kv_tokens <= lease.kv_tokens - under_way.kv_tokens
        return in_lease and _kv_bytes(kv_tokens, lease) <= self.free_kv_bytes()

    def room(self, ticket: Ticket, now_s: float) -> Room | None:
        """The figures that `fits` goes by, for explanations; None without a lease."""
        lease = self._leases.get(ticket.model_name)
        if lease is None:
            return None
        under_way = self._under_way.get(lease.model_id, _NOTHING)
        wanted_tokens, is_batch = _kv_tokens(ticket, lease), ticket.is_batch
        held_bytes, held_tokens = self._held_by_batch(lease) if is_batch else (0, 0)
        return Room(
            worker_id=self.worker_id,
            fresh=self.is_fresh(now_s),
            running=self._num_running_all,
            running_model=self._num_live(lease.model_id),
            free_requests=self.free_batch_requests() if is_batch else self.free_requests(),
            leased_requests=lease.num_requests - under_way.num_requests,
            leased_tokens=lease.kv_tokens - under_way.kv_tokens - held_tokens,
            wanted_tokens=wanted_tokens,
            free_kv_bytes=self.free_kv_bytes() - held_bytes,
            wanted_kv_bytes=_kv_bytes(wanted_tokens, lease),
            can_hold=self.can_hold(ticket),
            has_refused=self.worker_id in ticket.refused_by,
            gives_way=is_batch,
        )

    def wanted_kv_bytes(self, ticket: Ticket) -> int | None:
        """KV memory that the ticket takes here at most; None without a lease."""
        lease = self._leases.get(ticket.model_name)
        return None if lease is None else _kv_bytes(_kv_tokens(ticket, lease), lease)

    def lack(self, ticket: Ticket) -> float:
        """How long until it fits here: policy/kept_worker.py. Its model must be on offer."""
        lease = self._leases[ticket.model_name]
        under_way = self._under_way.get(lease.model_id, _NOTHING)
        kv_tokens = _kv_tokens(ticket, lease)
        kv_bytes = _kv_bytes(kv_tokens, lease)
        beyond = max(0, kv_tokens - lease.kv_tokens + under_way.kv_tokens)
        free_requests = min(self.free_requests(), lease.num_requests - under_way.num_requests)
        return lacking_lifetimes(
            1 - free_requests,
            self._num_running_all,
            max(kv_bytes - self.free_kv_bytes(), beyond * lease.kv_bytes_per_token),
            self._kv_bytes_used + self._kv_bytes_under_way,
        )

    def grant(self, ticket: Ticket) -> None:
        """Book a Submit that is being sent."""
        lease = self._leases[ticket.model_name]
        self.withdraw(ticket.key)  # of a request before it with this name, which has ended
        kv_tokens = _kv_tokens(ticket, lease)
        kv_bytes = _kv_bytes(kv_tokens, lease)
        about = (lease.model_id, kv_tokens, kv_bytes, ticket.is_batch)
        self._in_flight[ticket.key] = _Grant(*about)
        if ticket.is_batch:
            num_requests, batch_bytes = self._batch_under_way
            self._batch_under_way = _BatchUnderWay(num_requests + 1, batch_bytes + kv_bytes)
        else:
            under_way = self._under_way.get(lease.model_id, _NOTHING)
            self._under_way[lease.model_id] = _UnderWay(
                under_way.num_requests + 1, under_way.kv_tokens + kv_tokens
            )
            self._kv_bytes_under_way += kv_bytes
        self.adopt(ticket)

    def adopt(self, ticket: Ticket) -> None:
        """A request runs there; what another dispatcher granted, the status counts."""
        model_id = ticket.model_name
        self.ahead_s += ticket.ahead_s
        self._num_running[model_id] = self._num_running.get(model_id, 0) + 1
        self._num_running_all += 1
        if ticket.is_batch:
            self._num_batch[model_id] = self._num_batch.get(model_id, 0) + 1
        self._view = None

    def release(self, ticket: Ticket, now_s: float) -> None:
        """A granted request ended or came back."""
        model_id = ticket.model_name
        self._view = None
        self._idle_since_s[model_id] = now_s
        self._num_running[model_id] -= 1
        self._num_running_all -= 1
        self.ahead_s = max(0.0, self.ahead_s - ticket.ahead_s) if self._num_running_all else 0.0
        if ticket.is_batch:
            self._num_batch[model_id] -= 1
        if not self._num_running[model_id]:
            del self._num_running[model_id]
            self._num_batch.pop(model_id, None)

    def refuse(self, key: tuple[str, int], model_id: str) -> None:
        """The worker did not take this Submit: nothing more for the model until it says so."""
        self._leases.pop(model_id, None)
        self._view = None
        self.withdraw(key)

    def withdraw(self, key: tuple[str, int]) -> None:
        """This Submit is not on its way any more."""
        grant = self._in_flight.pop(key, None)
        if grant is not None:
            self._arrived(grant)

    def free_requests(self) -> int:
        """Requests of any model that it takes beside those granted."""
        if self.status is None:
            return 0
        num_batch = self._batch_under_way.num_requests
        return self.status.free_requests - len(self._in_flight) + num_batch

    def free_batch_requests(self) -> int:
        """Of these, what it takes of class batch beside those that it has."""
        if self.status is None:
            return 0
        num_batch = self._batch_under_way.num_requests + self.status.batch_requests
        return self.free_requests() - num_batch

    def free_kv_bytes(self) -> int:
        """KV memory that no grant has been promised."""
        if self.status is None:
            return 0
        return self.status.free_kv_bytes - self._kv_bytes_under_way

    @property
    def has_work(self) -> bool:
        """Whether it says itself that something runs or waits there."""
        return any(model.num_running or model.num_waiting for model in self._models.values())

    @property
    def running(self) -> Mapping[str, int]:
        """By model: requests granted to the worker that have not ended."""
        return self._num_running

    def num_running(self) -> int:
        """Requests granted to the worker that have not ended."""
        return self._num_running_all

    def num_batch(self) -> int:
        """Of these, those of class batch."""
        return sum(self._num_batch.values())

    @property
    def offers(self) -> Iterable[str]:
        """Models with a lease, whatever is left of it."""
        return self._leases.keys()

    @property
    def failures(self) -> Iterator[ModelStatus]:
        """Models that failed there, as of the last status."""
        return (model for model in self._models.values() if model.state == "failed")

    @property
    def is_kv_short(self) -> bool:
        """A request that is to run there lacked KV memory since the last status."""
        return self._kv_short

    def model(self, model_id: str) -> ModelStatus | None:
        """What the last status said of the model; nothing is said of cold ones."""
        return self._models.get(model_id)

    def state(self, model_id: str) -> str:
        """The model's residency there, as of the last status."""
        model = self._models.get(model_id)
        return "cold" if model is None else model.state

    def states(self) -> dict[str, str]:
        """Of all models that are not cold, as of the last status."""
        return {name: model.state for name, model in self._models.items()}

    def idle_copy(self, model_id: str) -> IdleCopy | None:
        """The model here, where it is resident and runs nothing."""
        model = self._models.get(model_id)
        if model is None or model.state != "resident" or self._is_at_work(model):
            return None
        since_s = self._idle_since_s.get(model_id, self._connected_s)
        free_share = 0.0
        if self.status is not None and not self._kv_short:
            arena_bytes = max(1, self.status.num_pages * self.status.page_bytes)
            free_share = self.free_kv_bytes() / arena_bytes
        return IdleCopy(self.worker_id, since_s, max(0.0, model.load_s_estimate), free_share)

    def _is_at_work(self, model: ModelStatus) -> bool:
        return bool(model.num_running or model.num_waiting or self._num_running.get(model.model_id))

    def _is_live(self, model: ModelStatus) -> bool:
        """Whether requests of other classes than batch run or wait there."""
        num_requests = model.num_running + model.num_waiting - model.num_batch
        return num_requests > 0 or self._num_live(model.model_id) > 0

    def room_bytes(self) -> tuple[int, int]:
        """Free bytes that no load on its way has been promised, and these with the weights of idle
        models that are not pinned."""
        resting = self._resting_bytes.items()
        rest = sum(num_bytes for name, num_bytes in resting if name not in self.pinned)
        return self._unpromised_bytes, self._unpromised_bytes + rest

    def view(self, hosted: Mapping[str, HostedModel]) -> WorkerView | None:
        """The worker as placement sees it; None before its first status. Kept until it changes, or
        another catalog comes."""
        if self.status is None:
            return None
        if self._view is None or hosted is not self._hosted:
            self._view, self._hosted = self._look(self.status, hosted), hosted
        if self._view.kv_short != self._kv_short:
            self._view = replace(self._view, kv_short=self._kv_short)
        return self._view

    def _look(self, status: WorkerStatus, hosted: Mapping[str, HostedModel]) -> WorkerView:
        models = {}
        for model in status.models:
            name = model.model_id
            is_pinned, known = name in self.pinned, hosted.get(name)
            models[name] = ModelView(
                model.state,
                model.weight_bytes,
                model.load_s_estimate,
                not (is_pinned or self._is_live(model)),
                self._idle_since_s.get(name, self._connected_s),
                is_pinned,
                status.pages.get(f"{name}/weights", 0) * status.page_bytes,
                () if known is None else known.floors,
                bool(model.num_batch or self._num_batch.get(name)),
            )
        return WorkerView(
            worker_id=self.worker_id,
            free_bytes=max(0, self.free_kv_bytes()),
            arena_bytes=status.num_pages * status.page_bytes,
            models=models,
            kv_short=self._kv_short,
            cold_bytes_per_s=status.cold_bytes_per_s,
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the grants under way are counted and running."""
        sums: dict[str, _UnderWay] = {}
        live = [grant for grant in self._in_flight.values() if not grant.is_batch]
        batch = [grant for grant in self._in_flight.values() if grant.is_batch]
        for grant in live:
            so_far = sums.get(grant.model_id, _NOTHING)
            sums[grant.model_id] = _UnderWay(
                so_far.num_requests + 1, so_far.kv_tokens + grant.kv_tokens
            )
        if sums != self._under_way or self._kv_bytes_under_way != sum(
            grant.kv_bytes for grant in live
        ):
            raise IntegrityError(f"worker {self.worker_id}: under way {self._under_way}")
        if self._batch_under_way != (len(batch), sum(grant.kv_bytes for grant in batch)):
            raise IntegrityError(f"worker {self.worker_id}: of batch {self._batch_under_way}")
        if self._num_running_all != sum(self._num_running.values()) or any(
            count < 1 for count in self._num_running.values()
        ):
            raise IntegrityError(f"worker {self.worker_id}: running {self._num_running}")

    def _arrived(self, grant: _Grant) -> None:
        """The worker has it, or has refused it."""
        if grant.is_batch:
            num_requests, batch_bytes = self._batch_under_way
            self._batch_under_way = _BatchUnderWay(num_requests - 1, batch_bytes - grant.kv_bytes)
            return
        under_way = self._under_way[grant.model_id]
        if under_way.num_requests == 1:
            del self._under_way[grant.model_id]
        else:
            self._under_way[grant.model_id] = _UnderWay(
                under_way.num_requests - 1, under_way.kv_tokens - grant.kv_tokens
            )
        self._kv_bytes_under_way -= grant.kv_bytes

    def is_fresh(self, now_s: float) -> bool:
        """Whether it was heard of lately."""
        return self.status is not None and now_s - self._received_s <= self.status.lease_ttl_s


def _kv_tokens(ticket: Ticket, lease: Lease) -> int:
    """What the ticket takes of the lease: whole blocks."""
    return -(-ticket.kv_tokens // lease.block_tokens) * lease.block_tokens


def _kv_bytes(kv_tokens: int, lease: Lease) -> int:
    """Memory of a request of so many tokens: KV, and states that do not grow with them."""
    return kv_tokens * lease.kv_bytes_per_token + lease.kv_bytes_per_sequence
