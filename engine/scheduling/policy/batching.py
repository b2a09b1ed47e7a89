"""Pure decisions of batching: which model runs next, who computes how many tokens, who pays.

Takes plain numbers, returns plain numbers; the scheduler beside it acts.

**Pace.** A light tenant waits for the step under way before anything else. A step that is filled
with prompts lasts several times as long as one that only decodes, so while there is more than one
tenant the prompts of heavy tenants are cut into smaller chunks: steps are to last TARGET_S, or
STRETCH times a step that only decodes where that is longer, for each step reads the weights once
and a chunk that hides behind that costs nothing. Prompts of light tenants are not cut. What a token
takes is measured, as time over tokens of the steps that were about as large as is allowed: a step's
fixed part is in it, and the size settles where a step lasts as long as it should.

**Encoders.** Inputs are computed whole. The oldest request always gets its next input, so that
every request makes progress; what is left of the budget is shared out equally, so that a query of
one text does not wait for two thousand that came before it; what the shares leave goes to the
oldest again.

**Memory of tenants.** While another tenant has unfinished work, a request of a tenant that runs
something already starts only within the tenant's share of the KV memory. Requests that run grow
beyond it as long as memory is free (to stop them would waste what they have computed); when it is
short, they go first. One request of each tenant, its oldest, is never held back or chosen for being
above a share.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# A token's compute against reading one cached position: attending over this many positions costs
# about what one more token in the batch costs. Only the split of a step's time depends on it.
POSITIONS_PER_TOKEN = 1024
LEAST_SHARE = 0.25
"""Of the heavy tenants' prompt tokens in a step, what they keep beside prompts of light tenants."""
TARGET_S = 0.025
STRETCH = 1.5
FEWEST_TOKENS = 32
"""Heavy tenants' prompts go on by so many tokens a step, however long that takes."""
NEWEST_SHARE = 0.2
LIKE = 0.5
"""A step tells what a token takes if it had this share, at least, of the tokens allowed."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A running request. `order`: by arrival over all models."""

    tenant_id: str
    order: int


@dataclass(frozen=True, slots=True)
class Share:
    """What a tenant may hold: `num_pages` now, or anything where nobody else has work."""

    num_pages: float
    contended: bool


def share_of(num_kv_pages: int, share: float, num_tenants: int) -> Share:
    """`num_tenants`: those with unfinished work."""
    return Share(num_kv_pages * share, share < 1 and num_tenants > 1)


def may_start(held: Mapping[str, float], tenant_id: str, num_pages: float, share: Share) -> bool:
    """Whether one more request that needs `num_pages` may start; a tenant's first always may."""
    if not share.contended or tenant_id not in held:
        return True
    return held[tenant_id] + num_pages <= share.num_pages


def choose_victim(holdings: Sequence[Holding], held: Mapping[str, float], share: Share) -> int:
    """Index of the running request that is preempted when memory is short.

    `held`: pages by tenant, those that several of its requests share counted once: a long prompt
    that a tenant asks many questions about does not put it above its share.

    The youngest of a tenant above its share, but for that tenant's oldest; where there is none, the
    youngest of all. So the oldest request of all is only chosen when it runs alone.
    """
    above: list[int] = []
    if share.contended:
        oldest = {holding.tenant_id: holding.order for holding in _youngest_first(holdings)}
        above = [
            i
            for i, holding in enumerate(holdings)
            if held[holding.tenant_id] > share.num_pages
            and holding.order != oldest[holding.tenant_id]
        ]
    return max(above or range(len(holdings)), key=lambda i: holdings[i].order)


def _youngest_first(holdings: Sequence[Holding]) -> list[Holding]:
    return sorted(holdings, key=lambda holding: -holding.order)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """A resident model with runnable requests.

    tag      service it has had: the smallest goes first
    urgent   somebody who has little here waits for a first token
    """

    model_id: str
    tag: float
    urgent: bool = False


def choose_model(
    work: Sequence[ModelWork], current: str | None, steps_run: int, min_run_steps: int
) -> str | None:
    """The model whose batch runs next.

    The running model keeps the device for `min_run_steps` steps while it has work, so that
    switching does not eat the device; then the smallest tag wins, ties by name. For one
    that is urgent and has had no more service it stops earlier: who asks seldom would wait for all
    of them.
    """
    if not work:
        return None
    if steps_run < min_run_steps:
        mine = next((item.tag for item in work if item.model_id == current), None)
        if mine is not None and not any(
            item.urgent and item.model_id != current and item.tag <= mine for item in work
        ):
            return current
    return min(work, key=lambda item: (item.tag, item.model_id)).model_id


def lift(tag: float, active_tags: Sequence[float]) -> float:
    """A model's tag when it becomes active again: idleness earns no credit (Sheng et al., 2024).

    `active_tags` are those of the models that run; where none does, that of the last to run.
    """
    return max(tag, min(active_tags)) if active_tags else tag


def split_budget(
    uncomputed: Sequence[int],
    max_tokens: int,
    ranks: Sequence[int] = (),
    heavy_rank: float = math.inf,
    heavy_tokens: int = 0,
) -> list[int]:
    """Tokens each running request computes in this step, in order of the requests.

    Decodes (one token left) come first so that a long prompt never stalls a stream; what is left
    of the budget goes to prompts in chunks, those of the smallest rank first, then in order.
    Prompts of `heavy_rank` and above take what those before them leave of `heavy_tokens`, and
    LEAST_SHARE of these at least.
    """
    granted = [0] * len(uncomputed)
    left = max_tokens
    for i, tokens in enumerate(uncomputed):
        if tokens == 1 and left:
            granted[i] = 1
            left -= 1
    prompts = [i for i, tokens in enumerate(uncomputed) if tokens > 1]
    if ranks:
        prompts.sort(key=lambda i: ranks[i])
    heavy_left, least = heavy_tokens, math.ceil(heavy_tokens * LEAST_SHARE)
    for i in prompts:
        if not ranks or ranks[i] < heavy_rank:
            granted[i] = min(uncomputed[i], left)
            heavy_left = max(heavy_left - granted[i], min(heavy_left, least))
        else:
            granted[i] = min(uncomputed[i], left, heavy_left)
            heavy_left -= granted[i]
        left -= granted[i]
    return granted


def arena_share(rates: Sequence[tuple[float, float]], context: int, num_pages: int) -> float:
    """Share of the arena that so many positions of a request take; no block is rounded up.

    `rates`: by layer group (pages a position takes, positions that are kept at most); an encoder
    has none, for it keeps nothing. Blocks that requests share count for each of them.
    """
    share = 0.0
    for pages_per_token, most in rates:
        share += pages_per_token * min(context, most) / num_pages
    return share


def split_time(step_s: float, rows: Sequence[tuple[int, float]]) -> list[float]:
    """Seconds each row is charged; they add up to `step_s` exactly but for rounding.

    A row is (tokens computed, context length): its share is its tokens plus what attending costs.
    """
    costs = [tokens * (1 + context / POSITIONS_PER_TOKEN) for tokens, context in rows]
    total = sum(costs)
    return [step_s * cost / total for cost in costs]


class StepPace:
    """What steps of one model have taken."""

    def __init__(self) -> None:
        self._decode_s: float | None = None
        self._token_s: float | None = None
        self._allowed = 0.0

    def observe(self, step_s: float, num_tokens: int, num_prompt_tokens: int) -> None:
        """A step has ended: all its tokens, and those of them that were of prompts.

        A step of no time (a clock that stood, or none that a device can tell) says nothing.
        """
        if not 0.0 < step_s < math.inf:
            return
        if not num_prompt_tokens:
            self._decode_s = _average(self._decode_s, step_s)
        elif self._token_s is None or num_tokens >= LIKE * self._allowed:
            self._token_s = _average(self._token_s, step_s / num_tokens)

    @property
    def token_s(self) -> float | None:
        """Device seconds of a prompt's token; None while no prompt was computed."""
        return self._token_s

    def heavy_tokens(self, num_decodes: int, most: int, *, is_batch: bool = False) -> int:
        """Prompt tokens of heavy tenants in the next step, beside so many rows that decode.
        `is_batch`: of class batch, beside rows of others: they are stretched, and no more."""
        if self._token_s is None:
            self._allowed = 0.0
            return FEWEST_TOKENS if is_batch else most
        step_s = STRETCH * (self._decode_s or 0.0)
        if not (is_batch and self._decode_s):
            step_s = max(TARGET_S, step_s)
        self._allowed = min(step_s / self._token_s, num_decodes + most)
        return max(FEWEST_TOKENS, int(self._allowed) - num_decodes)


def _average(before: float | None, new: float) -> float:
    return new if before is None else before + NEWEST_SHARE * (new - before)


def share_inputs(requests: Sequence[tuple[Sequence[int], int]], max_tokens: int) -> list[int]:
    """Tokens each request computes in this step, whole inputs, in the order of the requests.

    A request is (`ends`: tokens up to and with each of its inputs, tokens computed so far), oldest
    first, and has an input left. More than `max_tokens` only where the oldest's next input is
    longer; then it goes alone.
    """
    granted = [0] * len(requests)
    if not requests:
        return granted
    ends, done = requests[0]
    granted[0] = ends[bisect_right(ends, done)] - done
    left = max_tokens - granted[0]
    waiting = len(requests)
    # Smallest needs first: what they leave of their share goes to those that need more.
    for i in sorted(range(len(requests)), key=lambda i: requests[i][0][-1] - requests[i][1]):
        share = max(0, left) // waiting
        left -= _extend(requests[i], granted, i, share)
        waiting -= 1
    for i, request in enumerate(requests):
        left -= _extend(request, granted, i, left)
    return granted


def _extend(request: tuple[Sequence[int], int], granted: list[int], number: int, room: int) -> int:
    """Grant more whole inputs of at most `room` tokens together. Returns how many tokens."""
    if room <= 0:
        return 0
    ends, done = request
    start = done + granted[number]
    fitting = bisect_right(ends, start + room)
    more = ends[fitting - 1] - start if fitting and ends[fitting - 1] > start else 0
    granted[number] += more
    return more
