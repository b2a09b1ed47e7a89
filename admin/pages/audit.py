"""The audit log: who changed what, newest first, in words, by actor, kind, target and day."""

import re

from starlette.responses import Response

from admin.operations import server as verbs
from admin.rendering.audit_words import ids_in, line_of
from admin.web.forms import midnight
from admin.web.request import PageRequest, PageRoute
from registry.audit import AuditFilter

PAGE_ROWS = 25
DAY_S = 86_400.0
KINDS = (
    *("model", "tenant", "key", "limits", "price", "plan", "invoice", "ledger", "export", "alert"),
    *("cache", "user", "session"),
)
FIELDS = ("actor", "action", "target", "from", "to")


def show(request: PageRequest) -> Response:
    """A page of it. What means nothing is as if not said."""
    query = request.query
    given = {name: query.get(name, "").strip()[:128] for name in FIELDS}
    before = query.get("before", "")
    before_id = int(before) if re.fullmatch("[0-9]{1,18}", before) else None
    first, last = midnight(given["from"]), midnight(given["to"])
    wanted = AuditFilter(
        given["actor"],
        given["action"],
        given["target"],
        first,
        None if last is None else last + DAY_S,
    )
    rows = verbs.list_audit(request.operator, wanted, before_id, PAGE_ROWS + 1)
    more = len(rows) > PAGE_ROWS
    rows = rows[:PAGE_ROWS]
    ids = set().union(*(ids_in(row) for row in rows))
    names = verbs.audit_names(request.operator, ids)
    currency = request.context.settings.currency
    return request.page(
        "audit.html",
        rows=[line_of(row, names, currency) for row in rows],
        given=given,
        is_filtered=any(given.values()),
        kinds=KINDS,
        first_url=request.url_with(before=None) if before_id else "",
        next_url=request.url_with(before=str(rows[-1].id)) if more else "",
    )


ROUTES = (PageRoute("GET", "/audit", show),)
