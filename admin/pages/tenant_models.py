"""The models that a tenant's keys may ask, with what the tenant pays for them and their limits:
what a user of a single tenant needs to know to use them."""

from decimal import Decimal

from starlette.responses import Response

from admin.operations import tenants as verbs
from admin.operations.tenants import TenantModel
from admin.pages.limits import limit_words
from admin.rendering.templating import per_million
from admin.web.request import PageRequest, PageRoute
from admin.web.tables import Column, TableSpec, table_state
from gateway.pricing.policy.pricing import WHOLE

TABLE = TableSpec(
    columns=(
        Column("Model", "name"),
        Column("Context", kind="number"),
        Column("Input", kind="number"),
        Column("Cached input", kind="number"),
        Column("Output", kind="number"),
        Column("Limits of the model"),
        Column("Keys", kind="number"),
    ),
    default_sort="name",
    search="Model",
)


def show(request: PageRequest) -> Response:
    """A page of them, by name."""
    table = table_state(TABLE, request.path, request.query)
    tenant, page = verbs.tenant_models(
        request.operator, request.path_params["id"], table.search, table.cut
    )
    return request.page(
        "tenant_models.html",
        table=table,
        page=page,
        tenant=tenant,
        prices=prices_of,
        words=lambda limits: limit_words(request, limits),
    )


def prices_of(model: TenantModel) -> tuple[str, str, str]:
    """Input, cached input and output per million tokens, after the tenant's discounts."""
    agreed, share = model.rates.agreed, Decimal(model.rates.share) / WHOLE
    first = agreed.prompt_nanos if model.task == "generate" else agreed.embedding_nanos
    output = agreed.completion_nanos if model.task == "generate" else None
    said = [
        "-" if nanos is None else per_million(nanos * share)
        for nanos in (first, agreed.cached_nanos, output)
    ]
    return said[0], said[1], said[2]


ROUTES = (PageRoute("GET", "/tenants/{id}/models", show),)
