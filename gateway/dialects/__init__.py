"""Other APIs over the same core: each spells requests, answers and errors in its own way."""

__all__ = [
    "by_route",
    "dialect",
    "messages_models",
    "messages_wire",
    "ollama_wire",
    "responses_answer",
    "responses_items",
    "responses_wire",
]
