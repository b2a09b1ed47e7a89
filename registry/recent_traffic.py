"""What the newest postings say of the server's speed: when each came, its tokens, how it ended.

Read-only and bounded: at most MAX_POSTINGS, however busy it is; what is older is a report's
(usage_sums.py).
"""

from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from registry.ledger import CORRECTION, PostingRow

MAX_POSTINGS = 4000


class Ended(NamedTuple):
    """One request. `ttft_s` is 0 where no token came."""

    posted_at: float
    outcome: str
    prompt_tokens: int
    completion_tokens: int
    ttft_s: float


def newest(session: Session, since_at: float) -> list[Ended]:
    """Posted since then, the newest first; corrections are no requests."""
    query = (
        select(
            PostingRow.posted_at,
            PostingRow.outcome,
            PostingRow.prompt_tokens,
            PostingRow.completion_tokens,
            PostingRow.ttft_s,
        )
        .where(PostingRow.posted_at >= since_at, PostingRow.outcome != CORRECTION)
        .order_by(PostingRow.posted_at.desc(), PostingRow.request_id.desc())
        .limit(MAX_POSTINGS)
    )
    return [Ended(*row) for row in session.execute(query)]
