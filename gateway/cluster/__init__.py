"""Gateways and their dispatcher: the protocol between them, both of its ends, and which of several
servers' dispatchers it is."""

__all__ = [
    "dispatcher_client",
    "dispatcher_lease",
    "dispatcher_places",
    "dispatcher_protocol",
    "dispatcher_proxy",
    "dispatcher_server",
    "gateway_lease",
    "local_dispatcher",
    "operator_questions",
    "process_hub",
    "remote_limits",
    "ticket_dispatcher",
]
