"""What was used of one model in a span, as a price sees it: for a preview of another price.

From the roll-ups by day, which have everything but the last seconds.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, case, cast, func, select
from sqlalchemy.orm import Session

from registry.exports import ENCODER_KINDS
from registry.ledger import CORRECTION
from registry.prices import PriceRecord
from registry.rollups import DAY_S, RollupRow

MICROS = 10**6


@dataclass(frozen=True, slots=True)
class Consumed:
    """Amounts by what is billed for them, and what they came to. `read_tokens`: found in a cache,
    and those of whole answers out of one."""

    num_requests: int
    input_tokens: int
    encoder_tokens: int
    read_tokens: int
    output_tokens: int
    service_us: int
    load_us: int
    cost_nanos: int
    list_nanos: int

    def at_list(self, price: PriceRecord) -> int:
        """What all of it would cost at this price, without discounts; each request's last part of
        a nano-unit is in it too."""
        return (
            self.input_tokens * price.prompt_nanos
            + self.encoder_tokens * price.embedding_nanos
            + self.read_tokens * price.cached_nanos
            + self.output_tokens * price.completion_nanos
            + self.service_us * price.service_second_nanos // MICROS
            + self.load_us * price.load_second_nanos // MICROS
        )


def consumed(session: Session, model: str, from_at: float, to_at: float) -> Consumed:
    """Of whole days [from_at, to_at). Failed requests and corrections are no part of it."""
    row = RollupRow
    hit, encodes = row.outcome == "cache_hit", row.kind.in_(ENCODER_KINDS)
    fresh = row.prompt_tokens - row.cached_tokens
    amounts: tuple[Any, ...] = (
        row.num_postings,
        case((hit | encodes, 0), else_=fresh),
        case((hit, 0), (encodes, fresh), else_=0),
        case((hit, row.prompt_tokens + row.completion_tokens), else_=row.cached_tokens),
        case((hit, 0), else_=row.completion_tokens),
        case((hit, 0), else_=row.service_us),
        case((hit, 0), else_=row.load_us),
        row.cost_nanos,
        row.list_nanos,
    )
    sums = (func.coalesce(cast(func.sum(one), BigInteger), 0) for one in amounts)
    found = session.execute(
        select(*sums).where(
            row.span_s == DAY_S,
            row.began_at >= int(from_at),
            row.began_at < int(to_at),
            row.model == model,
            row.outcome.not_in(("failed", CORRECTION)),
        )
    ).one()
    return Consumed(*(int(one) for one in found))
