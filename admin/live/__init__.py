"""What pages show of the running server, and how they follow it."""

__all__ = [
    "fleet_watch",
    "host",
    "load_plan",
    "overview_board",
    "rates",
    "residency",
    "troubles",
    "workers",
]
