"""Constrained requests as the engine sees them: sessions with a mask for every step.

    open -> opening -> ready <-> stepping        refused, broken: from opening and stepping
               |                    |            closed: from everywhere
               +-> refused          +-> broken

All work is done by one process (engine/constraints/constraint_child.py). If it ends, by its own
limits or otherwise, the session it was at is broken and the others are opened again with the
output they had, without their requests noticing more than a delay.

Nothing waits but `wait`. The engine advances the sessions of a step when their tokens are known and
calls `flush`; the masks are computed while the next step runs, and are there before it samples.
Used from one thread.
"""

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec
import torch

from engine.constraints.constraint_child import (
    Close,
    Done,
    FromChild,
    Limits,
    Open,
    Refused,
    Step,
    TokenizerSource,
)
from engine.constraints.constraint_process import ConstraintProcess
from engine.errors import RequestRefused
from engine.protocol import Constraint

logger = logging.getLogger(__name__)

MAX_VOCAB_SIZE = 1 << 18
# Constraints whose fate is remembered, by digest: a text may have half a million characters.
MAX_VERDICTS = 1024
# A session that has survived so many ends of its process is given up.
MAX_REOPENED = 3
# A process that owes answers and has given none for so long hangs, and is ended. A trial may take
# 20 s of a busy machine.
MAX_SILENCE_S = 60.0

SessionState: TypeAlias = Literal["opening", "ready", "stepping", "refused", "broken", "closed"]
_Key: TypeAlias = tuple[TokenizerSource, Constraint]

_encode = msgspec.msgpack.Encoder().encode


class Session:
    """One constrained request.

    finished    once ready: only an end-of-sequence token may follow
    reason      where refused (for the client) or broken (for operators)
    """

    def __init__(self, row: int, key: _Key, output_ids: Sequence[int]) -> None:
        self.row = row
        self.key = key
        self.digest = hashlib.sha256(_encode(key)).digest()
        self.output_ids = list(output_ids)
        self.state: SessionState = "opening"
        self.reason = ""
        self.finished = False
        self.num_reopened = 0

    @property
    def busy(self) -> bool:
        """Whether an answer is awaited: no mask yet, and no verdict."""
        return self.state in ("opening", "stepping")


class Constraints:
    """All constrained requests of a worker."""

    def __init__(self, max_sessions: int, limits: Limits | None = None) -> None:
        self._process = ConstraintProcess(max_sessions, MAX_VOCAB_SIZE // 32, limits or Limits())
        self._free = list(range(max_sessions))
        self._sessions: dict[int, Session] = {}
        self._steps: list[tuple[int, int]] = []
        # "" for a constraint that has been compiled, else why it was refused.
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self.num_restarts = 0
        self._heard_s = time.monotonic()

    def open(
        self, source: TokenizerSource, constraint: Constraint, output_ids: Sequence[int] = ()
    ) -> Session:
        """A new session; its verdict comes with a later `poll`. output_ids: to go on from.

        Raises RequestRefused: too many at once, or a constraint that is known to be refused.
        """
        session = Session(-1, (source, constraint), output_ids)
        verdict = self._verdicts.get(session.digest, "")
        if source.vocab_size > MAX_VOCAB_SIZE:
            verdict = f"masks end at {MAX_VOCAB_SIZE} tokens, the model has {source.vocab_size}"
        if verdict:
            raise RequestRefused("invalid_constraint", verdict)
        if not self._free:
            raise RequestRefused("overloaded", "too many constrained requests at once")
        session.row = self._free.pop()
        self._sessions[session.row] = session
        self._open(session)
        return session

    def advance(self, session: Session, token: int) -> None:
        """The session's next token has been sampled; `flush` sends it on."""
        assert session.state == "ready", session.state
        session.output_ids.append(token)
        session.state = "stepping"
        self._steps.append((session.row, token))

    def flush(self) -> None:
        """Let the masks of all advanced sessions be computed."""
        if self._steps:
            self._process.send(Step(self._steps))
            self._steps = []

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take in what has been answered, waiting so long for the first answer."""
        answers = self._process.receive(timeout_s)
        if answers is None:
            self._restart()
            return
        if not answers:
            self._watch()
        else:
            self._heard_s = time.monotonic()
        for answer in answers:
            session = self._sessions[answer.session]
            if session.state == "closed":
                self._release(session)
            else:
                self._take(session, answer)

    def wait(self, sessions: Iterable[Session], timeout_s: float = 30.0) -> None:
        """Until none of these is busy. After the time-out those that still are, are broken."""
        self.flush()
        awaited = list(sessions)
        deadline = time.monotonic() + timeout_s
        self.poll()
        while any(session.busy for session in awaited):
            left_s = deadline - time.monotonic()
            if left_s > 0:
                self.poll(left_s)
                continue
            self._process.kill()
            for session in awaited:
                if session.busy:
                    self._end(session, "broken", f"no mask within {timeout_s} s")
            self._restart()

    def mask(self, session: Session) -> torch.Tensor:
        """int32 [ceil(vocab / 32)] of a ready session; valid until it advances."""
        assert session.state == "ready", session.state
        return self._process.masks[session.row, : -(-session.key[0].vocab_size // 32)]

    def close(self, session: Session) -> None:
        """Its request has ended. Idempotent."""
        was_busy, was_closed = session.busy, session.state == "closed"
        session.state = "closed"
        if not was_closed and not was_busy:
            self._release(session)
        # Otherwise an answer is under way and would be taken for one to the row's next session.

    def give_up(self, session: Session, reason: str) -> None:
        """A ready session that cannot go on after all."""
        assert session.state == "ready", session.state
        self._end(session, "broken", reason)

    def shutdown(self) -> None:
        """End the process."""
        self._process.close()

    def _open(self, session: Session) -> None:
        session.state = "opening"
        trusted = session.digest in self._verdicts
        self._process.send(Open(session.row, *session.key, session.output_ids, trusted))

    def _watch(self) -> None:
        """End a process that has been silent for too long; the next `poll` starts another."""
        now_s = time.monotonic()
        if not any(s.busy or s.state == "closed" for s in self._sessions.values()):
            self._heard_s = now_s
        elif now_s - self._heard_s > MAX_SILENCE_S:
            logger.error("the constraint process has been silent for %.0f s", MAX_SILENCE_S)
            self._heard_s = now_s
            self._process.kill()

    def _release(self, session: Session) -> None:
        del self._sessions[session.row]
        self._free.append(session.row)
        self._process.send(Close([session.row]))

    def _end(self, session: Session, state: SessionState, reason: str) -> None:
        session.state = state
        session.reason = reason

    def _take(self, session: Session, answer: FromChild) -> None:
        if isinstance(answer, Done):
            if session.state == "opening":
                self._remember(session.digest, "")
            session.state = "ready"
            session.finished = answer.finished
        elif isinstance(answer, Refused):
            self._remember(session.digest, answer.reason)
            # Of an answer that has begun the client cannot be told that it is refused.
            state: SessionState = "broken" if session.output_ids else "refused"
            self._end(session, state, answer.reason)
        else:
            self._end(session, "refused" if answer.spent else "broken", answer.reason)

    def _remember(self, digest: bytes, verdict: str) -> None:
        self._verdicts[digest] = verdict
        self._verdicts.move_to_end(digest)
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    def _restart(self) -> None:
        """The process has ended: what it held is opened again, but for what it was at."""
        culprit, how = self._process.reap()
        self.num_restarts += 1
        self._steps = []
        for session in list(self._sessions.values()):
            session.num_reopened += 1
            if session.state == "closed":
                self._release(session)
            elif session.state in ("refused", "broken"):
                continue
            elif session.row == culprit or session.num_reopened > MAX_REOPENED:
                self._verdicts.pop(session.digest, None)
                self._end(session, "broken", how)
            else:
                self._open(session)
