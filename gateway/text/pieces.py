"""What each token of a model stands for: read from its tokenizer once, used for every answer.

Tokenizers come with models from the internet and run in processes of their own
(prepare_process.py). Answers are decoded here, inside the dispatcher's calls, where nothing can be
waited for. So that process writes down what each token stands for (`read_pieces`), and the gateway
looks it up (`PieceTable`): no code of the tokenizer runs for an answer.

A token of a byte-level BPE, or of a sentencepiece model with byte fallback, stands for the same
bytes wherever it occurs. Decoders that look at neighbours (WordPiece, BPE with suffixes) are run
here over a short window of tokens, by a tokenizer that holds nothing but their names, and only
where all their steps take time and space in proportion to their text (`_check_steps`).
"""

import math
import re
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec
from tokenizers import Tokenizer

MAX_TOKENS = 1 << 21
MAX_NAME_BYTES = 1 << 16
MAX_BYTES = 24 << 20
"""Of all names, and of all pieces: a message to this process holds both."""
# Decoders that give every token the same bytes wherever it stands (after the first).
_CONTEXT_FREE = frozenset({"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})
_LINEAR = _CONTEXT_FREE | {"WordPiece", "BPEDecoder", "CTC"}
_MAX_STEPS = 16
_MAX_GROWTH = 16.0
"""How many times longer all Replace steps together may make a text."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BATCH = 8192


class Texts(msgspec.Struct, frozen=True, array_like=True):
    """Many byte strings: one behind the other, and where each ends (uint32)."""

    data: bytes
    ends: bytes


class PieceRecord(msgspec.Struct, frozen=True, array_like=True):
    """Of one tokenizer. Tokens that are none have no name; special ones have no piece.

    pieces    none for a byte-level tokenizer: names tell
    decoder   as tokenizer.json has it; empty where no token looks at its neighbours
    """

    names: Texts
    special_ids: list[int]
    strip_start: bool
    is_byte_level: bool
    pieces: Texts
    decoder: bytes = b""


def read_pieces(tokenizer: Tokenizer) -> PieceRecord:
    """Asks the tokenizer for all of its tokens. Raises ValueError where they are too much, and for
    a decoder that is not run."""
    decoder = msgspec.json.decode(tokenizer.to_str()).get("decoder")
    steps = _steps(decoder)
    kinds = {step["type"] for step in steps}
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    if size > MAX_TOKENS:
        raise ValueError(f"the tokenizer has the token id {size - 1}")
    names = [tokenizer.id_to_token(i) or "" for i in range(size)]
    if max(map(len, names), default=0) > MAX_NAME_BYTES:
        raise ValueError(f"the tokenizer has a token of more than {MAX_NAME_BYTES} characters")
    is_byte_level = "ByteLevel" in kinds
    regular = bool(steps) and kinds <= _CONTEXT_FREE and _strips_one_space(steps)
    if not regular:
        _check_steps(steps)
    anchor = _anchor(tokenizer, names) if regular and not is_byte_level else None
    pieces: Iterable[bytes] = ()
    if not is_byte_level:
        pieces = _decoded(tokenizer, names, special, anchor, "ByteFallback" in kinds)
    return PieceRecord(
        names=_joined(name.encode() for name in names),
        special_ids=sorted(special),
        strip_start=any(_strips_start(step) for step in steps),
        is_byte_level=is_byte_level,
        pieces=_joined(pieces),
        decoder=b"" if regular and (is_byte_level or anchor is not None) else _json(decoder),
    )


class PieceTable:
    """What each token of a tokenizer stands for.

    `strip_start`: the first character of a text is dropped where it is a space.
    `context_free`: no token's text depends on its neighbours; else `decode` tells.
    """

    def __init__(self, record: PieceRecord) -> None:
        """Raises ValueError for a decoder that is not run."""
        self.special_ids = frozenset(record.special_ids)
        self.strip_start = record.strip_start
        self.context_free = not record.decoder
        self._is_byte_level = record.is_byte_level
        self._names = _Table(record.names)
        self._decoded = _Table(record.pieces)
        self._pieces: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self._decoder = None if self.context_free else _decoder_of(self._names, record.decoder)

    def name(self, token_id: int) -> str:
        """As the vocabulary has it; "" for an id that is none."""
        return self._names.get(token_id).decode()

    def piece(self, token_id: int) -> bytes:
        """The bytes of a token that is not the first; none for special and unknown ids."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._find(token_id)
        return piece

    def text(self, token_id: int) -> str | None:
        """The same as text; None where that depends on the tokens around it."""
        try:
            return self._texts[token_id]
        except KeyError:
            try:
                text: str | None = self.piece(token_id).decode()
            except UnicodeDecodeError:
                text = None
            self._texts[token_id] = text
            return text

    def text_of(self, token_ids: Sequence[int]) -> str | None:
        """Of several; None where one depends on others, or was not asked for yet."""
        texts = [self._texts.get(token_id) for token_id in token_ids]
        return None if None in texts else "".join(cast("list[str]", texts))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Tokens that look at their neighbours, none of them special."""
        assert self._decoder is not None
        text: str = self._decoder.decode(token_ids)
        return text

    def _find(self, token_id: int) -> bytes:
        if token_id in self.special_ids:
            return b""
        if not self._is_byte_level:
            return self._decoded.get(token_id)
        token = self.name(token_id)
        values = [_BYTE_OF.get(char) for char in token]
        whole = [value for value in values if value is not None]
        return bytes(whole) if len(whole) == len(values) else token.encode()


class _Table:
    def __init__(self, texts: Texts) -> None:
        self._data = texts.data
        self._ends = array("I", texts.ends)

    def __len__(self) -> int:
        return len(self._ends)

    def get(self, index: int) -> bytes:
        """Empty where there is none."""
        if not 0 <= index < len(self._ends):
            return b""
        return self._data[self._ends[index - 1] if index else 0 : self._ends[index]]


def _joined(texts: Iterable[bytes]) -> Texts:
    data, ends = bytearray(), array("I")
    for text in texts:
        data += text
        if len(data) > MAX_BYTES:
            raise ValueError(f"the tokenizer's tokens take more than {MAX_BYTES >> 20} MiB")
        ends.append(len(data))
    return Texts(bytes(data), ends.tobytes())


def _decoded(
    tokenizer: Tokenizer,
    names: Sequence[str],
    special: set[int],
    anchor: int | None,
    bytewise: bool,
) -> Iterable[bytes]:
    """Each token as it is decoded behind the anchor, if there is one."""
    before = [] if anchor is None else [anchor]
    skipped = len(tokenizer.decode(before))
    for start in range(0, len(names), _BATCH):
        ids = range(start, min(start + _BATCH, len(names)))
        texts = tokenizer.decode_batch([[*before, i] for i in ids], skip_special_tokens=True)
        for token_id, text in zip(ids, texts, strict=True):
            byte = _BYTE_TOKEN.fullmatch(names[token_id]) if bytewise else None
            if not names[token_id] or token_id in special:
                yield b""
            elif byte is not None:
                yield bytes([int(byte.group(1), 16)])
            else:
                yield text[skipped:].encode()


def _anchor(tokenizer: Tokenizer, names: Sequence[str]) -> int | None:
    """A token of plain letters: behind it no decoder strips anything."""
    added = tokenizer.get_added_tokens_decoder()
    plain = (i for i, name in enumerate(names) if name.isascii() and name.isalpha())
    return next((i for i in plain if i not in added), None)


def _decoder_of(names: _Table, decoder: bytes) -> Tokenizer:
    """A tokenizer that can do nothing but decode."""
    step = msgspec.json.decode(decoder)
    _check_steps(_steps(step))
    vocab = {text.decode(): i for i in range(len(names)) if (text := names.get(i))}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": next(iter(vocab), "")}
    document = {"version": "1.0", "added_tokens": [], "decoder": step, "model": model}
    try:
        return Tokenizer.from_buffer(msgspec.json.encode(document))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"unusable decoder: {error}") from error


def _check_steps(steps: Sequence[dict[str, Any]]) -> None:
    """Raises ValueError unless each step is linear in its text, none makes it much longer and none
    panics: Strip does where it takes characters off the end of a text that has none."""
    growth = 1.0
    for step in steps:
        if step["type"] not in _LINEAR or len(steps) > _MAX_STEPS:
            raise ValueError(f"the tokenizer's decoder has a step {step['type']!r:.40}")
        if step["type"] == "Strip" and step.get("stop"):
            raise ValueError("the tokenizer's decoder strips the ends of texts")
        if step["type"] == "Replace":
            pattern = step.get("pattern", {}).get("String")
            if not pattern:
                raise ValueError("the tokenizer's decoder replaces a regular expression")
            growth *= max(1.0, len(step.get("content", "")) / len(pattern))
    if not growth <= _MAX_GROWTH:
        raise ValueError(f"the tokenizer's decoder makes texts {math.ceil(growth)} times longer")


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    # Sequences may hold sequences.
    return [inner for step in steps for inner in (_steps(step) if "decoders" in step else [step])]


def _strips_start(step: dict[str, Any]) -> bool:
    if step["type"] == "Strip":
        return bool(step.get("start"))
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return False


def _strips_one_space(steps: list[dict[str, Any]]) -> bool:
    """No Strip does more than dropping one space at the very beginning."""
    return all(
        step.get("content") == " " and step.get("start", 0) <= 1 and not step.get("stop")
        for step in steps
        if step["type"] == "Strip"
    )


def _byte_chars() -> dict[str, int]:
    """GPT-2's alphabet: each byte as a printable character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + n): byte for n, byte in enumerate(rest)}


_BYTE_OF = _byte_chars()
