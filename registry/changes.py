"""What has changed in the registry since somebody last looked, by the audit log.

Every change ends with an entry there, in its own transaction, and changes come one after the other
(`registry.session.writing`), so entries after the last one seen are all that is new. Whoever caches
keys reads those that are named here and no others.
"""

from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from registry.audit import AuditRow

MAX_ENTRIES = 1000
"""Beyond it, reading everything is the cheaper way."""
# Entries that change nothing a gateway serves by.
SILENT = ("user.", "invoice.", "alert.")


@dataclass(frozen=True, slots=True)
class Changes:
    """Ids of keys and of tenants, and whether anything else has changed: models, prices, plans.
    `limited`: whose limits have; the log does not say whether a key's, a tenant's or a model's.
    `upto`: the last entry seen."""

    upto: int
    keys: frozenset[str]
    tenants: frozenset[str]
    limited: frozenset[str]
    others: bool


def newest(session: Session) -> int:
    """The last entry there is; 0: none."""
    return session.scalar(select(func.max(AuditRow.id))) or 0


def since(session: Session, upto: int) -> Changes | None:
    """What came after that entry; None: too much, or the log does not go on from there."""
    rows = session.execute(
        select(AuditRow.id, AuditRow.action, AuditRow.target)
        .where(AuditRow.id > upto)
        .order_by(AuditRow.id)
        .limit(MAX_ENTRIES + 1)
    ).all()
    if not rows or len(rows) > MAX_ENTRIES:
        return None
    keys, tenants, limited, others = set[str](), set[str](), set[str](), False
    for _, action, target in rows:
        if action.startswith("key."):
            keys.add(target)
        elif action in ("tenant.create", "tenant.update"):
            tenants.add(target)
        elif action == "limits.set":
            limited.add(target)
        elif not action.startswith(SILENT):
            others = True
    found = (frozenset(keys), frozenset(tenants), frozenset(limited))
    return Changes(rows[-1][0], *found, others)
