"""The HTTP side: the application and its routes, connections and their bounds, streams, TLS."""

__all__ = ["http_server", "own_hosts"]
