"""What the API keeps for tenants beside their usage: responses, conversations, keys that make
requests idempotent, files and uploads. Bytes are objects (`engine/objects`); here is what makes
them exist."""

__all__ = ["conversations", "file_quota", "files", "idempotency", "responses", "uploads"]
