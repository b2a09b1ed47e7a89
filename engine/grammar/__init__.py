"""The process that compiles constraints and computes masks, and what is said to it.

This face has the messages only: the process (`child.py`) imports neither torch nor numpy, and what
is imported here is loaded by it.
"""

from engine.grammar.messages import (
    HEADER_BYTES,
    Close,
    Done,
    FromChild,
    GrammarRefused,
    Limits,
    Open,
    Step,
    ToChild,
    TokenizerSource,
    decode_from_child,
    encode,
)

__all__ = [
    "HEADER_BYTES",
    "Close",
    "Done",
    "FromChild",
    "GrammarRefused",
    "Limits",
    "Open",
    "Step",
    "ToChild",
    "TokenizerSource",
    "decode_from_child",
    "encode",
]
