"""Files of tenants: sent whole or in parts, kept as objects, listed, read and deleted."""

__all__ = ["file_body", "file_fields", "files_service", "uploads_service"]
