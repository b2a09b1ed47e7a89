"""What may come into the fair queue, and as what: bounds, new tickets, the wait that is told.

Stage 5's door. Whose turn it is later is policy/fair_share.py's, the tickets' life dispatcher.py's.
"""

from collections.abc import Callable

from gateway.decisions import DecisionLog, DecisionRecord
from gateway.errors import QUEUE_FULL, UNAVAILABLE, ApiError
from gateway.fleet import Fleet
from gateway.policy.reasons import Figures, Reason
from gateway.policy.service_estimate import ServiceEstimator, estimate_wait_s
from gateway.running import RequestStream
from gateway.settings import Settings
from gateway.tickets import Ticket, TicketQueue
from gateway.types import PreparedRequest, Principal


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
        self._next_seq = 0
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
    ) -> Ticket:
        """A waiting ticket with its stream, in no queue yet. `abort` is what its reader may ask."""

        def queue_s() -> float:
            until_s = clock() if ticket.granted_s is None else ticket.granted_s
            return until_s - ticket.arrival_s

        self._next_seq += 1
        stream = RequestStream(
            self._settings.max_stream_buffer_tokens,
            on_abort=lambda: abort(ticket),
            queue_s=queue_s,
        )
        ticket = Ticket(
            request=request,
            tenant_id=principal.tenant_id,
            weight=principal.weight,
            seq=self._next_seq,
            arrival_s=now_s,
            deadline_s=now_s + self._settings.queue_timeout_s,
            ends_by_s=now_s + self._settings.request_timeout_s,
            prediction=self._estimator.predict(
                principal.tenant_id,
                request.model.name,
                len(request.prompt_token_ids),
                request.max_tokens,
            ),
            stream=stream,
        )
        return ticket
