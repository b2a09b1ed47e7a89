"""Stage 10: usage is posted exactly once, by way of a journal, into the database."""

__all__ = ["ledger", "ledger_recovery"]
