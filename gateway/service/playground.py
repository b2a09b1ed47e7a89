"""The verbs behind the playground: which models can be talked to, and what a talk was billed.

Asking itself is `prompting.key_to_ask_as` and the pipeline: limits, fair queue and ledger hold as
for any request (control.py).
"""

from dataclasses import dataclass

from gateway.policy.permissions import allowed
from gateway.service.control import Control, require
from registry import finding, receipts

MAX_MODELS = 200


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one request used and cost. Durations in seconds, money in nano-units."""

    request_id: str
    model: str
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_nanos: int
    queue_s: float
    ttft_s: float
    duration_s: float


def chat_models(control: Control) -> list[str]:
    """Names of ready models that generate, the first ones by name; the caller may name others."""
    require(control, "models.read")
    with control.reading() as session:
        return finding.chat_models(session, MAX_MODELS)


def receipt(control: Control, request_id: str) -> Receipt | None:
    """None where it is not in the database (yet), or another's: the two look alike."""
    with control.reading() as session:
        row = receipts.find_receipt(session, request_id)
        if row is None or not allowed(control.grants, "usage.read", row.tenant_id):
            return None
        return Receipt(
            row.request_id,
            row.model,
            row.outcome,
            row.prompt_tokens,
            row.cached_tokens,
            row.completion_tokens,
            row.cost_nanos,
            row.queue_s,
            row.ttft_s,
            row.duration_s,
        )
