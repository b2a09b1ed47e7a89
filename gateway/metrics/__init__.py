"""What /metrics shows of one process."""

__all__ = ["cache_metrics", "metrics"]
