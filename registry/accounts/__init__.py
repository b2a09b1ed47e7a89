"""Who may do what: tenants, their API keys and limits; users, their sign-ins and identities."""

__all__ = [
    "api_keys",
    "identities",
    "key_terms",
    "known_browsers",
    "quotas",
    "tenants",
    "user_sessions",
    "users",
]
