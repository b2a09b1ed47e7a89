"""What a request costs."""

__all__ = ["bill", "policy"]
