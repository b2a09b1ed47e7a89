"""Stage 1: who calls and what they may see, kept fresh from the registry."""

__all__ = ["auth", "directory", "registry_poll"]
