"""What operators can do, a module a kind of thing. Each operation is one typed function that says
its permission and its audit entries; commands and pages call these and nothing below them."""

__all__ = [
    "cache",
    "export_jobs",
    "invoices",
    "keys",
    "limits",
    "models",
    "prices",
    "server",
    "sessions",
    "tenants",
    "usage",
    "users",
]
