"""What the engine and the process that compiles constraints say to each other.

One message at a time over a pipe, in order; masks lie in memory that both share, which begins with
HEADER_BYTES that name the session at work.
"""

from typing import TypeAlias

import msgspec

from engine.protocol import Constraint

# The shared memory begins with the number of the session that is being worked on, -1 for none.
HEADER_BYTES = 64


class TokenizerSource(msgspec.Struct, frozen=True, array_like=True):
    """What a grammar is compiled for: a tokenizer.json, the logits' columns, the ending tokens."""

    tokenizer_json: str
    vocab_size: int
    eos_ids: tuple[int, ...]


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """CPU seconds of a trial and of one row's step; wall seconds of a trial; address space."""

    compile_s: float = 0.25
    step_s: float = 0.25
    trial_s: float = 20.0
    memory_bytes: int = 4 << 30


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of what goes to the process and comes from it."""


class Open(_Message, frozen=True):
    """Compile and compute the first mask, after `output_ids` if there are any.

    trusted: an earlier process compiled it, no trial is needed. Tenants take turns at trials.
    """

    session: int
    source: TokenizerSource
    constraint: Constraint
    output_ids: list[int]
    trusted: bool
    tenant: str = ""


class Step(_Message, frozen=True):
    """Advance each session by its token and compute its next mask."""

    tokens: list[tuple[int, int]]


class Close(_Message, frozen=True):
    """Forget these."""

    sessions: list[int]


class Done(_Message, frozen=True):
    """The session's mask is there. finished: only an end-of-sequence token may follow.

    cpu_s: what it took, a trial included; loading a tokenizer is nobody's.
    """

    session: int
    finished: bool
    cpu_s: float = 0.0


class GrammarRefused(_Message, frozen=True):
    """An Open that cannot be; the reason is for the client."""

    session: int
    reason: str
    cpu_s: float = 0.0


class Broken(_Message, frozen=True):
    """A session that cannot go on; the reason is for operators, or for the client where `spent`.

    worn: what was spent is a store that the grammar's sessions share; a new session has a new one.
    """

    session: int
    reason: str
    spent: bool = False
    cpu_s: float = 0.0
    worn: bool = False


ToChild: TypeAlias = Open | Step | Close
FromChild: TypeAlias = Done | GrammarRefused | Broken

encode = msgspec.msgpack.Encoder().encode
decode_to_child = msgspec.msgpack.Decoder(ToChild).decode
decode_from_child = msgspec.msgpack.Decoder(FromChild).decode
