"""Text to token ids and back: chat templates, tokenizers, their processes, detokenization."""

__all__ = [
    "codecs",
    "detokenize",
    "pieces",
    "prepare_messages",
    "prepare_pool",
    "templates",
]
