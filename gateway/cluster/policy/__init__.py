"""Which of several servers' dispatchers is active. Pure."""

__all__ = ["absences", "election"]
