"""Files of tenants: sent whole or in parts, kept as objects, listed, read and deleted."""

__all__ = [
    "file_access",
    "file_body",
    "file_fields",
    "file_store",
    "files_service",
    "uploads_service",
]
