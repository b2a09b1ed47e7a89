"""Prices, plans and terms, and the table of outcomes that they are applied to. Pure."""

__all__ = ["pricing"]
