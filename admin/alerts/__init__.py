"""Messages when spending reaches a threshold."""

__all__ = ["alerts", "webhook"]
