"""What `bench.cache` reads: pairs, streams, traps, and their vectors.

Vectors are MiniLM's (mean of the token states, length 1), made in this process by transformers and
kept beside the results of earlier runs, so that only new texts are embedded. Nothing of the
restricted files is written anywhere but into that folder of the user's choice.
"""

import gzip
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import BertModel

from gateway.policy.cache_reading import Reading, read

Vectors: TypeAlias = NDArray[np.float32]
TRAPS = Path(__file__).with_name("cache_traps.jsonl")
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
LONGEST_TOKENS = 256
_BATCH = 64


@dataclass(frozen=True, slots=True)
class Pair:
    """Two questions, and whether one answer serves both. `kind` and `held` are the traps'."""

    a: str
    b: str
    same: bool
    kind: str = ""
    held: bool = False


@dataclass(frozen=True, slots=True)
class Stream:
    """Questions with their answers' ids: equal ids, equal answers."""

    name: str
    texts: tuple[str, ...]
    answers: NDArray[np.int64]
    vectors: Vectors
    similar: NDArray[np.float32]
    """The cosine of each two."""
    readings: tuple[Reading, ...]
    """What the guards see, so that it is not read for each neighbour again."""


def pairs(path: Path) -> list[Pair]:
    """Rows of {a, b, label}."""
    return [Pair(str(row["a"]), str(row["b"]), bool(row["label"])) for row in rows(path)]


def traps() -> list[Pair]:
    """Our own: `held` rows were never looked at while the guards were made."""
    lines = TRAPS.read_text(encoding="utf-8").splitlines()
    return [
        Pair(row["a"], row["b"], bool(row["same"]), row["kind"], bool(row["held"]))
        for row in map(json.loads, lines)
    ]


def stream(path: Path, embedder: "Embedder") -> Stream:
    """Rows of {text, intent}; a question outside all intents ("oos") has an answer of its own."""
    found = rows(path)
    names = [
        str(row["intent"]) if row["intent"] != "oos" else f"oos {i}" for i, row in enumerate(found)
    ]
    ids = {name: i for i, name in enumerate(dict.fromkeys(names))}
    texts = tuple(str(row["text"]) for row in found)
    answers = np.array([ids[name] for name in names], dtype=np.int64)
    return streamed(path.name.partition(".")[0], texts, answers, embedder.embed(texts))


def streamed(
    name: str, texts: Sequence[str], answers: NDArray[np.int64], vectors: Vectors
) -> Stream:
    """A stream with what follows from its questions."""
    readings = tuple(read(text) for text in texts)
    return Stream(name, tuple(texts), answers, vectors, vectors @ vectors.T, readings)


def rows(path: Path) -> list[dict[str, Any]]:
    """A `.jsonl.gz`, parsed."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


class Embedder:
    """MiniLM in a folder with model.safetensors and tokenizer.json; `kept` holds what it made."""

    def __init__(self, folder: Path, kept: Path) -> None:
        weights = folder / "model.safetensors"
        if hashlib.sha256(weights.read_bytes()).hexdigest() != WEIGHTS_SHA256:
            raise ValueError(f"{weights} is not the file the figures were made with")
        self._folder = folder
        self._kept = kept
        self._known: dict[str, NDArray[np.float32]] = {}
        if kept.exists():
            with np.load(kept) as loaded:
                self._known = dict(zip(loaded["texts"].tolist(), loaded["vectors"], strict=True))

    def embed(self, texts: Sequence[str]) -> Vectors:
        """One row a text."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            self._known.update(zip(new, self._made(new), strict=True))
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            np.savez(
                self._kept,
                texts=np.array(list(self._known)),
                vectors=np.array(list(self._known.values())),
            )
        return np.stack([self._known[text] for text in texts])

    def _made(self, texts: Sequence[str]) -> Iterable[NDArray[np.float32]]:
        model: Any = BertModel.from_pretrained(self._folder, local_files_only=True)
        model.eval()
        tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        tokenizer.enable_truncation(LONGEST_TOKENS)
        tokenizer.enable_padding()
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        vectors = np.zeros((len(texts), model.config.hidden_size), np.float32)
        with torch.inference_mode():
            for start in range(0, len(order), _BATCH):
                chosen = order[start : start + _BATCH]
                encoded = tokenizer.encode_batch([texts[i] for i in chosen])
                ids = torch.tensor([one.ids for one in encoded])
                mask = torch.tensor([one.attention_mask for one in encoded])
                states = model(input_ids=ids, attention_mask=mask).last_hidden_state
                mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
                vectors[chosen] = torch.nn.functional.normalize(mean, dim=-1).numpy()
        return list(vectors)
