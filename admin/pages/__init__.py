"""The pages, a module a noun: each has ROUTES, and STREAMS where parts of it follow the server."""

from typing import Final

from admin.pages import (
    alerts,
    audit,
    cache,
    corrections,
    decisions,
    exports,
    fairness,
    invoices,
    keys,
    limits,
    models,
    plans,
    playground,
    prices,
    registrations,
    server,
    tenant_models,
    tenants,
    usage,
    users,
)
from admin.web.request import PageRoute, StreamRoute

__all__ = ["PAGES", "STREAMS"]

PAGES: Final[tuple[PageRoute, ...]] = (
    *server.ROUTES,
    *playground.ROUTES,
    *models.ROUTES,
    *registrations.ROUTES,
    *tenants.ROUTES,
    *tenant_models.ROUTES,
    *keys.ROUTES,
    *limits.ROUTES,
    *alerts.ROUTES,
    *usage.ROUTES,
    *exports.ROUTES,
    *prices.ROUTES,
    *plans.ROUTES,
    *invoices.ROUTES,
    *corrections.ROUTES,
    *users.ROUTES,
    *audit.ROUTES,
    *fairness.ROUTES,
    *decisions.ROUTES,
    *cache.ROUTES,
)
STREAMS: Final[tuple[StreamRoute, ...]] = (
    *server.STREAMS,
    *models.STREAMS,
    *registrations.STREAMS,
    *exports.STREAMS,
    *tenants.STREAMS,
    *keys.STREAMS,
    *fairness.STREAMS,
    *cache.STREAMS,
)
