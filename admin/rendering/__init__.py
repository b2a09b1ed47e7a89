"""Templates, and pictures as SVG."""

__all__ = ["arena", "audit_words", "charts", "model_colours", "svg", "templating"]
