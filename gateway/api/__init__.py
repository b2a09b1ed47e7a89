"""The API as clients spell it: wire types, checks of schemas, tool calls, plans for structured
output."""

__all__ = [
    "bodies",
    "encode_wire",
    "output_plan",
    "reasoning_types",
    "token_wire",
    "told_fields",
    "tool_messages",
    "tool_types",
    "tools",
    "wire",
    "wire_body",
]
