"""The audit log: who changed what, when, from what to what."""

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from admin.ask import Ask, PageRoute, Reply
from admin.templating import exact
from gateway.service import audit as verbs
from registry.audit import AuditEntry, AuditFilter

PAGE_ROWS = 50
KINDS = (
    *("model", "tenant", "key", "limits", "price", "plan", "invoice", "alert"),
    *("user", "session", "usage"),
)
MAX_SHOWN = 120
MAX_AT = 253_402_300_800.0
"""The year 10000."""


@dataclass(frozen=True, slots=True)
class Change:
    """One field of an entry that is not what it was."""

    name: str
    before: str
    after: str


def show_audit(ask: Ask) -> Reply:
    """A page of it, newest first."""
    query = ask.query
    given = {name: query.get(name, "").strip()[:128] for name in ("actor", "action", "target")}
    before = query.get("before", "")
    before_id = int(before) if re.fullmatch("[0-9]{1,18}", before) else None
    rows = verbs.list_audit(
        ask.control,
        AuditFilter(given["actor"], given["action"], given["target"]),
        before_id,
        PAGE_ROWS + 1,
    )
    more = len(rows) > PAGE_ROWS
    rows = rows[:PAGE_ROWS]
    return ask.page(
        "audit.html",
        rows=[(row, _changes(row)) for row in rows],
        given=given,
        kinds=KINDS,
        first_url=ask.url(before=None) if before_id else "",
        next_url=ask.url(before=str(rows[-1].id)) if more else "",
    )


def _changes(entry: AuditEntry) -> list[Change]:
    before, after = entry.before or {}, entry.after or {}
    return [
        Change(name, _text(name, before.get(name)), _text(name, after.get(name)))
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]


def _text(name: str, value: Any) -> str:
    if value is None or value == "":
        return "-"
    if name.endswith("_at") and isinstance(value, int | float) and 0 < value < MAX_AT:
        return exact(value)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


ROUTES = (PageRoute("GET", "/audit", show_audit),)
