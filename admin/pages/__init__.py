"""The pages, a module a noun: each has ROUTES, and STREAMS where parts of it follow the server."""

from typing import Final

from admin.ask import PageRoute, StreamRoute
from admin.pages import (
    audit,
    health,
    home,
    key,
    keys,
    model,
    models,
    prices,
    register,
    search,
    tenant,
    tenants,
    usage,
    users,
)

PAGES: Final[tuple[PageRoute, ...]] = (
    *home.ROUTES,
    *search.ROUTES,
    *models.ROUTES,
    *model.ROUTES,
    *register.ROUTES,
    *tenants.ROUTES,
    *tenant.ROUTES,
    *keys.ROUTES,
    *key.ROUTES,
    *usage.ROUTES,
    *prices.ROUTES,
    *users.ROUTES,
    *audit.ROUTES,
    *health.ROUTES,
)
STREAMS: Final[tuple[StreamRoute, ...]] = (
    *models.STREAMS,
    *model.STREAMS,
    *tenant.STREAMS,
    *key.STREAMS,
    *health.STREAMS,
)
