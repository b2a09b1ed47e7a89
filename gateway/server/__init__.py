"""Puts a server together, starts its processes, keeps them alive and takes them down in order."""

__all__ = ["child_process", "process_setup"]
