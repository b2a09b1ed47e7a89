"""Stage 9: tokens become pieces of an answer, and pieces OpenAI's JSON."""

__all__ = ["answer", "choice", "encode_answer", "encoder", "text_parts"]
