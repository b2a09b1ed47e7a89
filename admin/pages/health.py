"""Health: what the server needs and how it is: database, limits, ledger, workers."""

from collections.abc import Mapping
from typing import Any

from admin.ask import Ask, PageRoute, Reply, StreamRoute
from gateway.service import health as verbs


def show_health(ask: Ask) -> Reply:
    """The page."""
    return ask.page("health.html", **_figures(ask))


def live_health(ask: Ask) -> Mapping[str, str]:
    """All of it."""
    found = _figures(ask)
    return {
        "parts": ask.fragment("health_parts.html", "parts_table", found),
        "workers": ask.fragment("health_parts.html", "workers_table", found["live"]),
    }


def _figures(ask: Ask) -> dict[str, Any]:
    return {
        "database": verbs.database_health(ask.control),
        "live": ask.live,
        "has_redis": bool(ask.desk.settings.redis_url),
    }


ROUTES = (PageRoute("GET", "/health", show_health, live=True),)
STREAMS = (StreamRoute("/live/health", live_health, every_s=2.0),)
