"""A request inside the engine: its tokens, its blocks, and the states it may pass through.

    waiting --admit--> running --finish--> finished
       ^                  |
       +-----preempt------+          (its blocks are given back; it is recomputed later)
    waiting --finish--> finished     (abort, failure)

While steps are in flight a request has tokens that are sampled on the device and not known here yet
(`num_pending`). They count as its tokens for whoever lays out the next step; nobody else sees them.

Knows token ids only. The scheduler moves requests between states, nobody else does.

What sampling keeps of a request between its steps, and what its next step is told of it:

    check_sampling   what cannot be sampled, when a request is taken in
    SamplingState    parameters as arrays, and the tokens that penalties count
    SampleInput      one sampling row of a step
    uniforms         its random numbers: from the seed and the position only, never from what a row
                     is batched with or how often it was preempted, so a seeded request repeats
                     exactly. Two rounds of splitmix64 (Steele et al., 2014).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import IllegalTransition
from engine.protocol import FinishReason, SamplingParams, Submit, TokenLogprobs, Usage

# Orders of arrival of class batch begin here: such a request is younger than all others.
BATCH_ORDER = 1 << 40
# The largest magnitude of a logit_bias, a frequency and a presence penalty.
MAX_ADDED = 100.0
# repetition_penalty lies between 1 / this and this.
MAX_REPETITION = 100.0
MAX_LOGPROBS = 20
_MASK = (1 << 64) - 1
_STEP = np.uint64(0x9E3779B97F4A7C15)


RequestState = Literal["waiting", "running", "finished"]
RequestEvent = Literal["admit", "preempt", "finish"]
_TRANSITIONS: dict[RequestState, dict[RequestEvent, RequestState]] = {
    "waiting": {"admit": "running", "finish": "finished"},
    "running": {"preempt": "waiting", "finish": "finished"},
    "finished": {},
}


def check_sampling(
    params: SamplingParams, vocab_size: int, logprobs: int = -1, prompt_logprobs: int = -1
) -> None:
    """Raises ValueError, in words for the client, on what cannot be sampled."""
    ranges = (
        ("temperature", params.temperature, 0.0, math.inf),
        ("top_p", params.top_p, 0.0, 1.0),
        ("min_p", params.min_p, 0.0, 1.0),
        ("frequency_penalty", params.frequency_penalty, -MAX_ADDED, MAX_ADDED),
        ("presence_penalty", params.presence_penalty, -MAX_ADDED, MAX_ADDED),
        ("repetition_penalty", params.repetition_penalty, 1 / MAX_REPETITION, MAX_REPETITION),
        ("top_k", params.top_k, 0, math.inf),
        ("min_tokens", params.min_tokens, 0, math.inf),
        ("logprobs", logprobs, -1, MAX_LOGPROBS),
        ("prompt_logprobs", prompt_logprobs, -1, MAX_LOGPROBS),
        *(("logit_bias", bias, -MAX_ADDED, MAX_ADDED) for bias in params.logit_bias.values()),
    )
    for name, value, low, high in ranges:
        if not low <= value <= high or math.isinf(value):  # NaN compares false
            raise ValueError(f"{name} is {value}, not between {low} and {high}")
    for token in params.logit_bias:
        if not 0 <= token < vocab_size:
            raise ValueError(f"logit_bias has token {token}, not between 0 and {vocab_size - 1}")


class SamplingState:
    """What sampling keeps of one request between its steps; made once, when it is taken in."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        stop_ids: Sequence[int] = (),
        logprobs: int = -1,
    ) -> None:
        self.params = params
        self.num_prompt = len(prompt_ids)
        self.stop_ids = np.array(sorted(set(stop_ids)), dtype=np.int64)
        self.logprobs = logprobs
        self.bias_ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
        self.bias_values = np.fromiter(params.logit_bias.values(), dtype=np.float32)
        self.penalties = PenaltyState(params, prompt_ids) if has_penalties(params) else None
        self.needs_tokens = self.penalties is not None
        """Whether the next token depends on which ones came before, not only on how many."""
        # What most requests are drawn by: temperature, top_p, min_p, top_k.
        self.numbers = (params.temperature, params.top_p, params.min_p, params.top_k)
        others = len(self.bias_ids) > 0 or self.penalties is not None or logprobs >= 0
        # Output tokens up to which something else changes logits, or reports them.
        self._edited: float = math.inf if others else params.min_tokens if len(self.stop_ids) else 0

    def edits_logits(self, num_output: int) -> bool:
        """Whether something changes the logits of the token after `num_output`, or reports them."""
        return num_output < self._edited


def has_penalties(params: SamplingParams) -> bool:
    """Whether any penalty differs from its default."""
    return bool(
        params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
    )


class PenaltyState:
    """The distinct tokens of one request: of its output, and of its prompt for repetition.

    `counts` are occurrences in the output alone. The arrays grow by doubling; a step adds a token
    in constant time. Preemption changes nothing here: ids stay with the request.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self.params = params
        repeats = params.repetition_penalty != 1.0
        self._prompt = np.unique(np.array(prompt_ids if repeats else [], dtype=np.int64))
        self._start()

    def _start(self) -> None:
        self._num_seen = 0
        self._size = len(self._prompt)
        self._ids = self._prompt.copy()
        self._counts = np.zeros(self._size, dtype=np.float32)
        self._slots = {int(token): slot for slot, token in enumerate(self._prompt)}

    def update(self, output_ids: Sequence[int]) -> None:
        """Take in what was generated since the last call; a shorter output starts afresh."""
        if len(output_ids) < self._num_seen:
            self._start()
        for token in output_ids[self._num_seen :]:
            slot = self._slots.setdefault(token, self._size)
            if slot == self._size:
                self._grow()
                self._ids[slot] = token
                self._counts[slot] = 0.0
                self._size += 1
            self._counts[slot] += 1.0
        self._num_seen = len(output_ids)

    def _grow(self) -> None:
        if self._size == len(self._ids):
            room = max(64, len(self._ids))
            self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])

    @property
    def ids(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Distinct token ids [N]; a view that the next update may outdate."""
        return self._ids[: self._size]

    @property
    def counts(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """Occurrences in the output [N], beside `ids`."""
        return self._counts[: self._size]


class LateMask(Protocol):
    """A mask that is still being computed when its row is laid out."""

    def take(self, deadline_s: float) -> torch.Tensor | None:
        """Wait for it until then (monotonic seconds); None: it has not come."""


@dataclass(frozen=True, slots=True)
class SampleInput:
    """One sampling row. mask: int32 [ceil(V / 32)], bit t of the words: token t may come next.

    late_mask: where the mask comes from just before sampling; a row whose mask does not come is
    sampled without, and who owns the late mask knows that its token must not be used.

    `num_in_flight` tokens follow `output_ids` that a step in flight still samples. `pending`: the
    place of the last of them among the tokens that the step before samples; -1: none.
    """

    state: SamplingState
    output_ids: Sequence[int]
    mask: torch.Tensor | None = None
    num_in_flight: int = 0
    late_mask: LateMask | None = None
    pending: int = -1

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.output_ids) + self.num_in_flight

    @property
    def is_masked(self) -> bool:
        """Whether a mask says what may come."""
        return self.mask is not None or self.late_mask is not None


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1) from (seed, position)."""
    return float(uniforms([seed], [position])[0])


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number a pair; seeds are taken modulo 2**64."""
    seed = np.array([value & _MASK for value in seeds], dtype=np.uint64)
    state = _mix(seed + _STEP * (np.array(positions, dtype=np.uint64) + np.uint64(1)))
    bits = _mix(state ^ seed) >> np.uint64(11)
    # The half keeps 0 out; the minimum keeps out the 1 that the largest value would round to.
    return np.minimum((bits.astype(np.float64) + 0.5) / (1 << 53), 1.0 - 2.0**-53)


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


if TYPE_CHECKING:
    from engine.encoding import Encoding
    from engine.memory import RequestKv


class BoundRow(LateMask, Protocol):
    """A request's constraint as its steps see it; `constrained_rows.ConstrainedRow`."""

    @property
    def may_sample(self) -> bool:
        """Whether the next step may sample the request."""


@dataclass(slots=True, eq=False)
class Request:
    """One attempt of one request.

    instance_id        the resident pack that runs it
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
    order          order of arrival over all models: the youngest is preempted first; of class batch
                   it is younger than all that are not
    deadline_s     it ends with reason `timeout` from then on
    device_s, memory_s  what it is charged (`Charges`); prefill_s, of device_s, for its prompt
    held_since_s   second of the device's work up to which its memory is charged; None: holds none
    num_lost       leading positions that a preemption threw away: computing them again is free
    key            the name under which messages speak of it
    num_prompt     prompt tokens
    num_resumed    tokens behind the prompt that earlier attempts have made
    max_total_tokens  tokens it may reach; the last one's KV is never needed, its slot is reserved
    """

    submit: Submit
    arrival_s: float
    token_ids: list[int]
    sampling: SamplingState
    instance_id: str = ""
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
    # Asked many times a step of every row.
    key: tuple[str, int] = field(init=False)
    num_prompt: int = field(init=False)
    num_resumed: int = field(init=False)
    max_total_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        """What follows from the Submit, which never changes."""
        self.key = self.submit.request_id, self.submit.attempt
        self.num_prompt = len(self.submit.prompt_token_ids)
        self.num_resumed = len(self.submit.generated)
        self.max_total_tokens = self.num_prompt + self.submit.max_tokens

    @classmethod
    def of(
        cls, submit: Submit, now_s: float, instance_id: str = "", timeout_s: float = 0.0
    ) -> "Request":
        """A new waiting request of `instance_id` (the model's own name where no pack is shared).

        One that goes on from an earlier attempt is like one that was preempted: its tokens are
        there, and their KV is to be computed.
        `timeout_s` bounds what the Submit asks for; 0: it does not.
        """
        # 0 is no bound, and neither is what is no number; a negative one is over at once.
        asked_s = submit.timeout_s if submit.timeout_s > 0 or submit.timeout_s < 0 else math.inf
        if submit.is_batch and asked_s < math.inf:
            timeout_s = 0.0  # it may have a day, and waits here while others run
        return cls(
            submit=submit,
            arrival_s=now_s,
            token_ids=[*submit.prompt_token_ids, *submit.generated],
            sampling=SamplingState(
                submit.sampling, submit.prompt_token_ids, submit.stop_token_ids, submit.logprobs
            ),
            instance_id=instance_id or submit.model_id,
            deadline_s=now_s + min(asked_s, timeout_s or math.inf),
            # What it finds now is not the first attempt's hit: that one is billed.
            cached_tokens=submit.cached_tokens if submit.generated else None,
        )

    @property
    def is_batch(self) -> bool:
        """Whether it is of class batch; its `order` is above BATCH_ORDER then."""
        return self.submit.is_batch

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, as far as known, those of earlier attempts included."""
        return len(self.token_ids) - self.num_prompt

    @property
    def has_one_new(self) -> bool:
        """Whether the last token is the first that this attempt has made."""
        return self.num_generated == self.num_resumed + 1

    @property
    def num_tokens(self) -> int:
        """Its tokens, those in flight included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV must still be computed; 1 in plain decoding."""
        return len(self.token_ids) + self.num_pending - self.num_computed

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
            self.sampling,
            known,
            num_in_flight=self.num_pending,
            late_mask=self.constrained,
            pending=self.pending_row if self.num_pending else -1,
        )

    @property
    def edits_logits(self) -> bool:
        """Whether its next token is chosen by more than its `SamplingState.numbers`."""
        num_output = self.num_tokens - self.num_prompt
        return self.sampling.edits_logits(num_output) or self.constrained is not None

    @property
    def waits_for_token(self) -> bool:
        """Whether its next step has to wait for a mask, which depends on the token in flight."""
        return not self.num_runnable or bool(self.num_pending and self.constrained is not None)

    @property
    def scores_prompt(self) -> bool:
        """Whether some logprobs of its prompt are still to come. Cached KV would have none; of
        a request that goes on all have come with its first token."""
        wanted = self.num_prompt - 1 if self.submit.prompt_logprobs >= 0 else 0
        return len(self.prompt_scores) < wanted and not self.num_resumed

    @property
    def matchable_ids(self) -> Sequence[int]:
        """Its tokens, as far as their KV may be taken from the prefix cache."""
        return () if self.scores_prompt else self.token_ids

    @property
    def is_complete(self) -> bool:
        """Its last token is on its way at the latest: nothing is left to launch for it."""
        return len(self.token_ids) + self.num_pending >= self.max_total_tokens

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

    def on(self, event: RequestEvent) -> None:
        """Change state. Raises IllegalTransition, changing nothing."""
        state = _TRANSITIONS[self.state].get(event)
        if state is None:
            raise IllegalTransition(f"request {self.key}: {event} while {self.state}")
        self.state = state

    def finish(self, reason: FinishReason, error: str = "") -> None:
        """End it; its blocks must have been or are about to be given back by the scheduler."""
        self.on("finish")
        self.finish_reason = reason
        self.error = error
