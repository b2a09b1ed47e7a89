"""Connections between processes of one machine or several, and within one: framed messages, and
control sockets for operators."""

__all__ = ["control_socket", "ipc", "local_channel", "machine", "remote"]
