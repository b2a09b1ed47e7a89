"""What /metrics shows of one process, and how the figures of several become one answer."""

__all__ = ["cache_metrics", "counters", "families", "metrics", "state_metrics"]
