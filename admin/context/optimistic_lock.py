"""That two operators who change one thing at once do not undo each other: marks of what was seen.

An operation that takes `seen` compares it, inside its transaction, with the mark of what holds
then, and does nothing where they differ. Who reads, decides and writes by such a mark loses
nobody's change, in however many processes. The CLI gives none: a command says all it means.
"""

import hashlib
from collections.abc import Collection, Mapping

import msgspec
from sqlalchemy.orm import Session

from admin.context.operator_context import OperatorContext
from admin.context.policy import permissions
from registry import audit
from registry.audit import AuditFilter
from registry.errors import RegistryError

SOMEBODY = "somebody"
_MARK_LEN = 16
_MAX_ENTRIES = 50


class ChangedMeanwhile(RegistryError):
    """What was looked at holds no more; nothing was done."""


def version_of(value: object) -> str:
    """The same for the same plain value (numbers, text, lists, dicts), another for another."""
    text = msgspec.json.encode(value, order="deterministic")
    return hashlib.sha256(text).hexdigest()[:_MARK_LEN]


def check_unchanged(what: str, now: str, seen: str) -> None:
    """Raises ChangedMeanwhile; an empty `seen` was not given and is not compared."""
    if seen and seen != now:
        raise ChangedMeanwhile(f"{what} changed in the meantime; nothing was saved")


def who_set(
    context: OperatorContext, action: str, target: str, names: Collection[str]
) -> Mapping[str, str]:
    """Who changed each of these fields last, by the audit log; `SOMEBODY` for who may not know."""
    if not permissions.allowed(context.grants, "audit.read"):
        return dict.fromkeys(names, SOMEBODY)
    with context.reading() as session:
        return setters(session, action, target, names)


def setters(
    session: Session, action: str, target: str, names: Collection[str]
) -> Mapping[str, str]:
    """As `who_set`, for an operation that has asked for the right itself."""
    entries = audit.page(session, AuditFilter(action=action, target=target), limit=_MAX_ENTRIES)
    by: dict[str, str] = {}
    for entry in entries:
        for name in set(names).difference(by):
            if (entry.before or {}).get(name) != (entry.after or {}).get(name):
                by[name] = entry.actor
    return {name: by.get(name, SOMEBODY) for name in names}
