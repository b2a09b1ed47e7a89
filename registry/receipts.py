"""What one request was billed: its posting, found by the request's id.

Read-only. Postings are written by ledger.py; whose may be seen is the caller's to say.
"""

from sqlalchemy import select
from sqlalchemy.orm import Session

from registry.ledger import PostingRow


def find_receipt(session: Session, request_id: str) -> PostingRow | None:
    """None where it is not posted, or not yet."""
    return session.scalars(select(PostingRow).where(PostingRow.request_id == request_id)).first()
