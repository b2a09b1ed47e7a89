"""Stored state of the tenants' API: responses that can be continued, fetched and deleted."""

__all__ = ["responses_service", "sweeper"]
