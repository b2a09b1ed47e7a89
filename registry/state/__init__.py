"""What the API keeps for tenants beside their usage: responses, conversations, keys that make
requests idempotent, files, uploads and batches. Bytes are objects (`engine/objects`); here is what
makes them exist."""

__all__ = ["batches", "conversations", "file_quota", "files", "idempotency", "responses", "uploads"]
