"""Registering a model: the subprocess, its progress, retries, and the demo models."""

__all__ = ["bootstrap", "policy", "preflight", "register_process", "registrar", "registration"]
