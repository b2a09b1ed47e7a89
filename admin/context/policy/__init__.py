"""Roles and permissions as data. Pure."""

__all__ = ["permissions"]
