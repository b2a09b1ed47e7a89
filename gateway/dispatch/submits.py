"""A grant becomes a Submit (stage 5 -> 6): what a worker is told of a request."""

from engine.protocol import Submit
from gateway.types import PreparedRequest


def submit_of(request: PreparedRequest, tenant_id: str, attempt: int, timeout_s: float) -> Submit:
    """`timeout_s` as `Ticket.timeout_s` says it."""
    return Submit(
        request_id=request.request_id,
        attempt=attempt,
        tenant_id=tenant_id,
        model_id=request.model.name,
        prompt_token_ids=request.prompt_token_ids,
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        stop_token_ids=request.stop_token_ids,
        logprobs=0 if request.is_judged else request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        constraint=request.constraint,
        timeout_s=timeout_s,
        encode=request.encode,
    )


def time_left_s(ends_by_s: float, now_s: float) -> float:
    """What is left of a request's time, as a Submit says it: 0 none, negative: it is over."""
    if ends_by_s == float("inf"):
        return 0.0
    left_s = ends_by_s - now_s
    return left_s if left_s > 0 else -1.0
