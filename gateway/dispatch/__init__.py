"""Stage 5: the fair queue over all models and workers, placement of models, and why it decides."""

__all__ = [
    "assignments",
    "capacity",
    "counter_checkpoint",
    "decisions",
    "dispatcher",
    "fleet",
    "operator_handler",
    "policy",
    "ticket_ends",
    "ticket_queue",
    "tickets",
    "usage_accounting",
]
