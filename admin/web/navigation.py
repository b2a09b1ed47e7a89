"""Where the navigation leads: only to what exists, and for each user to what the user may see."""

from dataclasses import dataclass
from typing import Final

from admin.context.policy.permissions import Verb


@dataclass(frozen=True, slots=True)
class Item:
    """A page of the navigation. `verb`: who may do that somewhere sees it; None: everybody."""

    label: str
    path: str
    icon: str
    verb: Verb | None


@dataclass(frozen=True, slots=True)
class Group:
    """Pages that belong together."""

    label: str
    items: tuple[Item, ...]


NAVIGATION: Final = (
    Group(
        "",
        (
            Item("Overview", "/overview", "overview", "audit.read"),
            Item("Models", "/models", "models", "models.read"),
            Item("Registrations", "/registrations", "plus", "models.read"),
            Item("Playground", "/playground", "playground", "models.write"),
        ),
    ),
    Group(
        "Tenants",
        (
            Item("Tenants", "/tenants", "tenants", "tenants.read"),
            Item("Keys", "/keys", "keys", "keys.read"),
            Item("Limits", "/limits", "limits", "limits.read"),
            Item("Alerts", "/alerts", "alerts", "audit.read"),
        ),
    ),
    Group(
        "Money",
        (
            Item("Usage", "/usage", "usage", "usage.read"),
            Item("Exports", "/exports", "exports", "usage.read"),
            Item("Prices", "/prices", "prices", "prices.read"),
            Item("Plans", "/plans", "plans", "audit.read"),
            Item("Invoices", "/invoices", "invoices", "usage.read"),
            Item("Corrections", "/corrections", "corrections", "usage.write"),
        ),
    ),
    Group(
        "Operations",
        (
            Item("Fairness", "/fairness", "fairness", "audit.read"),
            Item("Decisions", "/decisions", "decisions", "audit.read"),
            Item("Cache", "/cache", "cache", "cache.read"),
            Item("Health", "/health", "health", "models.read"),
        ),
    ),
    Group(
        "Admin",
        (
            Item("Users", "/users", "users", "users.read"),
            Item("Sessions", "/sessions", "sessions", "users.read"),
            Item("Audit log", "/audit", "audit", "audit.read"),
            Item("Settings", "/settings", "settings", "models.write"),
        ),
    ),
)
