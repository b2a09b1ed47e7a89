"""Stage 4: kept answers, when one may be given again, and where they are stored."""

__all__ = [
    "cache_handler",
    "cache_request",
    "calibrations",
    "embedder",
    "lookup",
    "policy",
    "types",
]
