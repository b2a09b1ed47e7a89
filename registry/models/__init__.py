"""The catalog: hosted models, their revisions and registrations, where their weights should be."""

__all__ = [
    "catalog",
    "floors",
    "registrations",
    "residency_requests",
    "revisions",
]
