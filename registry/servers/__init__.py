"""What several servers at one database know of each other: which one's dispatcher is active, and
which gateways live."""

__all__ = ["dispatcher_leases", "gateway_leases"]
