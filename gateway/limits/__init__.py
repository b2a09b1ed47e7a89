"""Stage 3: reserve what a request may cost, settle what it did cost; counts in memory or in
Redis."""

__all__ = ["limit_restore", "limit_stores", "limits", "policy", "store"]
