"""Stage 5: the fair queue over all models and workers, placement of models, and why it decides."""

__all__ = [
    "capacity",
    "counter_checkpoint",
    "decisions",
    "dispatcher",
    "integrity_check",
    "live_tickets",
    "operator_handler",
    "policy",
    "ticket_ends",
    "ticket_queue",
    "tickets",
]
