"""Decisions of the running server: loads, delayed loads, evictions, refusals and quarantines, each
with its reason and what it was based on."""

from starlette.responses import Response

from admin.operations import server as verbs
from admin.operations.server import DecisionView
from admin.rendering.templating import exact, number, size, span
from admin.web.request import PageRequest, PageRoute
from registry.errors import Forbidden, RegistryError

NUM_SHOWN = 200
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


def show(request: PageRequest) -> Response:
    """The newest first; `model` and `kind` in the address narrow them down."""
    model = request.query.get("model", "").strip()[:128]
    kind = request.query.get("kind", "")
    rows: list[DecisionView] = []
    trouble = ""
    try:
        found = verbs.decisions(request.operator, model, NUM_SHOWN)
        rows = [row for row in found.decisions if kind not in KINDS or row.kind == kind]
    except Forbidden:
        raise
    except RegistryError as error:
        trouble = str(error)
    names = verbs.tenant_names(request.operator, sorted({row.tenant_id for row in rows} - {""}))
    return request.page(
        "decisions.html",
        rows=[(row, words_of(row)) for row in rows],
        model=model,
        kind=kind,
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
