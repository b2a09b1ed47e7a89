"""What may come into the fair queue, and as what: bounds, new tickets, the wait that is told.

Stage 5's door. Whose turn it is later is policy/fair_share.py's, the tickets' life dispatcher.py's.
"""

from collections.abc import Callable

from gateway.dispatch.decisions import DecisionLog, DecisionRecord
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.running import RequestStream
from gateway.dispatch.tickets import Ticket, TicketQueue
from gateway.errors import QUEUE_FULL, UNAVAILABLE, ApiError
from gateway.policy.reasons import Figures, Reason
from gateway.policy.service_estimate import Prediction, ServiceEstimator, estimate_wait_s
from gateway.settings import Settings
from gateway.types import Asked, PreparedRequest, Principal

_PLACES = 1 << 20
"""So many requests may have come in one microsecond and keep places of their own."""


class Admission:
    """Makes tickets, and refuses them where a bound bites."""

    def __init__(
        self,
        settings: Settings,
        queue: TicketQueue,
        fleet: Fleet,
        estimator: ServiceEstimator,
        decisions: DecisionLog,
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._fleet = fleet
        self._estimator = estimator
        self._decisions = decisions
        self._last_seq = 0
        self.num_rejections = 0

    def check_bounds(self, tenant_id: str, model_name: str, now_s: float) -> None:
        """Raises QUEUE_FULL, with the estimated wait, where the queue takes no more of it."""
        mine, all_ = self._queue.num_of_tenant(tenant_id), len(self._queue)
        settings = self._settings
        if mine < settings.max_queue_per_tenant and all_ < settings.max_queue_total:
            return
        self.num_rejections += 1
        own = mine >= settings.max_queue_per_tenant
        wait_s = self.wait_estimate_s()
        limit = settings.max_queue_per_tenant if own else settings.max_queue_total
        figures = Figures(
            num_waiting=mine if own else all_, queue_limit=limit, retry_after_s=wait_s
        )
        reason: Reason = "tenant queue full" if own else "queue full"
        self._decisions.add(
            DecisionRecord(now_s, "refusal", reason, model_name, "", figures, tenant_id)
        )
        whose = "your tenant" if own else "this server"
        raise ApiError(
            QUEUE_FULL,
            f"the queue of {whose} is full ({mine} of yours wait, {all_} in all): try later",
            retry_after_s=wait_s,
        )

    def wait_estimate_s(self) -> float:
        """Seconds until the queue as it stands is worked off."""
        longest_s = self._settings.queue_timeout_s
        return estimate_wait_s(self._queue.backlog_s, len(self._fleet), longest_s)

    def timed_out(self, waited_s: float, load_eta_s: float | None) -> ApiError:
        """What a request is answered that has waited for too long. `load_eta_s`: its model's."""
        message = f"no worker could take the request within {waited_s:.0f} s: try again later"
        wait_s = max(1.0, load_eta_s) if load_eta_s else self.wait_estimate_s()
        return ApiError(UNAVAILABLE, message, retry_after_s=wait_s)

    def new_ticket(
        self,
        request: PreparedRequest,
        principal: Principal,
        now_s: float,
        clock: Callable[[], float],
        abort: Callable[[Ticket], None],
    ) -> tuple[Ticket, RequestStream]:
        """A waiting ticket with its stream, in no queue yet. `abort` is what its reader may ask."""

        def queue_s() -> float:
            until_s = clock() if ticket.granted_s is None else ticket.granted_s
            return until_s - ticket.arrival_s

        self._last_seq += 1
        stream = RequestStream(
            self._settings.max_stream_buffer_tokens,
            on_abort=lambda: abort(ticket),
            queue_s=queue_s,
        )
        ticket = Ticket(
            request=request,
            tenant_id=principal.tenant_id,
            weight=principal.weight,
            seq=self._last_seq,
            arrival_s=now_s,
            deadline_s=now_s + self._settings.queue_timeout_s,
            ends_by_s=now_s + self._settings.request_timeout_s,
            prediction=self.predict(request, principal.tenant_id),
            stream=stream,
        )
        return ticket, stream

    def place_of(self, arrival_s: float) -> int:
        """The order of arrival of a request that came to another process, perhaps long ago."""
        self._last_seq += 1
        return int(arrival_s * 1e6) * _PLACES + self._last_seq % _PLACES

    def predict(self, request: Asked, tenant_id: str) -> Prediction:
        """What it will use, as far as is known now."""
        return self._estimator.predict(
            tenant_id, request.model.name, request.num_prompt_tokens, request.max_tokens
        )
