"""What callers are given sealed or signed and bring back: keys of tenants under a master key."""

__all__ = ["master_keys", "seals"]
