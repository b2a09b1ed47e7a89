"""The ten stages in order, and what a live request owns."""

__all__ = ["edge", "pipeline"]
