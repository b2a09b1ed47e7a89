"""Postings as the ledger has them, read by the query that exports read them by."""

from sqlalchemy.orm import Session

from registry.money import exports
from registry.money.exports import Scope
from registry.money.ledger import Posting

ALL = 2**62


def postings(session: Session, from_at: float = 0.0, to_at: float = 1e12) -> list[Posting]:
    """Of that span, in order of their time and request."""
    return [posting for posting, _, _ in named_postings(session, from_at, to_at)]


def named_postings(
    session: Session, from_at: float = 0.0, to_at: float = 1e12
) -> list[tuple[Posting, str, str]]:
    """With the names that tenant and key had."""
    batches = exports.rows(session, Scope(from_at, to_at), ALL)
    return [(Posting(*row[:-2]), row[-2], row[-1]) for batch in batches for row in batch]
