"""A worker without a model, for `bench.gateway`: the protocol is the real one, tokens cost nothing.

`python -m bench.gateway_worker --config JSON`, as the supervisor starts workers. Every model of the
catalog is resident and has room for thousands. How a request is answered goes by the first part of
its model's name:

    instant   all its tokens at once, with the finish
    paced     one token a step, STEP_S apart, all requests of a step in one message, as engines do
    failing   as paced, and half-way through it fails
    stuck     nothing until it is aborted

Lives here: the worker. Does not: the gateway, its clients, any figure.
"""

import os
import signal
import sys
import time

import zmq

from engine.config import WorkerConfig, decode_worker_config, read_config
from engine.protocol import (
    PROTOCOL_VERSION,
    Abort,
    Finish,
    Hello,
    Lease,
    ModelStatus,
    SetCatalog,
    StepOutput,
    Submit,
    TokenDelta,
    ToWorker,
    Usage,
    Welcome,
    WorkerStatus,
    decode_to_worker,
    encode,
)

STEP_S = 0.02
ROOM = 8192
KV_TOKENS = 1 << 24
FIRST_TOKEN_ID, NUM_TOKEN_IDS = 300, 600
"""Ids that are words in the demo models' vocabularies, and end nothing."""


class Worker:
    """One ROUTER, any number of gateways."""

    def __init__(self, config: WorkerConfig, router: "zmq.Socket[bytes]") -> None:
        self._config = config
        self._router = router
        self._epoch = f"{os.getpid()}-{time.time_ns()}"
        self._peers: set[bytes] = set()
        self._taken: dict[bytes, list[tuple[str, int]]] = {}
        """Of peers that observe, what has come since their last status."""
        self._models: list[str] = []
        self._running: dict[tuple[bytes, str, int], tuple[Submit, int]] = {}
        self._deltas: dict[bytes, list[TokenDelta]] = {}
        self._next_status_s = self._next_step_s = 0.0

    def run(self) -> None:
        """Serve until the parent is gone."""
        while os.getppid() == self._config.parent_pid or not self._config.parent_pid:
            now_s = time.monotonic()
            until_s = self._next_status_s
            if self._running:
                until_s = min(until_s, self._next_step_s)
            if self._router.poll(max(0, round((until_s - now_s) * 1000))):
                self._read()
            now_s = time.monotonic()
            if now_s >= self._next_step_s:
                self._next_step_s = now_s + STEP_S
                self._step()
            self._flush()
            if now_s >= self._next_status_s:
                self._tell_status(now_s)

    def _read(self) -> None:
        while True:
            try:
                peer, frame = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(peer, decode_to_worker(frame))

    def _take(self, peer: bytes, message: ToWorker) -> None:
        if isinstance(message, Hello):
            self._peers.add(peer)
            if message.observes:
                self._taken[peer] = []
            welcome = Welcome(PROTOCOL_VERSION, self._config.worker_id, self._epoch, "none")
            self._router.send_multipart([peer, encode(welcome)])
            self._next_status_s = 0.0
        elif isinstance(message, SetCatalog):
            self._models = [spec.model_id for spec in message.models]
            self._next_status_s = 0.0
        elif isinstance(message, Submit):
            self._running[peer, message.request_id, message.attempt] = (
                message,
                len(message.generated),
            )
            for taken in self._taken.values():
                taken.append((message.request_id, message.attempt))
            if message.model_id.startswith("instant"):
                done = len(message.generated)
                self._say(peer, message, done, message.max_tokens - done)
        elif isinstance(message, Abort):
            running = self._running.pop((peer, message.request_id, message.attempt), None)
            if running is not None:
                submit, done = running
                usage = Usage(len(submit.prompt_token_ids), 0, done, 1e-6 * done)
                delta = TokenDelta(submit.request_id, submit.attempt, [], Finish("abort", usage))
                self._deltas.setdefault(peer, []).append(delta)

    def _step(self) -> None:
        for (peer, _, _), (submit, done) in list(self._running.items()):
            if submit.model_id.startswith("failing") and 2 * done >= submit.max_tokens - 1:
                self._fail(peer, submit, done)
            elif submit.model_id.startswith(("paced", "failing")):
                self._say(peer, submit, done, 1)

    def _fail(self, peer: bytes, submit: Submit, done: int) -> None:
        del self._running[peer, submit.request_id, submit.attempt]
        usage = Usage(len(submit.prompt_token_ids), 0, done, 1e-6 * done, 1e-6 * done)
        finish = Finish("error", usage, "it was to fail")
        delta = TokenDelta(submit.request_id, submit.attempt, [], finish)
        self._deltas.setdefault(peer, []).append(delta)

    def _say(self, peer: bytes, submit: Submit, done: int, count: int) -> None:
        key = (peer, submit.request_id, submit.attempt)
        ids = [FIRST_TOKEN_ID + n % NUM_TOKEN_IDS for n in range(done, done + count)]
        done += count
        finish = None
        if done >= submit.max_tokens:
            num_prompt = len(submit.prompt_token_ids)
            finish = Finish("length", Usage(num_prompt, 0, done, 1e-6 * done, 1e-6 * done))
            del self._running[key]
        else:
            self._running[key] = (submit, done)
        delta = TokenDelta(submit.request_id, submit.attempt, ids, finish)
        self._deltas.setdefault(peer, []).append(delta)

    def _flush(self) -> None:
        for peer, deltas in self._deltas.items():
            self._router.send_multipart([peer, encode(StepOutput(self._epoch, deltas))])
        self._deltas.clear()

    def _tell_status(self, now_s: float) -> None:
        self._next_status_s = now_s + self._config.status_interval_s
        config = self._config
        running = len(self._running)
        for peer in self._peers:
            status = WorkerStatus(
                self._epoch,
                config.worker_id,
                free_requests=ROOM - running,
                free_kv_bytes=KV_TOKENS * 16,
                lease_ttl_s=config.lease_ttl_s,
                page_bytes=config.engine.resolved_page_bytes,
                num_pages=config.engine.num_pages,
                pages={"free": config.engine.num_pages},
                models=[ModelStatus(m, "resident", 1, 0, 0, 0, 0.1) for m in self._models],
                leases=[Lease(m, ROOM - running, KV_TOKENS, 16) for m in self._models],
                swaps=[],
                counters={},
                taken=self._taken.get(peer, []),
            )
            self._router.send_multipart([peer, encode(status)])
            if peer in self._taken:
                self._taken[peer] = []


def main() -> None:
    """Until SIGTERM."""
    config = decode_worker_config(read_config(sys.argv[-1], sys.stdin))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.SNDHWM, 0)
        router.setsockopt(zmq.RCVHWM, 0)
        router.bind(config.endpoint)
        Worker(config, router).run()


if __name__ == "__main__":
    main()
