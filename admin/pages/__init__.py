"""The pages, a module a noun: each has ROUTES, and STREAMS where parts of it follow the server."""

from typing import Final

from admin.ask import PageRoute, StreamRoute
from admin.pages import (
    audit,
    cache,
    fairness,
    health,
    home,
    invoices,
    key,
    keys,
    model,
    models,
    playground,
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
    *playground.ROUTES,
    *models.ROUTES,
    *model.ROUTES,
    *register.ROUTES,
    *tenants.ROUTES,
    *tenant.ROUTES,
    *keys.ROUTES,
    *key.ROUTES,
    *usage.ROUTES,
    *prices.ROUTES,
    *invoices.ROUTES,
    *users.ROUTES,
    *audit.ROUTES,
    *health.ROUTES,
    *fairness.ROUTES,
    *cache.ROUTES,
)
STREAMS: Final[tuple[StreamRoute, ...]] = (
    *models.STREAMS,
    *model.STREAMS,
    *tenant.STREAMS,
    *key.STREAMS,
    *health.STREAMS,
    *fairness.STREAMS,
    *cache.STREAMS,
)
