"""What `bench.cache` reads: pairs, streams, traps, and their vectors.

Vectors are MiniLM's (mean of the token states, length 1), and so are the states of words, made in
this process by transformers and kept beside the results of earlier runs, so that only new texts are
embedded. Nothing of the
restricted files is written anywhere but into that folder of the user's choice.
"""

import gzip
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import BertModel

from gateway.cache.policy.cache_choice import PairView
from gateway.cache.question_score import QuestionReading, read_question, view
from gateway.text.encoder_codec import load_encoder_codec
from gateway.text.prepare_messages import EncoderInput

Vectors: TypeAlias = NDArray[np.float32]
TRAPS = Path(__file__).with_name("cache_traps.jsonl")
FRESH = Path(__file__).with_name("cache_fresh.json")
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
    readings: tuple[QuestionReading, ...]
    pairs: dict[tuple[int, int], PairView] = field(default_factory=dict)
    """Those that were asked for."""

    def pair(self, i: int, j: int) -> PairView:
        """What the second says of the first."""
        found = self.pairs.get((i, j))
        if found is None:
            cosine = float(self.similar[i, j])
            found = self.pairs[i, j] = view(self.readings[i], self.readings[j], cosine)
        return found


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


def fresh() -> list[Pair]:
    """Traps and paraphrases that nothing was fitted to; `kind` is their style."""
    found = json.loads(FRESH.read_text(encoding="utf-8"))
    return [
        Pair(a, b, name == "paraphrases", style)
        for name, styles in found.items()
        for style, rows in styles.items()
        for a, b in rows
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
    vectors, readings = zip(*embedder.read(texts), strict=True)
    return streamed(path.name.partition(".")[0], texts, answers, np.array(vectors), readings)


def streamed(
    name: str,
    texts: Sequence[str],
    answers: NDArray[np.int64],
    vectors: Vectors,
    readings: Sequence[QuestionReading],
) -> Stream:
    """A stream with what follows from its questions."""
    return Stream(name, tuple(texts), answers, vectors, vectors @ vectors.T, tuple(readings))


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
        self._codec = load_encoder_codec(folder)
        self._known: dict[str, tuple[Vectors, NDArray[np.int8]]] = {}
        if kept.exists():
            with np.load(kept) as loaded:
                ends = np.cumsum(loaded["counts"])
                states = np.split(loaded["states"], ends[:-1])
                found = zip(loaded["vectors"], states, strict=True)
                self._known = dict(zip(loaded["texts"].tolist(), found, strict=True))

    def read(self, texts: Sequence[str]) -> list[tuple[Vectors, QuestionReading]]:
        """The vector and the reading of each text."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            self._known.update(zip(new, self._made(new), strict=True))
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            np.savez(
                self._kept,
                texts=np.array(list(self._known)),
                vectors=np.array([vector for vector, _ in self._known.values()]),
                counts=np.array([len(states) for _, states in self._known.values()]),
                states=np.concatenate([states for _, states in self._known.values()]),
            )
        readings = []
        for text, encoded in zip(texts, self._encoded(texts), strict=True):
            vector, states = self._known[text]
            found = read_question(text, encoded.spans[: len(states)], states.astype(np.float32))
            readings.append((vector, found))
        return readings

    def _encoded(self, texts: Sequence[str]) -> list[EncoderInput]:
        return self._codec.encode_words(texts, 10**6)

    def _made(self, texts: Sequence[str]) -> Iterable[tuple[Vectors, NDArray[np.int8]]]:
        model: Any = BertModel.from_pretrained(self._folder, local_files_only=True)
        model.eval()
        encoded = self._encoded(texts)
        groups: dict[int, list[int]] = {}
        for i, one in enumerate(encoded):
            groups.setdefault(min(len(one.ids), LONGEST_TOKENS), []).append(i)
        found: dict[int, tuple[Vectors, NDArray[np.int8]]] = {}
        with torch.inference_mode():
            for length, members in sorted(groups.items()):
                for start in range(0, len(members), _BATCH):
                    chosen = members[start : start + _BATCH]
                    ids = torch.tensor([encoded[i].ids[:length] for i in chosen])
                    mask = torch.ones_like(ids)
                    states = model(input_ids=ids, attention_mask=mask).last_hidden_state.numpy()
                    for i, rows in zip(chosen, states, strict=True):
                        vector = rows.mean(0)
                        words = [rows[a:b].mean(0) for a, b in encoded[i].tokens if b <= length]
                        table = np.array(words, np.float32).reshape(-1, rows.shape[1])
                        table /= np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-9)
                        states_of: NDArray[np.int8] = np.rint(table * 127).astype(np.int8)
                        found[i] = np.asarray(vector / np.linalg.norm(vector)), states_of
        return [found[i] for i in range(len(texts))]
