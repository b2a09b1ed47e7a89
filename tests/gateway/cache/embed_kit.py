"""An embedder whose vectors anybody can work out: a bag of words, over a scripted worker."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from engine.protocol import (
    AckUsage,
    Finish,
    LoadModel,
    ModelStatus,
    Submit,
    TokenDelta,
    ToWorker,
    Usage,
    WorkerStatus,
)
from gateway.cache.embedder import EmbeddingWorker
from gateway.types import HostedModel
from gateway.workers.worker_client import LossCause, WorkerListener, WorkerUnavailable
from tests.gateway.edge_kit import PLENTY, Kit, make_kit

NAME = "bag"
VOCAB = ["[UNK]", *(f"w{n}" for n in range(64)), *"abcdefghijklmnopqrstuvwxyz"]
VOCAB += ["how", "do", "can", "reset", "change", "my", "password", "the", "please", "what", "is"]
VOCAB += ["way", "to", "hours", "open", "when", "are", "you", "not", "paris", "york", "from", "new"]
VOCAB += ["flights", "refund", "get", "forgot", "it", "?", "."]
DIM = len(VOCAB)


class ScriptedWorker:
    """Implements WorkerClient: answers what it is sent, on the event loop."""

    worker_id = "embedder-0"

    def __init__(self) -> None:
        self.sent: list[ToWorker] = []
        self.is_connected = True
        self.answers = True
        self.state = "resident"
        self._listener: WorkerListener | None = None

    @property
    def listener(self) -> WorkerListener:
        assert self._listener is not None
        return self._listener

    def count(self, kind: type) -> int:
        """Messages of this kind so far."""
        return Counter(map(type, self.sent))[kind]

    def start(self, listener: WorkerListener) -> None:
        self._listener = listener
        listener.on_connected(self.worker_id, "e1")

    def send(self, message: ToWorker) -> None:
        if not self.is_connected or self._listener is None:
            raise WorkerUnavailable("gone")
        self.sent.append(message)
        if isinstance(message, LoadModel):
            self.tell(message.model_id)
        elif isinstance(message, Submit) and self.answers:
            asyncio.get_running_loop().call_soon(self.answer, message)

    def lose(self, reason: str, cause: LossCause) -> None:
        self.listener.on_lost(self.worker_id, "e1", reason, cause)

    def close(self) -> None:
        self.is_connected = False

    def tell(self, name: str) -> None:
        """A heartbeat."""
        row = ModelStatus(name, self.state, 1, 0, 0, 0, 0.0)  # type: ignore[arg-type]
        status = WorkerStatus("e1", "w", 1, 1, 1.0, 1, 1, {}, [row], [], [], {})
        self.listener.on_status(self.worker_id, status)

    def answer(self, message: Submit, vectors: bytes | None = None) -> None:
        """Rows of a request: how often each token is in an input; then those of its tokens."""
        assert message.encode is not None
        ids, rows = message.prompt_token_ids, []
        for length in message.encode.lengths:
            rows.append(np.bincount(ids[:length], minlength=DIM))
            ids = ids[length:]
        if message.encode.states:  # Of each token: itself alone.
            rows += list(np.eye(DIM)[message.prompt_token_ids])
        told = np.array(rows, dtype="<f4").tobytes() if vectors is None else vectors
        finish = Finish("stop", Usage(len(message.prompt_token_ids), 0, 0, 0.0))
        delta = TokenDelta(message.request_id, message.attempt, [], finish, vectors=told)
        self.listener.on_deltas(self.worker_id, "e1", [delta])

    @property
    def num_unacked(self) -> int:
        """Requests answered and not acknowledged."""
        acked = sum(len(m.requests) for m in self.sent if isinstance(m, AckUsage))
        return self.count(Submit) - acked


def write_bag(folder: Path) -> HostedModel:
    """The model's files and its catalog entry."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(
        models.WordLevel(
            {word: i for i, word in enumerate(dict.fromkeys(VOCAB))}, unk_token="[UNK]"
        )
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return HostedModel(NAME, "rev-bag", str(folder), 32, DIM, 0, task="embed", dim=DIM)


def make_cached(folder: Path, **settings: Any) -> tuple[Kit, ScriptedWorker]:
    """An application that compares meanings. On the event loop."""
    client = ScriptedWorker()
    worker = EmbeddingWorker(client, NAME)
    more = {
        "data_dir": str(folder),
        "cache_embedder": NAME,
        "cache_embed_timeout_s": 5.0,
        **settings,
    }
    kit = make_kit(folder / "tiny", embedding=worker, **more)
    model = write_bag(folder / "bag")
    kit.directory.replace(2, kit.directory.keys(), [*kit.directory.models(), model], PLENTY)
    worker.start()
    worker.set_models(kit.directory.models())
    return kit, client
