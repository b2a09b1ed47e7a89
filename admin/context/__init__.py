"""What every operation gets: who acts, with which permissions, on which registry and data
folder."""

__all__ = [
    "data_folder",
    "operation",
    "operator_context",
    "optimistic_lock",
    "policy",
    "registration_files",
]
