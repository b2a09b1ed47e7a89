"""Sockets between the processes of one machine: framed messages, and control sockets for
operators."""

__all__ = ["control_socket", "ipc", "machine"]
