"""From what a request used to its posting: the one place that fills in a posting's money.

In: the open record (who pays, for which model, since when), the prices of that instant, how the
request ended, the workers' usage. Out: the posting. Who decides on the outcome and on the tokens
that are billed: gateway/pipeline/active_request.py, and gateway/ledger/ledger_recovery.py for what
a killed process left.
"""

from engine.protocol import Usage
from gateway.pricing.policy.pricing import Billed, Consumption, Rates, cost_of, micros
from registry.money.ledger import OpenRecord, Posting


def bill(
    record: OpenRecord,
    rates: Rates,
    outcome: Billed,
    usage: Usage,
    completion_tokens: int,
    *,
    kind: str,
    posted_at: float,
    is_encoder: bool = False,
    queue_s: float = 0.0,
    ttft_s: float = 0.0,
    duration_s: float = 0.0,
) -> Posting:
    """`completion_tokens`: those that are billed or reported. Times in seconds, `posted_at` in
    epoch seconds."""
    num_prompt = record.prompt_tokens
    used = Consumption(
        num_prompt,
        min(usage.cached_tokens, num_prompt),
        completion_tokens,
        micros(usage.service_s),
        micros(usage.load_s),
        is_encoder=is_encoder,
    )
    cost = cost_of(rates, outcome, used)
    return Posting(
        request_id=record.request_id,
        tenant_id=record.tenant_id,
        key_id=record.key_id,
        model=record.model,
        revision=record.revision,
        kind=kind,
        outcome=outcome,
        prompt_tokens=num_prompt,
        cached_tokens=used.cached_tokens,
        completion_tokens=completion_tokens,
        cost_nanos=cost.cost_nanos,
        service_s=usage.service_s,
        queue_s=queue_s,
        ttft_s=ttft_s,
        duration_s=duration_s,
        posted_at=posted_at,
        arrived_at=record.opened_at,
        prefill_s=usage.prefill_s,
        decode_s=max(0.0, usage.device_s - usage.prefill_s),
        load_s=usage.load_s,
        input_nanos=cost.input_nanos,
        cached_nanos=cost.cached_nanos,
        output_nanos=cost.output_nanos,
        service_nanos=cost.service_nanos,
        load_nanos=cost.load_nanos,
        list_nanos=cost.list_nanos,
    )
