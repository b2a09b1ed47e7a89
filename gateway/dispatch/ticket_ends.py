"""What becomes of a ticket that leaves its worker, wherever the fair queue is (stage 5 -> 6).

Pure: the owner of the ticket changes it. A loss or a refusal is an event for the ticket's table,
and an end where it does not wait again.
"""

from collections.abc import Iterable

from engine.protocol import Finish, Refused, Usage
from gateway.dispatch.tickets import (
    RESTART_WAIT_S,
    IntegrityError,
    StreamEnd,
    Ticket,
    TicketEvent,
)
from gateway.errors import (
    CONTEXT_LENGTH,
    INVALID_REQUEST,
    MODEL_NOT_FOUND,
    SERVER_ERROR,
    UNAVAILABLE,
    WRONG_TASK,
    ApiError,
    WorkerLost,
    for_tenants,
    unenforceable,
)

MAX_LOSSES = 2
"""A request that so many workers died with is not tried again: it may be what they died of."""
NOTHING_USED = Usage(0, 0, 0, 0.0)
ABORTED_UNUSED = Finish("abort", NOTHING_USED)
"""The end of a request that was aborted before it used anything."""


def loss_of(ticket: Ticket, reason: str) -> tuple[TicketEvent, StreamEnd | None]:
    """What the loss of its worker is for a ticket, and how it ends; None: it is tried once more."""
    if ticket.aborted:
        return "give_up", aborted_end(ticket)
    if ticket.num_losses + 1 < MAX_LOSSES:
        return "worker_lost", None
    if ticket.has_tokens:
        return "give_up", WorkerLost(reason)
    message = f"{MAX_LOSSES} workers stopped while running the request: try again later"
    return "give_up", ApiError(UNAVAILABLE, message, retry_after_s=RESTART_WAIT_S)


def aborted_end(ticket: Ticket) -> Finish:
    """The end of a request that is aborted while no worker has it, or whose worker was lost before
    it said so: what its attempts have made is used, and the times are the system's."""
    if not ticket.has_tokens:
        return ABORTED_UNUSED
    num_tokens = ticket.num_before + ticket.num_tokens
    num_prompt = ticket.request.num_prompt_tokens
    return Finish("abort", Usage(num_prompt, ticket.cached_tokens, num_tokens, 0.0))


def check_tokens(tickets: Iterable[Ticket]) -> None:
    """Raises IntegrityError where the tokens kept of one are not those that were counted."""
    for ticket in tickets:
        counted = ticket.num_before + ticket.num_tokens
        if ticket.generated and len(ticket.generated) != counted:
            raise IntegrityError(f"{ticket.key} has {len(ticket.generated)} tokens of {counted}")


def refusal_of(
    ticket: Ticket, refused: Refused, *, others_offer: bool
) -> tuple[TicketEvent, StreamEnd | None]:
    """What a refusal is for a ticket, and how it ends; None: it waits again. What a client has
    tokens of goes on where it can: `others_offer` is whether a worker offers its model that has not
    refused it for good."""
    if ticket.aborted:
        return "give_up", aborted_end(ticket)
    if refused.retryable or (ticket.has_tokens and others_offer):
        return "refuse", None
    return "give_up", _refused_for_good(ticket, refused)


def _refused_for_good(ticket: Ticket, refused: Refused) -> ApiError:
    if refused.code == "context_length_exceeded":
        return ApiError(CONTEXT_LENGTH, f"the request does not fit the model: {refused.message}")
    if refused.code == "invalid_constraint":
        return unenforceable(refused.message)
    if refused.code == "invalid_sampling":
        return ApiError(INVALID_REQUEST, f"invalid sampling parameters: {refused.message}")
    if refused.code == "wrong_task":
        return ApiError(
            WRONG_TASK, f"the model does not support this task: {refused.message}", "model"
        )
    if refused.code == "unknown_model":
        return ApiError(MODEL_NOT_FOUND, f"the model {ticket.model_name!r} is no longer available")
    return ApiError(UNAVAILABLE, f"no worker accepts the request: {for_tenants(refused.message)}")


def end_without_tokens(ticket: Ticket, finish: Finish) -> StreamEnd:
    """How a request ends that its worker ended before any token."""
    if finish.reason == "refused":  # what was asked for was compiled beside the prompt
        return unenforceable(finish.error)
    return failed_end(ticket) if finish.reason == "error" else finish


def failed_end(ticket: Ticket) -> ApiError:
    """How a request ends that its worker could not serve."""
    text = f"the model {ticket.model_name!r} failed while processing the request"
    return ApiError(SERVER_ERROR, text)
