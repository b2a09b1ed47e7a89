"""Tenants, keys and models as pages list and find them, with what they used lately."""

__all__ = [
    "keys",
    "models",
    "search",
    "tenants",
]
