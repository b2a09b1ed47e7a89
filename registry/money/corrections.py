"""Putting a posting right: by another one that names it, for postings never change.

A correction holds what is added to the amounts, below zero too, so sums over both are right. Its
time is when it was made: a bill that was sent stays what it was, and the next one has the
difference. What it adds to the cost it takes from the parts of the cost in turn (output, input,
cached, service, load), so that parts still add up.
"""

from dataclasses import dataclass

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from registry import audit
from registry.base import new_id
from registry.errors import InvalidValue, NotFound
from registry.money import ledger
from registry.money.ledger import CORRECTION, Posting, PostingRow

PARTS = ("output_nanos", "input_nanos", "cached_nanos", "service_nanos", "load_nanos")
MAX_ADDED = 2**53
"""Nine million units, or as many tokens: more is a slip of the keyboard, and a few such entries
would carry sums beyond 64 bits, for good."""
COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens")


@dataclass(frozen=True, slots=True)
class Right:
    """What it should have been; None: as it stands."""

    cost_nanos: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


def correct(session: Session, request_id: str, right: Right, *, now_at: float) -> Posting:
    """Add what is missing from the posting and its corrections so far. Raises NotFound,
    InvalidValue where nothing would change or an amount would be below zero."""
    entries = _entries(session, request_id)
    stands = _sums(entries)
    wanted = {
        name: stands[name] if getattr(right, name) is None else int(getattr(right, name))
        for name in ("cost_nanos", *COUNTS)
    }
    if min(wanted.values()) < 0 or wanted["cached_tokens"] > wanted["prompt_tokens"]:
        raise InvalidValue(
            "a correction must not make an amount negative, or cached tokens exceed prompt tokens"
        )
    added = {name: wanted[name] - stands[name] for name in wanted}
    if max(added.values()) > MAX_ADDED:
        raise InvalidValue(f"a correction may add at most {MAX_ADDED} to an amount")
    if not any(added.values()):
        raise InvalidValue("the correction changes nothing")
    of = entries[0]
    correction = Posting(
        request_id=new_id("corr"),
        tenant_id=of.tenant_id,
        key_id=of.key_id,
        model=of.model,
        revision=of.revision,
        kind=CORRECTION,
        outcome=CORRECTION,
        **added,
        service_s=0.0,
        queue_s=0.0,
        ttft_s=0.0,
        duration_s=0.0,
        posted_at=now_at,
        arrived_at=of.arrived_at,
        **_parts(stands, added["cost_nanos"]),
        corrects=request_id,
    )
    ledger.insert_postings(session, [correction])
    before = {name: stands[name] for name in wanted}
    audit.record(session, now_at, "ledger.correct", request_id, before, dict(wanted))
    return correction


def standing(session: Session, request_id: str) -> tuple[PostingRow, Right]:
    """A request's posting, and what it comes to with its corrections so far. Raises NotFound."""
    entries = _entries(session, request_id)
    sums = _sums(entries)
    return entries[0], Right(*(sums[name] for name in ("cost_nanos", *COUNTS)))


def _entries(session: Session, request_id: str) -> list[PostingRow]:
    """The posting and its corrections, held until the session ends. Raises NotFound."""
    named = or_(PostingRow.request_id == request_id, PostingRow.corrects == request_id)
    query = select(PostingRow).where(named).order_by(PostingRow.seq).with_for_update()
    entries = list(session.scalars(query))
    if not entries or entries[0].corrects or entries[0].request_id != request_id:
        raise NotFound(f"no posting found for request {request_id!r}")
    return entries


def _sums(entries: list[PostingRow]) -> dict[str, int]:
    names = ("cost_nanos", *COUNTS, *PARTS)
    return {name: sum(getattr(entry, name) for entry in entries) for name in names}


def _parts(stands: dict[str, int], added: int) -> dict[str, int]:
    """Where the parts are known: they say what the whole says."""
    if sum(stands[name] for name in PARTS) != stands["cost_nanos"]:
        return {}
    parts = dict.fromkeys(PARTS, 0)
    if added > 0:
        return {**parts, PARTS[0]: added}
    for name in PARTS:
        parts[name] = max(-stands[name], added)
        added -= parts[name]
    return parts
