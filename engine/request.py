"""A request inside the engine: its tokens, its blocks, and the states it may pass through.

    waiting --admit--> running --finish--> finished
       ^                  |
       +-----preempt------+          (its blocks are given back; it is recomputed later)
    waiting --finish--> finished     (abort, failure)

Knows token ids only. The scheduler moves requests between states, nobody else does.
"""

from dataclasses import dataclass, field
from typing import Literal

from engine.errors import IllegalTransition
from engine.protocol import FinishReason, Submit

RequestState = Literal["waiting", "running", "finished"]

_TRANSITIONS: frozenset[tuple[RequestState, RequestState]] = frozenset(
    {
        ("waiting", "running"),
        ("running", "waiting"),
        ("running", "finished"),
        ("waiting", "finished"),
    }
)


@dataclass(slots=True, eq=False)
class Request:
    """One attempt of one request.

    token_ids     prompt, then what was generated
    num_computed  leading tokens whose KV is in the cache
    block_table   block ids of this model's KvCache, in order of position
    order         admission order over all models: the youngest is preempted first
    """

    submit: Submit
    arrival_s: float
    token_ids: list[int]
    state: RequestState = "waiting"
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    order: int = 0
    service_s: float = 0.0
    finish_reason: FinishReason | None = None
    error: str = ""
    num_preemptions: int = 0

    @classmethod
    def of(cls, submit: Submit, now_s: float) -> "Request":
        """A new waiting request."""
        return cls(submit=submit, arrival_s=now_s, token_ids=list(submit.prompt_token_ids))

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
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV must still be computed; 1 in plain decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def max_total_tokens(self) -> int:
        """Tokens it may reach; the last one's KV is never needed, its slot is reserved anyhow."""
        return self.num_prompt + self.submit.max_tokens

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
