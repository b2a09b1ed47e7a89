"""Data for the demo models: corpora in, tokenizers and rows of token ids out.

First stage of `bench/train_demo.py`. What lives here: reading a corpus, its train / held-out
split, the byte-level BPE tokenizer, and the rows that training and evaluation see (raw windows
and packed chats). What does not: how chats are made (`demo_chats.py`), models, optimisers.

A `RowMaker` with the same seed gives the same rows.
"""

import gzip
import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from bench.demo_chats import BOS, EOS, SPECIAL_TOKENS, code_chats, prose_chats

VOCAB_SIZE = 2048
HELD_OUT_SHARE = 0.05
IGNORE = -1  # target id of padding


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text of one model; the last `HELD_OUT_SHARE` of its own text is never trained on."""

    name: str
    train: str
    held_out: str
    extra: str = ""

    @property
    def is_code(self) -> bool:
        """Whether the text is Python files rather than prose or verse."""
        return self.name == "python"

    def chats(self, text: str, rng: random.Random) -> Iterator[str]:
        """Endless rendered chats about `text`, a part of this corpus."""
        return code_chats(self.documents(text), rng) if self.is_code else prose_chats(text, rng)

    def documents(self, text: str) -> list[str]:
        """The parts of `text` that end for a reason: Python files, or the whole of a book."""
        if not self.is_code:
            return [text]
        return [part for part in re.split(r"(?m)^(?=# file: )", text) if part.strip()]


def read_corpus(data: Path, name: str, extra_names: tuple[str, ...] = ()) -> Corpus:
    """Read `data`/<name>.txt.gz, and the texts that only add English to it."""
    text = _read_text(data, name)
    cut = int(len(text) * (1.0 - HELD_OUT_SHARE))
    extra = "\n\n".join(_plain_ascii(_read_text(data, other)) for other in extra_names)
    return Corpus(name, text[:cut], text[cut:], extra)


def _read_text(data: Path, name: str) -> str:
    with gzip.open(data / f"{name}.txt.gz", "rt", encoding="utf-8") as file:
        text = file.read()
    # Verse and code live by their line breaks; a novel's come from the width of a printed page.
    return text if name in {"shakespeare", "python"} else _join_wrapped_lines(text)


def _join_wrapped_lines(text: str) -> str:
    """One line a paragraph. The bytes stay as many, so bits per byte keep their meaning."""
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text)


def _plain_ascii(text: str) -> str:
    """Typographic quotes and _emphasis_ typed the way the Sherlock file types them."""
    quotes: dict[str, str | int | None] = {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "_": "",
    }
    return text.translate(str.maketrans(quotes))


def train_tokenizer(corpus: Corpus) -> Tokenizer:
    """Byte-level BPE of exactly `VOCAB_SIZE` ids.

    All 256 bytes are ids, so any UTF-8 text round-trips. There is no post-processor: nothing is
    added to a text unless its caller writes it.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([corpus.train, corpus.extra], trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"{corpus.name} is too small for {VOCAB_SIZE} ids")
    return tokenizer


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of one of `SPECIAL_TOKENS`; KeyError for anything that is not a token."""
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise KeyError(token)
    return int(token_id)


class RowMaker:
    """Rows of `length` + 1 ids (inputs and shifted targets): half raw windows, half chats."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, length: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._tokenizer = tokenizer
        self._length = length
        self._main = encode_stream(tokenizer, corpus.documents(corpus.train))
        self._extra = encode_stream(tokenizer, [corpus.extra]) if corpus.extra else None
        self._chats = corpus.chats(corpus.train, self._rng)
        self._bos = special_id(tokenizer, BOS)

    @property
    def num_tokens(self) -> int:
        """Length of the model's own training text."""
        return self._main.numel()

    def batch(self, rows: int, extra_share: float) -> Tensor:
        """int64 [rows, length + 1]; on average `extra_share` of them from the extra texts."""
        return torch.stack([self._row(extra_share) for _ in range(rows)])

    def _row(self, extra_share: float) -> Tensor:
        if self._extra is not None and self._rng.random() < extra_share:
            return self._window(self._extra)
        if self._rng.random() < 0.5:
            return self._window(self._main)
        return torch.tensor(pack(self._tokenizer, self._chats, self._length + 1))

    def _window(self, stream: Tensor) -> Tensor:
        start = self._rng.randrange(stream.numel() - self._length)
        row = stream[start : start + self._length + 1].clone()
        if self._rng.random() < 0.5:  # completions arrive both with and without a BOS
            row[0] = self._bos
        return row


def encode_stream(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All texts behind one another, each between BOS and EOS: int64 [num_tokens]."""
    bos, eos = special_id(tokenizer, BOS), special_id(tokenizer, EOS)
    ids = itertools.chain.from_iterable([bos, *tokenizer.encode(t).ids, eos] for t in texts)
    return torch.tensor(list(ids), dtype=torch.int64)


def pack(tokenizer: Tokenizer, chats: Iterator[str], length: int) -> list[int]:
    """`length` ids of chats in a row, the last one cut. The first is at position 0, as served."""
    ids: list[int] = []
    while len(ids) < length:
        ids += tokenizer.encode(next(chats)).ids
    return ids[:length]


def held_out_rows(corpus: Corpus, tokenizer: Tokenizer, length: int) -> Tensor:
    """The held-out text in windows side by side, each behind a BOS: int64 [n, length + 1].

    The last row is padded with `IGNORE`.
    """
    ids = tokenizer.encode(corpus.held_out).ids
    bos = special_id(tokenizer, BOS)
    rows = [[bos, *ids[i : i + length]] for i in range(0, len(ids), length)]
    return torch.tensor([row + [IGNORE] * (length + 1 - len(row)) for row in rows])


def held_out_chat_rows(corpus: Corpus, tokenizer: Tokenizer, length: int, rows: int = 24) -> Tensor:
    """Chats about the held-out text, always the same ones: int64 [rows, length + 1]."""
    chats = corpus.chats(corpus.held_out, random.Random(0))
    return torch.tensor([pack(tokenizer, chats, length + 1) for _ in range(rows)])
