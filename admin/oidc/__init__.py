"""Signing in by an identity provider (OpenID Connect)."""

__all__ = ["policy", "provider"]
