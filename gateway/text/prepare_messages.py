"""What a gateway process and its prepare processes say to each other.

    frame = length (4 bytes, big endian) | body

One job at a time, and one reply to it. Jobs are JSON, as requests are (whose numbers may be of any
size); replies are msgpack. `most` is the model's longest context: prompts of more tokens come back
as `Longer` and not as their tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from gateway.text.pieces import PieceRecord

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 256 << 20


class PrepareLimits(msgspec.Struct, frozen=True, array_like=True):
    """What one job may take: CPU seconds, and more for each byte that came with it; CPU seconds of
    reading a model's files before it; memory beyond what the process had."""

    cpu_s: float = 1.0
    cpu_s_per_byte: float = 4e-6
    load_s: float = 10.0
    memory_bytes: int = 1 << 30
    memory_per_byte: int = 256


class EncoderInput(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One input in tokens. `type_ids`: as many, or none where all are zero. Where words are asked
    for, `spans` says where in the text each lies, (begin, end), and `tokens` which are its tokens,
    (first, end); special tokens belong to none."""

    ids: list[int]
    type_ids: list[int] = []
    spans: list[tuple[int, int]] = []
    tokens: list[tuple[int, int]] = []


class _Job(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base. `folder`: the pack whose files it is about."""

    folder: str


class LoadText(_Job, frozen=True):
    """Answered with TextFacts."""


class LoadEncoder(_Job, frozen=True):
    """Answered with EncoderFacts."""


class Measure(_Job, frozen=True):
    """Answered with Longer where these texts are surely more tokens than `most`, else Ids()."""

    texts: list[str]
    most: int


class EncodePrompt(_Job, frozen=True):
    """A completion's prompt. Answered with Ids. `is_bare`: nothing is put around it."""

    text: str
    most: int
    is_bare: bool = False


class EncodeChat(_Job, frozen=True):
    """Messages through the chat template. Answered with Ids."""

    messages: list[dict[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    most: int
    values: Mapping[str, Any] = {}
    """More values for the template, of the caller's."""
    closes: tuple[str, str] | None = None
    """Marks of reasoning that the prompt is to end behind."""


class EncodeTexts(_Job, frozen=True):
    """EncoderCodec.encode, or with `words` encode_words. Answered with Inputs."""

    texts: list[str]
    longest: int
    cut: bool
    words: bool = False


class EncodePairs(_Job, frozen=True):
    """EncoderCodec.encode_pairs; without documents only the query is counted. Answered with Inputs.
    A query of `room` tokens or more is Longer."""

    query: str
    room: int
    documents: list[str]
    longest: int
    document_tokens: int = 0
    """Of each document at most; 0: as many as fit."""


class TextFacts(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What the gateway has to know of a generating model's files (TextCodec has the words)."""

    stop_token_ids: list[int]
    special_ids: dict[str, int]
    template: str
    wants_text: bool
    pieces: PieceRecord
    variables: list[str] = []


class EncoderFacts(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Special tokens around a text, and around a pair."""

    num_special: int
    num_special_pair: int


class Ids(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Token ids (int32), and how the rendered text ends."""

    ids: bytes = b""
    tail: str = ""


class Inputs(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One for each text."""

    inputs: list[EncoderInput]


class Longer(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """More tokens than may be, in the input of that index; unless `is_exact`, so many at least."""

    num_tokens: int
    index: int = 0
    is_exact: bool = True


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`template`: it refuses these messages. `text`: the tokenizer cannot encode it. `files`: they
    cannot be read. `limit`: more memory than a job may take; the process ends. `bug`: ours."""

    kind: Literal["template", "text", "files", "limit", "bug"]
    message: str


Job: TypeAlias = (
    LoadText | LoadEncoder | Measure | EncodePrompt | EncodeChat | EncodeTexts | EncodePairs
)
Reply: TypeAlias = TextFacts | EncoderFacts | Ids | Inputs | Longer | Failed

encode_job = msgspec.json.Encoder().encode
decode_job = msgspec.json.Decoder(Job).decode
encode_reply = msgspec.msgpack.Encoder().encode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
