"""How long a failed sign-in makes the next one wait. Pure."""

__all__ = ["sign_in_guard"]
