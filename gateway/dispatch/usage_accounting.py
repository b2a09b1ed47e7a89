"""What requests have used, charged while they run.

`UsageAccounting` stands between what workers say (service so far with each status, all of it with a
request's end, loads that have ended) and the fair order, which knows charges only. The arithmetic
of loads is policy/service_costs.py's, whose turn it is policy/fair_share.py's.

    tenants' device_s + the system's = time of the devices, as far as workers have reported it

The system's account has here what was computed for attempts that came to nothing and for requests
that nobody waits for any more, and on the worker (its counters) what was computed twice or for
nobody. A figure that is no time (not finite, or below 0) is counted and taken for nothing: one of
them in a tenant's counter would stay there for good. What a worker did after its last status and
before it died nobody knows.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from engine.protocol import RequestService, Usage, WorkerStatus
from gateway.dispatch.lanes import Lanes, flow_of, tenant_of
from gateway.dispatch.policy.fair_share import NOTHING, UsedService
from gateway.dispatch.policy.service_costs import LoadCosts, Residency, Transfer, units_of
from gateway.dispatch.tickets import Ticket
from gateway.protocols import Accounts
from gateway.types import HostedModel

MAX_BOOKED = 10_000
"""Attempts that left their worker, whose end may be reported again; the oldest are forgotten."""


class UsageAccounting:
    """What is charged goes through here and nowhere else."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._pack_of: dict[str, str] = {}
        self._names_of: dict[str, list[str]] = {}
        self._loaded_s: dict[str, float] = {}  # when the last load ended, by worker
        self.loads = LoadCosts()
        self.service_s: dict[str, float] = {}
        self.device_s: dict[str, float] = {}
        """By tenant, of requests that have ended."""
        self._booked_s: OrderedDict[tuple[str, int], float] = OrderedDict()  # of what has left
        self.num_unsound = 0
        """Figures of workers that were no times."""
        self.failed_s = 0.0
        """The system's: device time of attempts that came to nothing or that nobody waited for."""

    def set_models(self, models: Iterable[HostedModel]) -> None:
        """Models of one pack are loaded together."""
        self._pack_of = {model.name: model.pack_dir for model in models}
        self._names_of = {}
        for name, pack in self._pack_of.items():
            self._names_of.setdefault(pack, []).append(name)

    def accounts(self) -> Accounts:
        """For metrics."""
        loads, charged_s = self.loads, dict[str, float]()
        for flow, service_s in loads.charged_s.items():
            _add(charged_s, tenant_of(flow), service_s)
        return Accounts(self.device_s, charged_s, self.failed_s, loads.system_s, self.num_unsound)

    # Requests.

    def grant(self, ticket: Ticket) -> None:
        """Count at once what the ticket is predicted to use."""
        prediction = ticket.prediction
        ticket.reported, ticket.reported_device_s, ticket.load_s = NOTHING, 0.0, 0.0
        ticket.expected = UsedService(prediction.service_s, prediction.units)
        self._lanes.of(ticket).share.expect(ticket.tenant_id, ticket.expected)

    def progress(self, ticket: Ticket, so_far: RequestService) -> None:
        """It has had so much and goes on."""
        units = 0.0
        if ticket.num_tokens:  # an earlier attempt's were given back, and its tokens are not lost
            num_tokens = ticket.num_before + ticket.num_tokens
            units = units_of(ticket.request.num_prompt_tokens, num_tokens)
        service_s = self._sound(so_far.service_s, ticket.reported.service_s)
        device_s = self._sound(so_far.device_s, ticket.reported_device_s)
        self._true_up(ticket, UsedService(service_s, units), device_s)

    def end(self, ticket: Ticket, usage: Usage) -> None:
        """It is on no worker any more, and has used all this."""
        units = units_of(usage.prompt_tokens - usage.cached_tokens, usage.generated_tokens)
        service_s = self._sound(usage.service_s, ticket.reported.service_s)
        device_s = self._sound(usage.device_s, ticket.reported_device_s)
        self._true_up(ticket, UsedService(service_s, units), device_s)
        self._lanes.of(ticket).share.settle(ticket.tenant_id, ticket.expected)
        _add(self.service_s, ticket.tenant_id, service_s)
        _add(self.device_s, ticket.tenant_id, device_s)
        self._note(ticket.key, device_s)

    def fail(self, ticket: Ticket, device_s: float = 0.0) -> None:
        """The attempt came to nothing: the tenant gets back what it was charged."""
        had, share = ticket.reported, self._lanes.of(ticket).share
        if had != NOTHING:
            share.charge(ticket.tenant_id, UsedService(-had.service_s, -had.units))
        share.settle(ticket.tenant_id, ticket.expected)
        device_s = max(self._sound(device_s), ticket.reported_device_s)
        self.failed_s += device_s
        self._note(ticket.key, device_s)

    def late(self, key: tuple[str, int], usage: Usage) -> None:
        """A request has ended that nobody here waits for, or its end is reported again: workers do
        so after every Hello. What has been booked of it before is not booked twice."""
        booked_s = self._booked_s.get(key, 0.0)
        device_s = max(booked_s, self._sound(usage.device_s))
        self.failed_s += device_s - booked_s
        self._note(key, device_s)

    def _sound(self, seconds: float, known_s: float = 0.0) -> float:
        """A worker's figure, or what was known before where it is no time."""
        if 0.0 <= seconds < math.inf:
            return seconds
        self.num_unsound += 1
        return known_s

    def _note(self, key: tuple[str, int], device_s: float) -> None:
        self._booked_s[key] = device_s
        if len(self._booked_s) > MAX_BOOKED:
            self._booked_s.popitem(last=False)

    def _true_up(self, ticket: Ticket, total: UsedService, device_s: float) -> None:
        """Charges take the place of the prediction, as far as that goes."""
        had, left = ticket.reported, ticket.expected
        more = UsedService(total.service_s - had.service_s, total.units - had.units)
        covered = UsedService(
            min(left.service_s, max(0.0, more.service_s)), min(left.units, max(0.0, more.units))
        )
        self._lanes.of(ticket).share.charge(ticket.tenant_id, more, covered)
        ticket.expected = UsedService(
            left.service_s - covered.service_s, left.units - covered.units
        )
        ticket.reported, ticket.reported_device_s = total, device_s
        residency = self._residency(ticket.worker_id, ticket.model_name)
        owed_s = self.loads.owed_s(residency)
        self._transfer(self.loads.use(residency, flow_of(ticket), more.service_s))
        ticket.load_s += owed_s - self.loads.owed_s(residency)

    # Loads.

    def owes_load(self, worker_id: str, model_name: str) -> bool:
        """Whether who uses the model there bears some of its load."""
        return self.loads.owed_s(self._residency(worker_id, model_name)) > 0

    def status(self, worker_id: str, status: WorkerStatus, now_s: float) -> None:
        """Loads that have begun, ended, or come to nothing; models that have left."""
        for swap in status.swaps:
            residency = self._residency(worker_id, swap.model_id)
            if swap.kind == "evict":
                self.loads.end(residency)
            else:
                backlog_s = {} if self.loads.is_known(residency) else self._backlog_s(residency)
                # Loads go one after the other: waiting for another one's is no load.
                since_s = now_s - self._loaded_s.get(worker_id, -math.inf)
                took_s = min(self._sound(swap.duration_s), since_s)
                self._loaded_s[worker_id] = now_s
                self._transfer(self.loads.finish(residency, took_s, backlog_s))
        loading = {
            self._residency(worker_id, row.model_id)
            for row in status.models
            if row.state == "loading"
        }
        self.loads.keep_under_way(worker_id, loading)
        for residency in loading:
            if not self.loads.is_known(residency):
                self.loads.begin(residency, self._backlog_s(residency))

    def _residency(self, worker_id: str, model_name: str) -> Residency:
        return worker_id, self._pack_of.get(model_name, model_name)

    def _backlog_s(self, residency: Residency) -> Mapping[str, float]:
        """Predicted service that waits for the pack, by tenant and lane."""
        backlog_s: dict[str, float] = {}
        for name in self._names_of.get(residency[1], ()):
            for lane in self._lanes:
                for ticket in lane.queue.of_model(name):
                    _add(backlog_s, flow_of(ticket), ticket.prediction.service_s)
        return backlog_s

    def _transfer(self, transfers: Sequence[Transfer]) -> None:
        for flow, service_s in transfers:
            self._lanes.charge(flow, UsedService(service_s))


def _add(sums: dict[str, float], name: str, value: float) -> None:
    sums[name] = sums.get(name, 0.0) + value
