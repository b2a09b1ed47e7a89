"""The conformance runs over the excerpts in tests/data, and the readers of tokenizer files.

POLYHOST_CONFORMANCE_DATA names a folder with the whole data sets in the same layout.
"""

import base64
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.runs import RUNS
from tests.conformance.tokenizer_files import from_gpt2, from_spm, from_tiktoken, read_spm

EXCERPTS = Path(__file__).parent.parent / "data" / "conformance"
DATA = Path(os.environ.get("POLYHOST_CONFORMANCE_DATA", EXCERPTS))
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


@pytest.mark.parametrize("name", RUNS)
def test_every_case_of_the_excerpts_is_equal(name: str) -> None:
    counts = RUNS[name](DATA)
    assert all(count.total > 20 for count in counts)
    assert not [case for count in counts for case in count.differing]


def test_a_difference_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.conformance.runs._NOT_AS_PYTHON", {})
    differing = [case for count in RUNS["templates"](EXCERPTS) for case in count.differing]
    assert any(case.startswith("MadeAgents/Hammer2.1") for case in differing)


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def spm(pieces: list[tuple[str, float, int]], model_type: int, keeps_spaces: bool) -> bytes:
    """A sentencepiece model file."""
    raw = b""
    for piece, score, kind in pieces:
        body = field(1, piece.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score)
        raw += field(1, body + field(3, kind))
    raw += field(2, field(3, model_type) + field(35, int(keeps_spaces)))
    return raw + field(3, field(3, 1) + field(4, int(not keeps_spaces)))


def bpe_pieces() -> Iterator[tuple[str, float, int]]:
    yield from [("<unk>", 0, UNKNOWN), ("<s>", 0, CONTROL)]
    yield from ((f"<0x{byte:02X}>", 0, BYTE) for byte in range(256))
    words = ["\u2581", "a", "b", "ab", "\u2581ab", "\u2581\u2581", "\u2581\u2581\u2581"]
    for rank, word in enumerate(words):
        # Runs of spaces all have the same score in Mistral's, below all others.
        yield word, (-1e9 if set(word) == {"\u2581"} else -float(rank)), NORMAL


def test_a_sentencepiece_bpe_model() -> None:
    raw = spm(list(bpe_pieces()), 2, keeps_spaces=True)
    assert read_spm(raw).byte_fallback
    tokenizer = from_spm(raw)
    for text, tokens in {
        "ab": ["\u2581ab"],
        "a ab": ["\u2581", "a", "\u2581ab"],
        "\u00e9": ["\u2581", "<0xC3>", "<0xA9>"],
        # From the left, to the longest: seven with the one in front.
        " " * 6: ["\u2581\u2581\u2581", "\u2581\u2581\u2581", "\u2581"],
        "<0x41>": ["\u2581", *(f"<0x{byte:02X}>" for byte in b"<0x41>")],
    }.items():
        encoding = tokenizer.encode(text)
        assert encoding.tokens == tokens
        assert tokenizer.decode(encoding.ids) == text


def test_a_sentencepiece_unigram_model() -> None:
    pieces = [("<unk>", 0.0, UNKNOWN), ("\u2581", -2.0, NORMAL), ("\u2581ab", -1.0, NORMAL)]
    tokenizer = from_spm(spm([*pieces, ("b", -3.0, NORMAL)], 1, keeps_spaces=False))
    assert tokenizer.encode("  ab \n  b  ").tokens == ["\u2581ab", "\u2581", "\n", "\u2581", "b"]
    assert tokenizer.encode("").ids == []


def test_a_tiktoken_file() -> None:
    singles = [bytes([byte]) for byte in range(256)]
    tokens = [*singles, b"th", b"he", b"the", b" the"]
    lines = [base64.b64encode(t) + b" " + str(n).encode() for n, t in enumerate(tokens)]
    tokenizer = from_tiktoken(b"\n".join(lines))
    assert tokenizer.encode("the the he").ids == [258, 259, 32, 257]
    assert tokenizer.decode([259, 195, 169]) == " the\u00e9"


def test_gpt2_files() -> None:
    encoder = b'{"t": 0, "h": 1, "th": 2, "<|endoftext|>": 3}'
    tokenizer = from_gpt2(encoder, b"#version: 0.2\nt h\n")
    assert tokenizer.encode("thth<|endoftext|>").ids == [2, 2, 3]
