"""What every page builds on: requests and answers, sessions, forms, tables, headers."""

__all__ = [
    "csrf",
    "errors",
    "forms",
    "headers",
    "navigation",
    "request",
    "session",
    "single_sign_on",
    "streams",
    "tables",
]
