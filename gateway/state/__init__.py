"""Stored state of the tenants' API: responses that can be continued, fetched and deleted."""

__all__ = ["conversations_service", "objects", "responses_service", "state_threads", "sweeper"]
