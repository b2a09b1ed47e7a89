"""The settings of a server, with their bounds and descriptions, and where their values come
from."""

__all__ = [
    "base_settings",
    "cluster_settings",
    "config",
    "http_settings",
    "oidc_settings",
    "settings",
    "state_settings",
    "worker_settings",
]
