"""What was used and what it costs: the ledger and its sums, prices, invoices, exports, alerts."""

__all__ = [
    "alerts",
    "corrections",
    "export_jobs",
    "exports",
    "invoices",
    "ledger",
    "plans",
    "prices",
    "recent",
    "rollups",
    "usage",
    "usage_buckets",
]
