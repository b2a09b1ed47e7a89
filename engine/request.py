"""A request inside the engine: its tokens, its blocks, and the states it may pass through.

    waiting --admit--> running --finish--> finished
       ^                  |
       +-----preempt------+          (its blocks are given back; it is recomputed later)
    waiting --finish--> finished     (abort, failure)

While steps are in flight a request has tokens that are sampled on the device and not known here yet
(`num_pending`). They count as its tokens for whoever lays out the next step; nobody else sees them.

Knows token ids only. The scheduler moves requests between states, nobody else does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from engine.errors import IllegalTransition
from engine.protocol import FinishReason, Submit, TokenLogprobs, Usage
from engine.sampling.sampling_batch import LateMask, SampleInput, SamplingState

if TYPE_CHECKING:
    from engine.encoders.encoder_requests import Encoding
    from engine.memory.request_kv import RequestKv

RequestState = Literal["waiting", "running", "finished"]

_TRANSITIONS: frozenset[tuple[RequestState, RequestState]] = frozenset(
    {
        ("waiting", "running"),
        ("running", "waiting"),
        ("running", "finished"),
        ("waiting", "finished"),
    }
)


class BoundRow(LateMask, Protocol):
    """A request's constraint as its steps see it; `constrained_rows.ConstrainedRow`."""

    @property
    def may_sample(self) -> bool:
        """Whether the next step may sample the request."""


@dataclass(slots=True, eq=False)
class Request:
    """One attempt of one request.

    unit_id        the resident pack that runs it
    token_ids      prompt, then what was generated, as far as known
    num_pending    tokens after these that a step in flight samples
    pending_row    which of that step's sampled tokens it is; -1: none
    num_computed   leading tokens whose KV is in the cache once the steps launched have ended
    sampling       what choosing its tokens keeps from step to step
    constrained    its constraint in the steps; None where nothing binds its output
    prompt_scores  of its prompt's tokens but the first, as far as known, where they were asked for
    kv             its block tables, empty while it waits; None before its first turn
    encoding       inputs and rows of an encoder request; it has no KV, samples nothing, and
                   `num_computed` counts the tokens of inputs whose steps were launched
    cached_tokens  tokens whose KV was there when it was first admitted; None: never admitted
    order          order of arrival over all models: the youngest is preempted first
    deadline_s     it ends with reason `timeout` from then on
    device_s, memory_s  what it is charged (charges.py); prefill_s, of device_s, for its prompt
    held_since_s   second of the device's work up to which its memory is charged; None: holds none
    num_lost       leading positions that a preemption threw away: computing them again is free
    """

    submit: Submit
    arrival_s: float
    token_ids: list[int]
    sampling: SamplingState
    unit_id: str = ""
    state: RequestState = "waiting"
    num_pending: int = 0
    pending_row: int = -1
    num_computed: int = 0
    kv: "RequestKv | None" = None
    cached_tokens: int | None = None
    order: int = 0
    deadline_s: float = math.inf
    device_s: float = 0.0
    prefill_s: float = 0.0
    memory_s: float = 0.0
    held_since_s: float | None = None
    num_lost: int = 0
    finish_reason: FinishReason | None = None
    error: str = ""
    num_preemptions: int = 0
    constrained: BoundRow | None = None
    encoding: "Encoding | None" = None
    prompt_scores: list[TokenLogprobs] = field(default_factory=list)

    @classmethod
    def of(
        cls, submit: Submit, now_s: float, unit_id: str = "", timeout_s: float = 0.0
    ) -> "Request":
        """A new waiting request of `unit_id` (the model's own name where no pack is shared).

        `timeout_s` bounds what the Submit asks for; 0: it does not.
        """
        # 0 is no bound, and neither is what is no number; a negative one is over at once.
        asked_s = submit.timeout_s if submit.timeout_s > 0 or submit.timeout_s < 0 else math.inf
        return cls(
            submit=submit,
            arrival_s=now_s,
            token_ids=list(submit.prompt_token_ids),
            sampling=SamplingState(
                submit.sampling, submit.prompt_token_ids, submit.stop_token_ids, submit.logprobs
            ),
            unit_id=unit_id or submit.model_id,
            deadline_s=now_s + min(asked_s, timeout_s or math.inf),
        )

    @property
    def key(self) -> tuple[str, int]:
        """The name under which messages speak of it."""
        return self.submit.request_id, self.submit.attempt

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.submit.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, as far as known."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_tokens(self) -> int:
        """Its tokens, those in flight included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV must still be computed; 1 in plain decoding."""
        return self.num_tokens - self.num_computed

    @property
    def num_runnable(self) -> int:
        """Of these, how many the next step may compute: the last one only where it may sample."""
        held = self.constrained is not None and not self.constrained.may_sample
        return self.num_uncomputed - held

    @property
    def sample_input(self) -> SampleInput:
        """How its next token is chosen, as of now."""
        known: Sequence[int] = range(self.num_generated)  # how many will do, mostly
        if self.sampling.needs_tokens:
            known = self.token_ids[self.num_prompt :]
        return SampleInput(
            self.sampling, known, num_in_flight=self.num_pending, late_mask=self.constrained
        )

    @property
    def waits_for_token(self) -> bool:
        """Whether its next step has to wait: for the token in flight, or for a mask."""
        if self.num_pending and (self.sampling.needs_tokens or self.constrained is not None):
            return True
        return not self.num_runnable

    @property
    def scores_prompt(self) -> bool:
        """Whether some logprobs of its prompt are still to come. Cached KV would have none."""
        wanted = self.num_prompt - 1 if self.submit.prompt_logprobs >= 0 else 0
        return len(self.prompt_scores) < wanted

    @property
    def matchable_ids(self) -> Sequence[int]:
        """Its tokens, as far as their KV may be taken from the prefix cache."""
        return () if self.scores_prompt else self.token_ids

    @property
    def is_complete(self) -> bool:
        """Its last token is on its way at the latest: nothing is left to launch for it."""
        return self.num_tokens >= self.max_total_tokens

    @property
    def max_total_tokens(self) -> int:
        """Tokens it may reach; the last one's KV is never needed, its slot is reserved anyhow."""
        return self.num_prompt + self.submit.max_tokens

    @property
    def service_s(self) -> float:
        """Of what it has used of time and of memory, the larger."""
        return max(self.device_s, self.memory_s)

    @property
    def usage(self) -> Usage:
        """What it has consumed so far."""
        return Usage(
            prompt_tokens=self.num_prompt,
            cached_tokens=self.cached_tokens or 0,
            generated_tokens=self.num_generated,
            service_s=self.service_s,
            device_s=self.device_s,
            prefill_s=self.prefill_s,
        )

    def move(self, state: RequestState) -> None:
        """Change state. Raises IllegalTransition, changing nothing."""
        if (self.state, state) not in _TRANSITIONS:
            raise IllegalTransition(f"request {self.key}: {self.state} -> {state}")
        self.state = state

    def finish(self, reason: FinishReason, error: str = "") -> None:
        """End it; its blocks must have been or are about to be given back by the scheduler."""
        self.move("finished")
        self.finish_reason = reason
        self.error = error
