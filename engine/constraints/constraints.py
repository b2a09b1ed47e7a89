"""Constrained requests as the engine sees them: sessions with a mask for every step.

    open -> opening -> ready <-> stepping        refused, broken: from opening and stepping
               |                    |            closed: from everywhere
               +-> refused          +-> broken

All work is done by one process (engine/grammar/child.py). If it ends, by its own limits or
otherwise, the session it was at is over and the others are opened again with the output they had,
without their requests noticing more than a delay.

A form that is too dear, by the compiler's limits, by its session's CPU time over all steps, or
because the process ended at it, is over as `refused`; where tokens had been made they are billed.
Its tenant is refused the same text at once for SPENT_S. Not other tenants: what a text costs
depends on the output, which a caller can steer, so one could have another's form refused. What does
not compile is refused to all for as long, for that depends on the text, and hardly on what else is
compiled. The work of tenants with dear forms waits for turns (cpu_shares.py).

Nothing waits but `wait`, and `receive` with a time-out. The engine advances the sessions of a step
when their tokens are known and calls `flush`; the masks are computed while the next step runs, and
are there before it samples. Used from one thread.
"""

import hashlib
import logging
import signal
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec
import torch

from engine.constraints.constraint_process import ConstraintProcess
from engine.constraints.cpu_shares import OPEN_S, STEP_S, CpuShares
from engine.errors import RequestRefused
from engine.grammar import (
    Close,
    Done,
    FromChild,
    GrammarRefused,
    Limits,
    Open,
    Step,
    TokenizerSource,
)
from engine.protocol import Constraint

logger = logging.getLogger(__name__)

MAX_VOCAB_SIZE = 1 << 18
# Constraints whose fate is remembered, by digest: a text may have half a million characters.
MAX_VERDICTS = 1024
# Dear forms that are remembered, by tenant and digest, and for how long.
MAX_SPENT = 1024
SPENT_S = 600.0
# CPU time of a session: ten times the dearest of 400 ordinary schemas, and so much for each token.
SESSION_S = 0.5
SESSION_STEP_S = 0.002
# What a tenant pays for an end of the process: others wait while it starts.
RESTART_S = 1.0
# Ends of the process that are somebody else's doing.
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
# A session that has survived so many ends of its process without an answer is given up.
MAX_REOPENED = 3
# A process that owes answers and has given none for so long hangs, and is ended. A trial may take
# 20 s of a busy machine.
MAX_SILENCE_S = 60.0
SessionState: TypeAlias = Literal["opening", "ready", "stepping", "refused", "broken", "closed"]
_Key: TypeAlias = tuple[TokenizerSource, Constraint]
_encode = msgspec.msgpack.Encoder().encode
# How late a turn may be noticed.
_TURN_WAIT_S = 0.005


class Session:
    """One constrained request.

    finished    once ready: only an end-of-sequence token may follow
    reason      where refused (for the client) or broken (for operators)
    is_dear     its answer is awaited, and its tenant takes turns: it may be long
    """

    def __init__(self, row: int, key: _Key, output_ids: Sequence[int], tenant: str) -> None:
        self.row = row
        self.tenant = tenant
        self.cpu_s = 0.0
        self.is_dear = False
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
        self._steps: list[Session] = []
        # "" for a constraint that has been compiled, else why it was refused; and until when.
        self._verdicts: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        # Until when, and why.
        self._spent: OrderedDict[tuple[str, bytes], tuple[float, str]] = OrderedDict()
        # Dear tenants' sessions that wait for their turn, to be opened or to go on.
        self._shares: CpuShares[Session] = CpuShares()
        self._served: Session | None = None  # whose turn it is
        self.num_restarts = 0
        self.num_spent = 0
        self._heard_s = time.monotonic()

    def open(
        self,
        source: TokenizerSource,
        constraint: Constraint,
        output_ids: Sequence[int] = (),
        tenant: str = "",
    ) -> Session:
        """A new session; its verdict comes with a later `poll`. output_ids: to go on from.

        Raises RequestRefused: too many at once, a constraint that is known to be refused, or a
        tenant whose constraints have used too much CPU time.
        """
        session = Session(-1, (source, constraint), output_ids, tenant)
        until_s, verdict = self._verdicts.get(session.digest, (0.0, ""))
        if time.monotonic() >= until_s:
            verdict = self._spent_verdict(session)
        if source.vocab_size > MAX_VOCAB_SIZE:
            verdict = (
                f"structured output is limited to vocabularies of {MAX_VOCAB_SIZE} tokens, and the "
                f"model has {source.vocab_size}"
            )
        if verdict:
            raise RequestRefused("invalid_constraint", verdict)
        if not self._free:
            raise RequestRefused(
                "overloaded", "too many requests with structured output are running"
            )
        session.row = self._free.pop()
        self._sessions[session.row] = session
        self._open(session)
        return session

    def advance(self, session: Session, token: int) -> None:
        """The session's next token has been sampled; `flush` sends it on."""
        assert session.state == "ready", session.state
        session.output_ids.append(token)
        session.state = "stepping"
        self._steps.append(session)

    def flush(self) -> None:
        """Let the masks of all advanced sessions be computed."""
        now_s = time.monotonic()
        at_once: list[tuple[int, int]] = []
        for session in sorted(self._steps, key=lambda one: one.cpu_s / len(one.output_ids)):
            session.is_dear = self._shares.is_dear(session.tenant, now_s)
            if session.is_dear:
                self._shares.wait(session.tenant, session)
            else:
                at_once.append((session.row, session.output_ids[-1]))
        self._steps = []
        if at_once:
            self._shares.serve_at_once(now_s)
            self._process.send(Step(at_once))
        self._serve_next(now_s)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take in what has been answered, waiting so long for the first answer."""
        if self._shares.num_waiting:
            timeout_s = min(timeout_s, _TURN_WAIT_S)
        answers = self._process.receive(timeout_s)
        if answers is None:
            self._restart()
            return
        if not answers:
            self._watch()
        else:
            self._heard_s = time.monotonic()
        now_s = time.monotonic()
        for answer in answers:
            session = self._sessions[answer.session]
            self._charge(session, answer, now_s)
            self._take(session, answer, now_s)
            if session.state == "closed":
                self._release(session)
        self._serve_next(now_s)

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
        if not was_closed and (not was_busy or self._shares.drop(session.tenant, session)):
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
        now_s = time.monotonic()
        session.is_dear = self._shares.is_dear(session.tenant, now_s)
        if session.is_dear:
            self._shares.wait(session.tenant, session)
            self._serve_next(now_s)
        else:
            self._shares.serve_at_once(now_s)
            self._send_open(session)

    def _send_open(self, session: Session) -> None:
        trusted = self._verdicts.get(session.digest, (0.0, "not known"))[1] == ""
        self._process.send(
            Open(session.row, *session.key, session.output_ids, trusted, session.tenant)
        )

    def _serve_next(self, now_s: float) -> None:
        """The next piece of a dear tenant's work, if it may be done now."""
        session = self._shares.next(now_s)
        if session is None:
            return
        self._served = session
        if session.state == "opening":
            self._send_open(session)
        else:
            self._process.send(Step([(session.row, session.output_ids[-1])]))

    def _charge(self, session: Session, answer: FromChild, now_s: float) -> None:
        earned_s = OPEN_S if session.state == "opening" else STEP_S
        self._shares.pay(session.tenant, answer.cpu_s, earned_s, now_s)
        session.cpu_s += answer.cpu_s
        session.is_dear = False
        session.num_reopened = 0
        if session is self._served:
            self._served = None
            self._shares.done(answer.cpu_s, now_s)

    def _spent_verdict(self, session: Session) -> str:
        """Why its tenant may not have this form now; empty: it may."""
        now_s = time.monotonic()
        wait_s = self._shares.spent_for_s(session.tenant, now_s)
        if wait_s:
            return (
                "your recent schemas, patterns and grammars were too expensive to enforce: try "
                f"again in {wait_s:.0f} s, and simplify them"
            )
        until_s, why = self._spent.get((session.tenant, session.digest), (0.0, ""))
        return f"it was too expensive to enforce before: {why}" if now_s < until_s else ""

    def _spend(self, session: Session, reason: str, now_s: float, remember: bool = True) -> None:
        """Its form is too dear: over for this request, and for a while for its tenant's next."""
        self.num_spent += 1
        self._end(session, "refused", reason)
        if remember:
            key = session.tenant, session.digest
            self._spent[key] = now_s + SPENT_S, reason
            self._spent.move_to_end(key)
            if len(self._spent) > MAX_SPENT:
                self._spent.popitem(last=False)

    def _watch(self) -> None:
        """End a process that has been silent for too long; the next `poll` starts another."""
        now_s = time.monotonic()
        if not any(s.busy or s.state == "closed" for s in self._sessions.values()):
            self._heard_s = now_s
        elif now_s - self._heard_s > MAX_SILENCE_S:
            logger.error("the constraint process has not answered for %.0f s", MAX_SILENCE_S)
            self._heard_s = now_s
            self._process.kill()

    def _release(self, session: Session) -> None:
        del self._sessions[session.row]
        self._free.append(session.row)
        self._process.send(Close([session.row]))

    def _end(self, session: Session, state: SessionState, reason: str) -> None:
        if session.state != "closed":
            session.state = state
            session.reason = reason

    def _take(self, session: Session, answer: FromChild, now_s: float) -> None:
        """What is learnt of the form counts of a closed session, too."""
        if isinstance(answer, Done):
            if session.state == "opening":
                self._remember(session.digest, "")
            num_tokens = len(session.output_ids)
            told = f"it took {session.cpu_s:.1f} s of CPU time for {num_tokens} tokens"
            if answer.finished or session.cpu_s < OPEN_S + num_tokens * STEP_S:
                pass
            elif session.cpu_s > SESSION_S + num_tokens * SESSION_STEP_S:
                self._spend(session, told, now_s)
                return
            elif self._shares.spent_for_s(session.tenant, now_s):
                self._spend(session, f"{told}, and others of yours too much", now_s, False)
                return
            if session.state != "closed":
                session.state = "ready"
                session.finished = answer.finished
        elif isinstance(answer, GrammarRefused):
            self._remember(session.digest, answer.reason)
            # Of an answer that has begun the client cannot be told that it is refused.
            self._end(session, "broken" if session.output_ids else "refused", answer.reason)
        elif answer.spent:
            self._spend(session, answer.reason, now_s, not answer.worn)
        else:
            self._end(session, "broken", answer.reason)

    def _remember(self, digest: bytes, verdict: str) -> None:
        """A refusal for a while: a full process or a busy machine may have had a part in it."""
        self._verdicts[digest] = time.monotonic() + SPENT_S if verdict else 0.0, verdict
        self._verdicts.move_to_end(digest)
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    def _restart(self) -> None:
        """The process has ended: what it held is opened again, but for what it was at."""
        row, status = self._process.reap()
        self.num_restarts += 1
        self._steps = []
        self._shares.clear()
        self._served = None
        culprit = self._sessions.get(row)
        if culprit is not None and status in _FROM_OUTSIDE:
            self._end(culprit, "broken", f"the constraint process ended with status {status}")
        elif culprit is not None:
            now_s, reason = time.monotonic(), "it took too much CPU time or memory at once"
            self._shares.pay(culprit.tenant, RESTART_S, 0.0, now_s)
            self._spend(culprit, reason, now_s)
            if not culprit.output_ids:  # that depends on the text alone
                self._remember(culprit.digest, reason)
        for session in list(self._sessions.values()):
            if session.state == "closed":
                self._release(session)
            elif session.state in ("refused", "broken"):
                continue
            elif session.num_reopened == MAX_REOPENED:
                self._verdicts.pop(session.digest, None)
                self._end(session, "broken", "the constraint process keeps ending")
            else:
                session.num_reopened += 1
                self._open(session)
