"""How fast long work goes, and when it will be done. Pure."""

__all__ = ["pace"]
