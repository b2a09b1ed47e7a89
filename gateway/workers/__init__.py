"""The gateway's end of the worker protocol: connections, and what a request is called towards
workers."""

__all__ = ["choices", "curve_keys", "worker_client"]
