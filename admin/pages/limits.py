"""Limits: all that are set, and the forms for those of a model and of the whole server. Limits of
tenants and keys are on their own pages."""

from collections.abc import Callable, Mapping
from functools import partial

from starlette.responses import Response

from admin.operations import limits as verbs
from admin.operations.limits import OwnedLimits
from admin.pages.limits_form import BUDGETS, LABELS, Owner, change_limits, limits_form, uses
from admin.rendering.templating import money, number, path
from admin.web.forms import Form
from admin.web.request import PageRequest, PageRoute
from admin.web.tables import Column, TableSpec, table_state
from registry.accounts.quotas import Limits, LimitScope

TABLE = TableSpec(
    columns=(Column("Limits of", "name"), Column("Kind", "kind"), Column("Limits")),
    default_sort="kind",
)
SCOPES = ("gateway", "model", "tenant", "key")
VALUES: Mapping[str, Callable[[OwnedLimits], str | float]] = {
    "name": lambda found: found.name,
    "kind": lambda found: SCOPES.index(found.scope),
}
AT = {"key": "/keys/", "tenant": "/tenants/", "model": "/limits/model/"}


def list_limits(request: PageRequest) -> Response:
    """The page; `model` in the address leads to the limits of that model."""
    if model := request.query.get("model", "").strip():
        found = verbs.show_limits(request.operator, "model", model)
        return request.redirect(f"/limits/model/{path(found.owner)}")
    every = verbs.list_limits(request.operator)
    table = table_state(TABLE, request.path, request.query)
    page = table.cut_rows(every, VALUES, lambda found: found.name + found.owner)
    rows = [(found, limit_words(request, found.limits)) for found in page.rows]
    return request.page("limits.html", table=table, page=page, rows=rows, at=AT)


def show_gateway(request: PageRequest) -> Response:
    """Of all requests together."""
    return _page(request, "gateway", "")


def show_model(request: PageRequest) -> Response:
    """Of all requests for a model."""
    return _page(request, "model", request.path_params["name"])


def set_gateway(request: PageRequest) -> Response:
    """Those that were changed in the form."""
    return _set(request, "gateway", "")


def set_model(request: PageRequest) -> Response:
    """Those that were changed in the form."""
    return _set(request, "model", request.path_params["name"])


def _set(request: PageRequest, scope: LimitScope, name: str) -> Response:
    owner = _owner(request, scope, name)
    again = partial(_page, request, scope, name, status=422)
    return change_limits(request, [owner], _at(owner), again)


def _page(
    request: PageRequest, scope: LimitScope, name: str, form: Form | None = None, status: int = 200
) -> Response:
    owner = _owner(request, scope, name)
    directory = request.context.edge.services.directory
    model = directory.find_model(owner.id) if scope == "model" else None
    holds = model.limits if model else directory.limits if scope == "gateway" else owner.limits
    state = "now" if holds == owner.limits else "soon"
    return request.page(
        "limits_owner.html",
        status,
        owner=owner,
        action=_at(owner).replace("/limits/", "/limit/set/", 1),
        uses=request.fragment("limits_parts.html", "uses", uses(request, [owner]), state),
        form=form or limits_form(request, [owner]),
    )


def _owner(request: PageRequest, scope: LimitScope, name: str) -> Owner:
    """Raises NotFound."""
    found = verbs.show_limits(request.operator, scope, name)
    words = "the model" if scope == "model" else "the server"
    return Owner(scope, found.owner, words, found.limits)


def _at(owner: Owner) -> str:
    return f"/limits/model/{path(owner.id)}" if owner.scope == "model" else "/limits/gateway"


def limit_words(request: PageRequest, limits: Limits) -> list[str]:
    """Each limit that is set, such as `Requests per minute: 60`."""
    currency = request.context.settings.currency
    found = []
    for name, label in LABELS.items():
        if value := getattr(limits, name):
            said = money(value, currency) if name in BUDGETS else number(value)
            found.append(f"{label}: {said}")
    return found


ROUTES = (
    PageRoute("GET", "/limits", list_limits),
    PageRoute("GET", "/limits/gateway", show_gateway),
    PageRoute("GET", "/limits/model/{name:path}", show_model),
    PageRoute("POST", "/limit/set/gateway", set_gateway),
    PageRoute("POST", "/limit/set/model/{name:path}", set_model),
)
