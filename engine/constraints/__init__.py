"""Constrained requests: their sessions in the grammar process, and their masks in the steps."""

from engine.constraints.constrained_rows import ConstrainedRows

__all__ = ["ConstrainedRows"]
