"""Tokenizers in the formats of their makers as `tokenizers.Tokenizer`, for conformance runs.

Comes in: the bytes of a sentencepiece model, of a tiktoken file, or of GPT-2's two files. Goes out:
a tokenizer that splits the same way. Hosted models bring a tokenizer.json of their own; this shows
that such a file, made from the original, gives what the original gives.
"""

import base64
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "▁"


@dataclass
class SpmModel:
    """What a sentencepiece ModelProto says, as far as it matters for splitting."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    model_type: int = _UNIGRAM
    byte_fallback: bool = False
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True

    @property
    def unk_id(self) -> int:
        """The piece that stands for what is in no piece."""
        return next(i for i, (_, _, kind) in enumerate(self.pieces) if kind == _UNKNOWN)


def read_spm(raw: bytes) -> SpmModel:
    """From a `.model` file; field numbers are those of sentencepiece_model.proto."""
    model = SpmModel()
    for number, value in _fields(raw):
        if number == 1:
            piece = dict(_fields(value))
            score = struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0
            model.pieces.append((piece[1].decode(), score, piece.get(3, _NORMAL)))
        elif number == 2:
            trainer = dict(_fields(value))
            model.model_type = trainer.get(3, _UNIGRAM)
            model.byte_fallback = bool(trainer.get(35, 0))
        elif number == 3:
            spec = dict(_fields(value))
            model.charsmap = spec.get(2, b"")
            model.add_dummy_prefix = bool(spec.get(3, 1))
            model.remove_extra_whitespaces = bool(spec.get(4, 1))
    return model


def from_spm(raw: bytes) -> Tokenizer:
    """A sentencepiece model, BPE or unigram."""
    spm = read_spm(raw)
    if spm.model_type == _BPE:
        vocab = {piece: i for i, (piece, _, _) in enumerate(spm.pieces)}
        tokenizer = Tokenizer(
            models.BPE(
                vocab,
                _spm_merges(spm),
                unk_token=spm.pieces[spm.unk_id][0],
                fuse_unk=True,
                byte_fallback=spm.byte_fallback,
            )
        )
    else:
        scored = [(piece, score) for piece, score, _ in spm.pieces]
        tokenizer = Tokenizer(models.Unigram(scored, spm.unk_id, spm.byte_fallback))
    steps: list[Any] = [normalizers.Precompiled(spm.charsmap)] if spm.charsmap else []
    if spm.remove_extra_whitespaces:
        steps += [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if spm.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    steps.append(normalizers.Replace(" ", _SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if spm.add_dummy_prefix else []),
        ]
    )
    kinds = {_CONTROL: True, _UNKNOWN: True, _USER_DEFINED: False}
    tokenizer.add_tokens(
        [
            AddedToken(piece, special=kinds[kind], normalized=False)
            for piece, _, kind in spm.pieces
            if kind in kinds
        ]
    )
    return tokenizer


def from_tiktoken(raw: bytes) -> Tokenizer:
    """Lines of base64 and rank, split as GPT-2 splits."""
    ranks = {
        base64.b64decode(token): int(rank)
        for token, rank in (line.split() for line in raw.splitlines() if line)
    }
    merges: list[tuple[str, str]] = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = _last_merge(token, rank, ranks)
            merges.append((_chars(left), _chars(right)))
    return _byte_level({_chars(token): rank for token, rank in ranks.items()}, merges)


def from_gpt2(encoder: bytes, bpe: bytes) -> Tokenizer:
    """encoder.json and vocab.bpe."""
    lines = [line for line in bpe.decode().split("\n")[1:] if line]
    merges = [(left, right) for left, right in (line.split(" ") for line in lines)]
    tokenizer = _byte_level(json.loads(encoder), merges)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def _byte_level(vocab: Mapping[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(dict(vocab), merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _spm_merges(spm: SpmModel) -> list[tuple[str, str]]:
    """sentencepiece keeps no merges, only each piece's score: any two pieces that make a third.

    Where scores are equal (Mistral's runs of spaces) it merges from the left, so that a run grows
    to its longest piece; here the longer piece comes first, which does the same.
    """
    usable = {piece: score for piece, score, kind in spm.pieces if kind in (_NORMAL, _USER_DEFINED)}
    order = {piece: i for i, piece in enumerate(usable)}
    merges = [
        (-score, -len(piece), order[piece[:cut]], order[piece[cut:]], piece[:cut], piece[cut:])
        for piece, score in usable.items()
        for cut in range(1, len(piece))
        if piece[:cut] in usable and piece[cut:] in usable
    ]
    return [(left, right) for *_, left, right in sorted(merges)]


def _last_merge(token: bytes, rank: int, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts a token was made of: merge its bytes by all lower ranks, two parts are left."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [(ranks.get(parts[i] + parts[i + 1], rank), i) for i in range(len(parts) - 1)]
        best, at = min(pairs)
        if best >= rank:
            raise ValueError(f"token {token!r} is not made by merges")
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _chars(token: bytes) -> str:
    """A token's bytes in GPT-2's alphabet of printable characters."""
    return "".join(_CHAR_OF[byte] for byte in token)


def _char_of() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {b: chr(256 + n) for n, b in enumerate(rest)}


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Field number and value of a protobuf message: varints as int, the rest as bytes."""
    at = 0
    while at < len(raw):
        key, at = _varint(raw, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(raw, at)
            yield number, value
            continue
        size = 8 if wire == 1 else 4
        if wire == 2:
            size, at = _varint(raw, at)
        yield number, raw[at : at + size]
        at += size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


_CHAR_OF = _char_of()
