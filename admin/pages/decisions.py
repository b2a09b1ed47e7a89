"""Decisions of the running server: loads, delayed loads, evictions, refusals and quarantines, each
with its reason and what it was based on."""

from collections.abc import Callable, Mapping

from starlette.responses import Response

from admin.operations import server as verbs
from admin.operations.server import DecisionView
from admin.rendering.templating import exact, number, size, span
from admin.web.request import PageRequest, PageRoute
from admin.web.tables import Column, Filter, TableSpec, table_state
from registry.errors import Forbidden, RegistryError
from registry.paging import Listed

MAX_DECISIONS = 1000
PAGE_ROWS = 20
KINDS = {
    "load": ("load", "ok"),
    "warm": ("load into host memory", "ok"),
    "held": ("load delayed", "busy"),
    "unload": ("unload", "off"),
    "eviction": ("eviction", "off"),
    "refusal": ("refusal", "warn"),
    "quarantine": ("quarantine", "bad"),
}
REASONS = {
    "kv": "other models need KV memory",
    "load": "another model needs memory for its weights",
}
FIGURES = {
    "waited_s": "longest wait",
    "bound_s": "maximum wait",
    "until_s": "until",
    "eta_s": "expected in",
    "load_s": "load time",
    "backlog_s": "waiting work",
    "num_waiting": "waiting requests",
    "queue_limit": "queue limit",
    "weight_bytes": "weights",
    "free_bytes": "free",
    "pages_short": "pages missing",
    "load_share": "share of time spent on loads",
    "retry_after_s": "retry after",
    "term_s": "duration",
}


TABLE = TableSpec(
    columns=(
        Column("Time", "time", first="down"),
        Column("Decision", "kind"),
        Column("Model", "model"),
        Column("Reason", "reason"),
        Column("Times", "times", "number", "down"),
    ),
    default_sort="-time",
    filters=(
        Filter("kind", "Kind", {name: label.capitalize() for name, (label, _) in KINDS.items()}),
    ),
    search="Model",
)
# The server's answers tell one instant with differences of microseconds.
VALUES: Mapping[str, Callable[[DecisionView], str | float]] = {
    "time": lambda row: round(row.last_at, 2),
    "kind": lambda row: row.kind,
    "model": lambda row: row.model,
    "reason": lambda row: row.reason,
    "times": lambda row: row.count,
}


def show(request: PageRequest) -> Response:
    """The newest first. The search is a model's name, or a part of names where no model has it."""
    table = table_state(TABLE, request.path, request.query, PAGE_ROWS)
    page: Listed[DecisionView] = Listed()
    trouble = ""
    try:
        found = verbs.decisions(request.operator, table.search, MAX_DECISIONS).decisions
        if not found and table.search:
            every = verbs.decisions(request.operator, "", MAX_DECISIONS).decisions
            found = [row for row in every if table.search.lower() in row.model.lower()]
        kind = table.chosen["kind"]
        rows = [row for row in found if not kind or row.kind == kind]
        page = table.cut_rows(rows, VALUES, lambda row: f"{row.at:.2f} {row.kind} {row.model}")
    except Forbidden:
        raise
    except RegistryError as error:
        trouble = str(error)
    rows = page.rows
    names = verbs.tenant_names(request.operator, sorted({row.tenant_id for row in rows} - {""}))
    return request.page(
        "decisions.html",
        rows=[(row, words_of(row)) for row in rows],
        table=table,
        page=page,
        kinds=KINDS,
        reasons=REASONS,
        names=names,
        trouble=trouble,
    )


def words_of(row: DecisionView) -> str:
    """The figures behind it, for people."""
    found = [f"{FIGURES[name]} {_said(name, row.figures[name])}" for name in row.figures
             if name in FIGURES]  # fmt: skip
    return ", ".join([*found, *filter(None, [row.detail])])


def _said(name: str, value: float) -> str:
    if name == "until_s":
        return exact(value)[11:]
    if name.endswith("_bytes"):
        return size(value)
    if name.endswith("_s"):
        return span(value)
    return number(value) if float(value).is_integer() else f"{value:.3g}"


ROUTES = (PageRoute("GET", "/decisions", show),)
