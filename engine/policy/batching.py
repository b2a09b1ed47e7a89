"""Pure decisions of continuous batching: which model runs next, who gets how many tokens, who pays.

Takes plain numbers, returns plain numbers; the scheduler beside it acts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# A token's compute against reading one cached position: attending over this many positions costs
# about what one more token in the batch costs. Only the split of a step's time depends on it.
POSITIONS_PER_TOKEN = 1024
LEAST_SHARE = 0.25
"""Of a crowd's prompt tokens a step, what it has beside prompts of those who ask seldom."""


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
    crowd_rank: float = math.inf,
    crowd_tokens: int = 0,
) -> list[int]:
    """Tokens each running request computes in this step, in order of the requests.

    Decodes (one token left) come first so that a long prompt never stalls a stream; what is left
    of the budget goes to prompts in chunks, those of the smallest rank first, then in order.
    Prompts of `crowd_rank` and above take what those before them leave of `crowd_tokens`, and
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
    crowd_left, least = crowd_tokens, math.ceil(crowd_tokens * LEAST_SHARE)
    for i in prompts:
        if not ranks or ranks[i] < crowd_rank:
            granted[i] = min(uncomputed[i], left)
            crowd_left = max(crowd_left - granted[i], min(crowd_left, least))
        else:
            granted[i] = min(uncomputed[i], left, crowd_left)
            crowd_left -= granted[i]
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
