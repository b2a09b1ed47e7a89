"""The command `polyhost`, a module a group of commands."""

__all__ = ["main"]
