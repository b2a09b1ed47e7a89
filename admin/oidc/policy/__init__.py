"""Checks of an identity provider's token, and roles by claim. Pure."""

__all__ = ["identity"]
