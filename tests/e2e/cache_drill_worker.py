"""A worker whose answers say what they answer, for cache_drill.py; and a server that has it.

    python -m tests.e2e.cache_drill_worker serve ...      the product's server, with this worker
    python -m tests.e2e.cache_drill_worker --config JSON  the worker, as the supervisor starts it

The protocol is the real one. An answer is a sentence that names the question as asked, the house
that the system prompt names, the tenant, and when the request came here; it comes some tens of
milliseconds later, so that kills and purges fall in between. As the embedder's worker it gives the
sum of a vector for each token: questions that share words are near.

Lives here: the worker. Does not: who asks (cache_drill_clients.py), what happens to Redis.
"""

import heapq
import re
import signal
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import zmq
from tokenizers import Tokenizer

from admin.cli import main as cli
from admin.cli import server as serve
from bench.gateway_worker import Worker
from engine.config import WorkerConfig, decode_worker_config, read_config
from engine.protocol import Finish, Submit, TokenDelta, ToWorker, Usage

MODULE = "tests.e2e.cache_drill_worker"
MODEL = Path(__file__).resolve().parents[2] / "gateway" / "demo_models" / "sherlock"
DIM = 32
FASTEST_S, SLOWEST_S = 0.02, 0.12
ASKED = re.compile(r"<\|user\|>([^<]*(colour|weight) [^<]*stone (\d+)[^<]*)<\|end\|>")
HOUSE = re.compile(r"house (\d+)")


def answer(prompt: str, tenant_id: str, now_ns: int) -> str:
    """What is said to a prompt; cache_drill_clients.SAID reads it."""
    asked, house = ASKED.search(prompt), HOUSE.search(prompt)
    if asked is None or house is None:
        return "nobody asked"
    text, kind, stone = asked.groups()
    digest = zlib.crc32(text.strip().encode())
    return f"{kind} of stone {stone} in house {house[1]} for {tenant_id} at {now_ns} asked {digest}"


class DrillWorker(Worker):
    """See the module's docstring."""

    def __init__(self, config: WorkerConfig, router: "zmq.Socket[bytes]") -> None:
        super().__init__(config, router)
        self._tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        num_tokens = self._tokenizer.get_vocab_size()
        self._vectors = np.random.default_rng(7).standard_normal((num_tokens, DIM), np.float32)
        self._due: list[tuple[float, bytes, str, int, list[int]]] = []

    def _take(self, peer: bytes, message: ToWorker) -> None:
        super()._take(peer, message)
        if not isinstance(message, Submit):
            return
        if message.encode is not None:
            self._embed(peer, message)
            return
        prompt = self._tokenizer.decode(message.prompt_token_ids, skip_special_tokens=False)
        said = answer(prompt, message.tenant_id, time.monotonic_ns())
        ids = self._tokenizer.encode(said, add_special_tokens=False).ids
        share = zlib.crc32(message.request_id.encode()) / (1 << 32)
        due_s = time.monotonic() + FASTEST_S + share * (SLOWEST_S - FASTEST_S)
        heapq.heappush(self._due, (due_s, peer, message.request_id, message.attempt, ids))

    def _step(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            _, peer, request_id, attempt, ids = heapq.heappop(self._due)
            running = self._running.pop((peer, request_id, attempt), None)
            if running is None:  # aborted
                continue
            ids = [*ids, *running[0].stop_token_ids[:1]]
            usage = Usage(len(running[0].prompt_token_ids), 0, len(ids), 1e-4, 1e-4)
            self._end(peer, TokenDelta(request_id, attempt, ids, Finish("stop", usage)))

    def _embed(self, peer: bytes, message: Submit) -> None:
        assert message.encode is not None
        del self._running[peer, message.request_id, message.attempt]
        ids, rows = np.array(message.prompt_token_ids), list[bytes]()
        for length in message.encode.lengths:
            rows.append(self._vectors[ids[:length]].sum(axis=0).astype("<f4").tobytes())
            ids = ids[length:]
        finish = Finish("stop", Usage(len(message.prompt_token_ids), 0, 0, 1e-6))
        vectors = b"".join(rows)
        delta = TokenDelta(message.request_id, message.attempt, [], finish, vectors=vectors)
        self._end(peer, delta)

    def _end(self, peer: bytes, delta: TokenDelta) -> None:
        self._deltas.setdefault(peer, []).append(delta)


def work(config: WorkerConfig) -> None:
    """Until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.SNDHWM, 0)
        router.setsockopt(zmq.RCVHWM, 0)
        router.bind(config.endpoint)
        DrillWorker(config, router).run()


def main(argv: Sequence[str]) -> int:
    """The exit status."""
    if argv[0] != "serve":
        work(decode_worker_config(read_config(argv[-1], sys.stdin)))
        return 0
    command = (sys.executable, "-m", MODULE, "--config")
    with mock.patch.object(serve, "WORKER_COMMAND", command):
        return cli.main(argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
