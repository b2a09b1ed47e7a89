"""The dispatcher's figures at one moment, read from its parts. Decides and keeps nothing."""

from collections import Counter

from gateway.dispatch.admission import Admission
from gateway.dispatch.assignments import Assignments
from gateway.dispatch.decisions import DecisionLog
from gateway.dispatch.loads import Loads
from gateway.dispatch.service_book import ServiceBook
from gateway.dispatch.tickets import TicketQueue
from gateway.policy.quarantine import Quarantine
from gateway.services import DispatcherSnapshot


def take_snapshot(
    queue: TicketQueue,
    running: Assignments,
    admission: Admission,
    loads: Loads,
    book: ServiceBook,
    quarantine: Quarantine,
    decisions: DecisionLog,
    num_timeouts: int,
    num_workers_lost: int,
    now_s: float,
) -> DispatcherSnapshot:
    """For metrics and the operator's pages."""
    return DispatcherSnapshot(
        num_waiting=len(queue),
        num_running=len(running),
        waiting_by_model=queue.by_model(),
        running_by_model=dict(Counter(ticket.model_name for ticket in running)),
        waiting_by_tenant=queue.by_tenant(),
        service_s_by_tenant=dict(book.service_s),
        num_queue_rejections=admission.num_rejections,
        num_queue_timeouts=num_timeouts,
        num_retries=running.counts.retries,
        num_clients_too_slow=running.counts.too_slow,
        num_workers_lost=num_workers_lost,
        num_late_messages=running.counts.late,
        quarantined=quarantine.reasons(now_s),
        num_load_refusals=loads.num_refusals,
        decisions={f"{k}/{r}": n for (k, r), n in decisions.counts().items()},
        load_eta_s=loads.etas(now_s),
        accounts=book.accounts(),
    )
