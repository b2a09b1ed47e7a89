"""Several gateway processes with one dispatcher: their protocol and both of its ends."""

__all__ = [
    "dispatcher_client",
    "dispatcher_protocol",
    "dispatcher_server",
    "process_hub",
    "remote_dispatcher",
    "remote_limits",
    "ticket_dispatcher",
]
