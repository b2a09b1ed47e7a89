"""The decision whether a kept answer may be given. Pure."""

__all__ = ["cache_rule"]
