"""The catalog: hosted models, their revisions and registrations, where their weights should be;
what is wanted of workers."""

__all__ = [
    "catalog",
    "floors",
    "registrations",
    "residency_requests",
    "revisions",
    "worker_orders",
]
