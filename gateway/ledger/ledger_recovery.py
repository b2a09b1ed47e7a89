"""What is posted for a request that an earlier process left open (stage 10, below ledger.py).

    a Finish of a worker        posted as `disconnected`, billed by its usage: the connection ended,
                                up to there it was served
    a Finish that is a failure  posted as `failed` at no cost
    none, but a checkpoint      the worker is lost too: `disconnected`, billed for what the client
                                had been sent at the last checkpoint, at most
                                ledger_checkpoint_tokens less than it got
    nothing                     `failed` at no cost: a doubt costs the client nothing

They are billed at the prices of when they were opened. Pure: no clock, no database.
"""

from collections.abc import Sequence

from engine.protocol import Finish, Usage
from gateway.dispatch.joint import joint_usage
from gateway.policy.pricing import Consumption, Rates, cost_of, micros
from gateway.types import Outcome
from registry.ledger import OpenRecord, Posting

RECOVERED_KIND = "recovered"


def is_unserved(finish: Finish) -> bool:
    """It is our failure, or nothing was done for it: the client pays nothing."""
    if finish.reason == "refused":  # after tokens that is the client's own form of answer
        return not finish.usage.generated_tokens
    return finish.reason in ("error", "timeout")


def together(finishes: Sequence[Finish]) -> Finish | None:
    """The finishes of a request's choices as one; None where there are none."""
    if not finishes:
        return None
    usage = joint_usage([finish.usage for finish in finishes])
    failed = any(is_unserved(finish) for finish in finishes)
    return Finish("error" if failed else finishes[0].reason, usage)


def closing(record: OpenRecord, finish: Finish | None, rates: Rates, posted_at: float) -> Posting:
    """See the module. An encoder's answer goes out whole, behind its posting: where there is none,
    neither went."""
    usage = _checkpointed(record) if finish is None else finish.usage
    failed = finish is not None and is_unserved(finish)
    served = not failed and usage.generated_tokens > 0
    outcome: Outcome = "disconnected" if served else "failed"
    cost = cost_of(
        rates,
        outcome,
        Consumption(
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.generated_tokens,
            micros(usage.service_s),
            micros(usage.load_s),
        ),
    )
    return Posting(
        request_id=record.request_id,
        tenant_id=record.tenant_id,
        key_id=record.key_id,
        model=record.model,
        revision=record.revision,
        kind=RECOVERED_KIND,
        outcome=outcome,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.generated_tokens,
        cost_nanos=cost.cost_nanos,
        service_s=usage.service_s,
        queue_s=0.0,
        ttft_s=0.0,
        duration_s=0.0,
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


def _checkpointed(record: OpenRecord) -> Usage:
    """Nobody is left who knows what of its prompt was cached: all of it counts as cached."""
    cached = record.prompt_tokens if record.streamed_tokens else 0
    return Usage(record.prompt_tokens, cached, record.streamed_tokens, 0.0)
