"""What the loops share: where the server is, and how a message tells the model what to say."""

import json
import os
from typing import Any

URL = os.environ["COMPAT_URL"]
KEY = os.environ["COMPAT_KEY"]
MODEL, ANOTHER, EMBED, CROSS = "scripted", "another", "embed", "cross"
TEXT = 'naïve "日本" 🎉\n- ok'
"""Bytes, quotes and lines that streams have to put together again."""


def script(*turns: dict[str, Any]) -> str:
    """A user's message; see tests/compat/script.py."""
    return f"Do it: <<{json.dumps(list(turns), ensure_ascii=False)}>>"


def call(name: str, /, **arguments: Any) -> dict[str, Any]:
    """A call in a turn."""
    return {"name": name, "arguments": arguments}
