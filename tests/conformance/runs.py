"""Conformance of the gateway's text work with the world's data: templates, tokenizers, texts.

The data is a folder with templates/, tokenizers/ and prompts/ as tests/data/README.md describes
them. What runs is the product's own code, from the request's JSON to the bytes of the answer. A
case may differ only where a reason for it is stated here.
"""

import functools
import gzip
import json
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from jinja2 import Undefined
from tokenizers import Tokenizer, normalizers

from engine.protocol import SamplingParams
from gateway.answer.answer import Chunks
from gateway.answer.choice import Piece
from gateway.api.tools.output_parser import IdentityParser
from gateway.api.wire import decode
from gateway.text import templates
from gateway.text.detokenize import TextStream
from gateway.text.pieces import PieceTable
from gateway.text.templates import ChatTemplate
from gateway.text.tokenization import TextCodec
from gateway.types import HostedModel, PreparedRequest
from tests.conformance.tokenizer_files import from_gpt2, from_spm, from_tiktoken

# When the expected texts of templates that show a date were made.
_CLOCK = datetime(2025, 7, 10, 12)
_NOT_AS_PYTHON = {
    "MadeAgents/Hammer2.1": "expected text is JavaScript's: a list in a string is JSON there, and "
    "Python's repr in Jinja2 and so in transformers",
}
_GRAPHEMES = (
    "the tokenizers library folds whole graphemes, sentencepiece the longest beginning it knows"
)
_CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"
_MODEL = HostedModel("m", "r", "p", 1 << 20, 1 << 20, 0)
_REQUEST = PreparedRequest("id", "completion", _MODEL, [0], 1, SamplingParams(), [])


@dataclass
class Count:
    """Cases of one set."""

    name: str
    equal: int = 0
    total: int = 0
    known: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    def add(self, case: str, is_equal: bool) -> None:
        """One more case."""
        self.total += 1
        if is_equal:
            self.equal += 1
        else:
            self.differing.append(case)


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """A gzipped file of JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def run_templates(data: Path) -> list[Count]:
    """Real models' templates, rendered, against the expected texts."""
    clock = mock.Mock(wraps=datetime)
    clock.now.return_value = _CLOCK
    with mock.patch.object(templates, "datetime", clock):
        return list(_template_counts(data / "templates"))


def _template_counts(folder: Path) -> Iterator[Count]:
    count = Count("templates/chat_template_cases")
    for row in rows(folder / "chat_template_cases.jsonl.gz"):
        is_equal = _render(row["chat_template"], row["data"]) == row["expected"]
        if not is_equal and row["model"] in _NOT_AS_PYTHON:
            count.total += 1
            count.known.append(f"{row['model']}: {_NOT_AS_PYTHON[row['model']]}")
            continue
        count.add(f"{row['model']} {row['group']}", is_equal)
    yield count
    count = Count("templates/chat_templates_golden")
    for row in rows(folder / "chat_templates_golden.jsonl.gz"):
        for n, case in enumerate(row["cases"]):
            if "expected" not in case:
                count.known.append(f"{row['name']} {n}: {case.get('error', 'refused')}")
                continue
            values = {name: value for name, value in case.items() if name != "expected"}
            count.add(f"{row['name']} {n}", _render(row["template"], values) == case["expected"])
    yield count


def _render(source: str, data: dict[str, Any]) -> str:
    values = {name: value for name, value in data.items() if name != "messages"}
    # transformers always says it; the data's makers left it out where it is not given.
    values.setdefault("add_generation_prompt", Undefined())
    try:
        return ChatTemplate(source, {}).render(data["messages"], **values)
    except templates.TemplateRefused as error:
        return f"refused: {error}"


def run_tokenizers(data: Path) -> list[Count]:
    """Golden ids through the codec, and the texts back through a stream."""
    folder = data / "tokenizers"
    texts = {row["i"]: row["s"] for row in rows(folder / "golden_texts.jsonl.gz")}
    counts = []
    for name, tokenizer, golden, is_literal in _tokenizers(folder):
        codec = TextCodec(tokenizer, ChatTemplate(_CHAT, {}), [], {})
        encode = codec.encode_literal if is_literal else codec.encode_prompt
        ids = Count(f"tokenizers/{name} ids")
        back = Count(f"tokenizers/{name} text back")
        for row in rows(folder / f"golden_{golden}.jsonl.gz"):
            text = texts[row["i"]]
            is_equal = encode(text) == row["ids"]
            if not is_equal and name.startswith("spm_") and _stacks_marks(text):
                ids.total += 1
                ids.known.append(f"{row['i']} {text[:60]!r}: {_GRAPHEMES}")
            else:
                ids.add(f"{row['i']} {text[:60]!r}", is_equal)
            wanted = _without_controls(codec, row["ids"], row.get("decoded", text))
            back.add(f"{row['i']} {text[:60]!r}", streamed(codec, row["ids"]) == wanted)
        counts += [ids, back]
    return counts


def _stacks_marks(text: str) -> bool:
    """Whether a letter carries several combining marks."""
    marks = [unicodedata.combining(char) > 0 for char in text]
    return any(a and b for a, b in pairwise(marks))


def _without_controls(codec: TextCodec, ids: Sequence[int], decoded: str) -> str:
    """The golden texts show control tokens, and unknown ones as sentencepiece does; answers do
    neither."""
    pieces = pieces_of(codec)
    for token_id in pieces.special_ids.intersection(ids):
        name = pieces.name(token_id)
        decoded = decoded.replace(" ⁇ " if name == "<unk>" else name, "")
    return decoded


def _tokenizers(folder: Path) -> Iterator[tuple[str, Tokenizer, str, bool]]:
    """Name, tokenizer, name of its golden file, and whether control tokens are plain text there."""

    def raw(name: str) -> bytes:
        return gzip.decompress((folder / f"{name}.gz").read_bytes())

    for entry in json.loads((folder / "tokenizers.json").read_bytes()):
        name, golden = entry["file"].removesuffix(".gz"), entry.get("golden", "")
        golden = golden.removeprefix("golden_").removesuffix(".jsonl.gz")
        if entry["kind"] == "hf":
            yield name, Tokenizer.from_buffer(raw(name)), golden, False
        elif entry["kind"] == "spm":
            yield name, from_spm(raw(name)), golden, True
        elif entry["kind"] == "tiktoken-gpt2":
            yield name, from_tiktoken(raw(name)), golden, True
    if not (folder / "gpt2.encoder.json.gz").is_file():
        return
    gpt2 = from_gpt2(raw("gpt2.encoder.json"), raw("gpt2.vocab.bpe"))
    yield "gpt2.encoder.json + vocab.bpe", gpt2, "gpt2.tokenizer.json", False


def run_texts(data: Path) -> list[Count]:
    """Every script and every naughty string from a request's body to an answer's bytes, with the
    text cut where the tokenizer cuts it and at every byte."""
    sets = {
        "udhr": [row["text"] for row in rows(data / "prompts/udhr.jsonl.gz")],
        "naughty_strings": [row["s"] for row in rows(data / "prompts/naughty_strings.jsonl.gz")],
        "golden_texts": [row["s"] for row in rows(data / "tokenizers/golden_texts.jsonl.gz")],
    }
    counts = []
    for name, tokenizer, _, _ in _tokenizers(data / "tokenizers"):
        if name.startswith(("tiny_qwen2", "spm_")):
            continue  # fixtures that lack bytes or fold characters: no text comes back from them
        codec = TextCodec(tokenizer, ChatTemplate(_CHAT, {}), [], {})
        singles = byte_tokens(tokenizer)
        is_nfc = type(tokenizer.normalizer) is normalizers.NFC
        for kind, texts in sets.items():
            tokens = Count(f"texts/{kind} {name} by tokens")
            single = Count(f"texts/{kind} {name} by bytes")
            for n, text in enumerate(texts):
                wanted = unicodedata.normalize("NFC", text) if is_nfc else text
                tokens.add(f"{n} {text[:60]!r}", _round_trip(codec, text) == wanted)
                ids = [singles[byte] for byte in text.encode()]
                single.add(f"{n} {text[:60]!r}", answered(codec, ids) == text)
            counts += [tokens, single]
    return counts


def byte_tokens(tokenizer: Tokenizer) -> list[int]:
    """The token of each byte; -1 for one it lacks, such as a byte that no UTF-8 has."""
    level = {byte: tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    if None in level.values():
        chars = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        rest = [byte for byte in range(256) if byte not in chars]
        level = {byte: tokenizer.token_to_id(chr(byte)) for byte in chars}
        level |= {byte: tokenizer.token_to_id(chr(256 + n)) for n, byte in enumerate(rest)}
    found = [level[byte] for byte in range(256)]
    return [-1 if token_id is None else token_id for token_id in found]


def _round_trip(codec: TextCodec, text: str) -> str:
    """As a chat's message it becomes a prompt, and those tokens become an answer."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    asked = decode("chat", json.dumps(body).encode())
    return streamed(codec, codec.encode_chat(asked.messages)[0])


@functools.lru_cache(maxsize=4)
def pieces_of(codec: TextCodec) -> PieceTable:
    """As a gateway gets them."""
    return PieceTable(codec.facts().pieces)


def streamed(codec: TextCodec, ids: Sequence[int]) -> str:
    """Token by token, with a stop string that never comes."""
    stream = TextStream(pieces_of(codec), ("\0never\0",), [])
    return "".join(stream.push([token_id]) for token_id in ids) + stream.finish()


def answered(codec: TextCodec, ids: Sequence[int]) -> str:
    """The same through the events a client reads; none may hold a broken character."""
    stream = TextStream(pieces_of(codec), (), [], keep_leading_space=True)
    chunks, parser = Chunks(_REQUEST, pieces_of(codec)), IdentityParser()
    parts = [stream.push([token_id]) for token_id in ids] + [stream.finish()]
    raw = b"".join(chunks.piece(Piece(0, parser.feed(part))) for part in parts if part)
    events = [block.removeprefix(b"data: ") for block in raw.split(b"\n\n") if block]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


RUNS: dict[str, Callable[[Path], list[Count]]] = {
    "templates": run_templates,
    "tokenizers": run_tokenizers,
    "texts": run_texts,
}
