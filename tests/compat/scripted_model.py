"""A worker that answers as its prompt's script says (script.py), and a server that has it.

    python -m tests.compat.scripted_model serve ...      the product's server, with this worker
    python -m tests.compat.scripted_model --config JSON  the worker, as the supervisor starts it

Server, gateway, dispatcher and the protocol are the real ones; only the engine is played. So an
agent's loop does not depend on what a tiny model makes of its prompt. Constraints are not enforced:
a script says what comes. Models that embed give each text the sum of a vector a token; classifiers
give it a logit a class.

Lives here: the worker. Does not: what is answered (script.py), who asks.
"""

import json
import os
import signal
import sys
import time
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
from engine.protocol import Constraint, Finish, Submit, TokenDelta, TokenLogprobs, ToWorker, Usage
from tests.compat.script import Said, Turn, answer

MODULE = "tests.compat.scripted_model"
DEMO = Path(__file__).resolve().parents[2] / "gateway" / "demo_models" / "sherlock"
ROLES = ("system", "user", "assistant")
DIM = 32
TOKENS_A_STEP = 4
"""Of answers without `pace_s`; so streams have more than one event."""
CROSS = "cross"
"""Models whose names begin so are classifiers with one class."""


class Answer:
    """A request, what it will say, and how far it is."""

    def __init__(self, peer: bytes, submit: Submit, turn: Turn, token_ids: list[int]) -> None:
        self.peer = peer
        self.submit = submit
        self.turn = turn
        self.token_ids = token_ids
        self.num_done = len(submit.generated)
        self.due_s = time.monotonic() + turn.wait_s

    @property
    def dies(self) -> bool:
        """Whether the process ends now."""
        half = len(self.token_ids) // 2
        return self.submit.attempt <= self.turn.die and self.num_done >= half

    def take(self, now_s: float) -> list[int]:
        """The next step's tokens."""
        count = 1 if self.turn.pace_s else TOKENS_A_STEP
        self.due_s = now_s + self.turn.pace_s
        taken = self.token_ids[self.num_done : self.num_done + count]
        self.num_done += len(taken)
        return taken

    @property
    def finish(self) -> Finish | None:
        """How it ends, if it has come to its end."""
        submit, done = self.submit, self.num_done
        if done < len(self.token_ids):
            return None
        usage = Usage(len(submit.prompt_token_ids), 0, done, 1e-6 * done, 1e-6 * done)
        if self.turn.error:
            return Finish("error", usage, self.turn.error)
        is_stop = bool(self.token_ids) and self.token_ids[-1] in submit.stop_token_ids
        return Finish("stop" if is_stop else "length", usage)


class ScriptedModel(Worker):
    """See the module's docstring."""

    def __init__(self, config: WorkerConfig, router: "zmq.Socket[bytes]") -> None:
        super().__init__(config, router)
        self._tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
        self._roles = {self._tokenizer.token_to_id(f"<|{role}|>"): role for role in ROLES}
        self._end = self._tokenizer.token_to_id("<|end|>")
        num_tokens = self._tokenizer.get_vocab_size()
        self._vectors = np.random.default_rng(7).standard_normal((num_tokens, DIM), np.float32)
        self._answers: dict[tuple[bytes, str, int], Answer] = {}

    def _take(self, peer: bytes, message: ToWorker) -> None:
        super()._take(peer, message)
        if not isinstance(message, Submit):
            return
        if message.encode is not None:
            self._encode(peer, message)
            return
        said = self._said(message.prompt_token_ids)
        turn = answer(said, _schema(message.constraint))
        begun = said[-1].text if said else ""
        text = turn.written(may_reason="</think>" not in begun)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if turn.goes_on:
            ids = ids * (message.max_tokens // max(1, len(ids)) + 1)
        ids = [*ids, *message.stop_token_ids[:1]][: message.max_tokens]
        key = (peer, message.request_id, message.attempt)
        self._answers[key] = Answer(peer, message, turn, ids)

    def _said(self, token_ids: Sequence[int]) -> list[Said]:
        """The prompt's messages; a prompt that is none of TEMPLATE's is one of a user."""
        said: list[tuple[str, list[int]]] = []
        for token_id in token_ids:
            if token_id in self._roles:
                said.append((self._roles[token_id], []))
            elif token_id != self._end:
                if not said:
                    said.append(("user", []))
                said[-1][1].append(token_id)
        if said and said[0][0] == "user" and len(said) > 1 and token_ids[0] not in self._roles:
            said = said[1:]  # the beginning-of-text token alone
        return [Said(role, self._tokenizer.decode(ids)) for role, ids in said]

    def _step(self) -> None:
        now_s = time.monotonic()
        for key, one in list(self._answers.items()):
            if key not in self._running:  # aborted
                del self._answers[key]
            elif one.due_s <= now_s:
                self._go_on(key, one, now_s)

    def _go_on(self, key: tuple[bytes, str, int], one: Answer, now_s: float) -> None:
        if one.dies:
            os._exit(9)
        submit, is_first = one.submit, one.num_done == len(one.submit.generated)
        taken = one.take(now_s)
        finish = one.finish
        self._running[key] = (submit, one.num_done)
        if finish is not None:
            del self._answers[key], self._running[key]
        delta = TokenDelta(
            submit.request_id,
            submit.attempt,
            taken,
            finish,
            logprobs=self._logprobs(taken, submit.logprobs),
            prompt_logprobs=self._logprobs(submit.prompt_token_ids[1:], submit.prompt_logprobs)
            if is_first
            else [],
        )
        self._deltas.setdefault(one.peer, []).append(delta)

    def _logprobs(self, token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
        if count < 0:
            return []
        return [
            TokenLogprobs(
                -0.25,
                [(token_id if n == 0 else (token_id + n) % 1000, -0.25 - n) for n in range(count)],
            )
            for token_id in token_ids
        ]

    def _encode(self, peer: bytes, message: Submit) -> None:
        assert message.encode is not None
        del self._running[peer, message.request_id, message.attempt]
        ids, rows = np.array(message.prompt_token_ids), list[bytes]()
        for length in message.encode.lengths:
            row = self._vectors[ids[:length] % len(self._vectors)].sum(axis=0)
            row = row[:1] / 10 if message.model_id.startswith(CROSS) else row
            rows.append(row.astype("<f4").tobytes())
            ids = ids[length:]
        finish = Finish("stop", Usage(len(message.prompt_token_ids), 0, 0, 1e-6))
        delta = TokenDelta(message.request_id, message.attempt, [], finish, vectors=b"".join(rows))
        self._deltas.setdefault(peer, []).append(delta)


def _schema(constraint: Constraint | None) -> str:
    """The schema that an answer has to obey, whatever reasoning stands before it; "" for none."""
    text = constraint.text if constraint is not None else ""
    if constraint is not None and constraint.kind.startswith("json"):
        return text or "{}"
    before, json_mark, behind = text.partition("%json ")
    if not json_mark or "tool_call" in before + behind:
        return ""
    _, end = json.JSONDecoder().raw_decode(behind)
    return behind[:end]


def work(config: WorkerConfig) -> None:
    """Until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.SNDHWM, 0)
        router.setsockopt(zmq.RCVHWM, 0)
        router.bind(config.endpoint)
        ScriptedModel(config, router).run()


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
