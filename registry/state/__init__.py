"""What the API keeps for tenants beside their usage: responses, conversations, and keys that make
requests idempotent. Bytes are objects (`engine/objects`); here is what makes them exist."""

__all__ = ["conversations", "idempotency", "responses"]
