"""The arithmetic of limits and budgets. Pure."""

__all__ = ["rate_limit"]
