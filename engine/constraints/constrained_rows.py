"""Constrained requests in the engine's steps: who may be sampled, with which mask, and who ends.

    submit            open         the constraint is compiled elsewhere, beside the prompt
    start of a step   poll         what came back: requests that are refused, broken or complete
    schedule          may_sample   a row whose mask is there, or is being computed
    sampling          take         waits for the masks of the step's rows, after the model has run
    collection        settle       the row's token is known; `flush` lets the next mask be computed
    any end           close

So masks are computed while the model runs. One that is MASK_WAIT_S late does not hold the others
up: its row is sampled without it, that token is thrown away, and the row is scheduled again once
the mask is there (`missed`). A dear tenant's row waits its turn for a mask, and is scheduled only
once that is there.

Sessions and their process are engine/constraints/constraints.py, which is for one thread; rows are
sampled in the thread of the steps, so what both touch is behind a lock here. Knows no text and no
blocks.
"""

import threading
import time
from collections.abc import Iterator
from typing import Literal, TypeAlias

import torch

from engine.constraints.constraints import Constraints, Session
from engine.errors import RequestRefused
from engine.grammar import TokenizerSource
from engine.protocol import Constraint
from engine.request import Request

# One look at what came back; the lock is held for so long.
_SLICE_S = 0.002

Ending: TypeAlias = Literal["refused", "broken", "complete"]
Settled: TypeAlias = Literal["kept", "complete", "lost"]


class ConstrainedRow:
    """One request's constraint: implements `request.BoundRow`.

    missed   the last step that sampled the row had no mask for it: its token means nothing
    """

    def __init__(self, rows: "ConstrainedRows", session: Session) -> None:
        self.session = session
        self.missed = False
        self._rows = rows

    @property
    def may_sample(self) -> bool:
        """Whether the next step may sample it."""
        state = self.session.state
        return state == "ready" or (
            state == "stepping" and not self.missed and not self.session.is_dear
        )

    @property
    def is_complete(self) -> bool:
        """Nothing but the end may follow what was generated. No token is spent on that."""
        return self.session.state == "ready" and self.session.finished

    def take(self, deadline_s: float) -> torch.Tensor | None:
        """The mask of the next token, waited for until then; None: there is none, and `missed`."""
        mask = self._rows.wait_for_mask(self.session, deadline_s)
        self.missed = mask is None
        return mask


class ConstrainedRows:
    """All constrained requests of an engine. `wait_for_mask` may be called in another thread."""

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._constraints: Constraints | None = None  # made by the first request
        self._live: dict[Request, ConstrainedRow] = {}
        self._lock = threading.Lock()
        self._counts = {"constraints_refused": 0.0, "constraints_broken": 0.0}

    def open(self, request: Request, constraint: Constraint, source: TokenizerSource) -> None:
        """Begin to compile, to go on behind what was generated before. Raises RequestRefused where
        that is known to be in vain."""
        with self._lock:
            if self._constraints is None:
                self._constraints = Constraints(self._max_sessions)
            try:
                session = self._constraints.open(
                    source, constraint, request.submit.generated, request.submit.tenant_id
                )
            except RequestRefused as error:
                self._counts["constraints_refused"] += error.code == "invalid_constraint"
                raise
        self._live[request] = request.constrained = ConstrainedRow(self, session)

    def settle(self, request: Request, token: int) -> Settled:
        """What becomes of a sampled token: the request goes on with it, or ends without it, or has
        lost it: sampled without a mask, or as the process ended that knew what it had before.
        """
        row = self._live.get(request)
        if row is None:
            return "kept"
        assert self._constraints is not None
        with self._lock:
            if row.missed or row.session.state != "ready":
                return "lost"
            if row.is_complete:
                return "complete"
            if token not in request.submit.stop_token_ids:
                self._constraints.advance(row.session, token)
            return "kept"

    def flush(self) -> None:
        """Let the masks of all that advanced be computed."""
        if self._constraints is not None:
            with self._lock:
                self._constraints.flush()

    def poll(self) -> Iterator[tuple[Request, Ending, str]]:
        """Requests that have to end, and why. Waits for nothing."""
        if self._constraints is None:
            return
        with self._lock:
            self._constraints.poll()
        for request, row in list(self._live.items()):
            session = row.session
            if session.state == "refused":
                self._counts["constraints_refused"] += 1
                yield request, "refused", session.reason
            elif session.state == "broken":
                self._counts["constraints_broken"] += 1
                yield request, "broken", session.reason
            elif row.is_complete and request.num_generated and not request.num_pending:
                yield request, "complete", ""

    def rest(self) -> bool:
        """Wait a moment for an answer if a running request needs one; False: none does."""
        if not any(r.state == "running" and row.session.busy for r, row in self._live.items()):
            return False
        assert self._constraints is not None
        with self._lock:
            self._constraints.poll(_SLICE_S)
        return True

    def wait_for_mask(self, session: Session, deadline_s: float) -> torch.Tensor | None:
        """A copy of the session's mask: int32 [ceil(V / 32)]; None where none comes in time."""
        assert self._constraints is not None
        while True:
            with self._lock:
                if session.state == "ready":
                    return self._copy(session)
                left_s = deadline_s - time.monotonic()
                # Anything but stepping comes from a process that ended, or has no mask to come.
                if session.state != "stepping" or left_s <= 0:
                    return None
                self._constraints.poll(min(left_s, _SLICE_S))

    def close(self, request: Request) -> None:
        """The request has ended. Nothing happens to one without a constraint."""
        row = self._live.pop(request, None)
        if row is not None and self._constraints is not None:
            with self._lock:
                self._constraints.close(row.session)

    def shutdown(self) -> None:
        """End the process."""
        if self._constraints is not None:
            self._constraints.shutdown()
            self._constraints = None

    def counters(self) -> dict[str, float]:
        """For the worker's status."""
        made = self._constraints
        return {
            **self._counts,
            "constraints_spent": float(made.num_spent if made else 0),
            "constraint_restarts": float(made.num_restarts if made else 0),
        }

    def _copy(self, session: Session) -> torch.Tensor | None:
        assert self._constraints is not None
        mask = self._constraints.mask(session).clone()
        tail = session.key[0].vocab_size % 32
        if tail:  # a tokenizer may have more tokens than there are logits
            mask[-1] &= (1 << tail) - 1
        if mask.any():
            return mask
        self._constraints.give_up(session, "it allows none of the model's tokens")
        return None
