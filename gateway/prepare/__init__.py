"""Stage 2: a well-formed request becomes token ids, with every bound and default filled in."""

__all__ = ["encode_prepare", "lengths", "prepare"]
