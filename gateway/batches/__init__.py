"""Batches: files of requests that are answered within a day, line by line through the pipeline."""

__all__ = ["batches_service"]
