"""Connections between the processes of one machine, and within one: framed messages, and control
sockets for operators."""

__all__ = ["control_socket", "ipc", "local_channel", "machine"]
