"""What limits and the answer cache share of Redis: scripts with deadlines, a circuit breaker, and
news of the registry."""

__all__ = ["redis_script", "registry_pubsub"]
