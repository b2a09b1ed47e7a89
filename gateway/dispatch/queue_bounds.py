"""How much may wait, and how long that is expected to take (stage 5)."""

from collections.abc import Callable

from gateway.dispatch.decisions import DecisionLog, DecisionRecord
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.policy.reasons import DecisionFigures, Reason
from gateway.dispatch.policy.service_costs import estimate_wait_s
from gateway.dispatch.ticket_queue import TicketQueue
from gateway.errors import QUEUE_FULL, ApiError
from gateway.settings.settings import QueueSettings


class QueueBounds:
    """One dispatcher's. The bound of all tenants is for each connected worker."""

    def __init__(
        self,
        settings: QueueSettings,
        queue: TicketQueue,
        fleet: Fleet,
        decisions: DecisionLog,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._fleet = fleet
        self._decisions = decisions
        self._clock = clock
        self.num_rejections = 0

    def check(self, tenant_id: str, model_name: str) -> None:
        """Raises QUEUE_FULL, with the estimated wait, where the queue takes no more of it."""
        mine, all_ = self._queue.num_of_tenant(tenant_id), len(self._queue)
        settings = self._settings
        most = settings.max_queue_total * max(1, len(self._fleet))
        own = mine >= settings.max_queue_per_tenant
        if not own and all_ < most:
            return
        self.num_rejections += 1
        wait_s = self.wait_estimate_s(model_name)
        figures = DecisionFigures(
            num_waiting=mine if own else all_,
            queue_limit=settings.max_queue_per_tenant if own else most,
            retry_after_s=wait_s,
        )
        reason: Reason = "tenant queue full" if own else "queue full"
        about = (model_name, "", figures, tenant_id)
        self._decisions.add(DecisionRecord(self._clock(), "refusal", reason, *about))
        raise ApiError(
            QUEUE_FULL,
            f"the queue of {'your tenant' if own else 'this server'} is full ({mine} requests of "
            f"your tenant are waiting, {all_} in total): try again later",
            retry_after_s=wait_s,
        )

    def wait_estimate_s(self, model_name: str) -> float:
        """Seconds until the queue as it stands is worked off, by all workers and, as far as it is
        for this model, by those that offer it."""
        longest_s = self._settings.queue_timeout_s
        waiting = self._queue.backlog_of(model_name)
        own_s = 0.0 if waiting is None else waiting.service_s
        return max(
            estimate_wait_s(self._queue.backlog_s, len(self._fleet), longest_s),
            estimate_wait_s(own_s, self._fleet.num_offering(model_name), longest_s),
        )
