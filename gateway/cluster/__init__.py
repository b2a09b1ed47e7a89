"""Gateways and their dispatcher: the protocol between them, and both of its ends."""

__all__ = [
    "dispatcher_client",
    "dispatcher_protocol",
    "dispatcher_proxy",
    "dispatcher_server",
    "local_dispatcher",
    "process_hub",
    "remote_limits",
    "ticket_dispatcher",
]
