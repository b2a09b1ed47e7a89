"""Pure decisions of continuous batching: which model runs next, who gets how many tokens, who pays.

Takes plain numbers, returns plain numbers; the scheduler beside it acts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# A token's compute against reading one cached position: attending over this many positions costs
# about what one more token in the batch costs. Only the split of a step's time depends on it.
POSITIONS_PER_TOKEN = 1024


@dataclass(frozen=True, slots=True)
class ModelWork:
    """A resident model with runnable requests. `tag`: service it has had, smallest goes first."""

    model_id: str
    tag: float


def choose_model(
    work: Sequence[ModelWork], current: str | None, steps_run: int, min_run_steps: int
) -> str | None:
    """The model whose batch runs next.

    The running model keeps the device for `min_run_steps` steps while it has work, so that
    switching does not eat the device; then the smallest tag wins, ties by name.
    """
    if not work:
        return None
    if steps_run < min_run_steps and any(item.model_id == current for item in work):
        return current
    return min(work, key=lambda item: (item.tag, item.model_id)).model_id


def lift(tag: float, active_tags: Sequence[float]) -> float:
    """A model's tag when it becomes active again: idleness earns no credit (Sheng et al., 2024).

    `active_tags` are those of the models that run; where none does, that of the last to run.
    """
    return max(tag, min(active_tags)) if active_tags else tag


def split_budget(uncomputed: Sequence[int], max_tokens: int) -> list[int]:
    """Tokens each running request computes in this step, in order of the requests.

    Decodes (one token left) come first so that a long prompt never stalls a stream; what is left
    of the budget goes to prompts in order, in chunks.
    """
    granted = [0] * len(uncomputed)
    left = max_tokens
    for i, tokens in enumerate(uncomputed):
        if tokens == 1 and left:
            granted[i] = 1
            left -= 1
    for i, tokens in enumerate(uncomputed):
        if tokens > 1 and left:
            granted[i] = min(tokens, left)
            left -= granted[i]
    return granted


def split_time(step_s: float, rows: Sequence[tuple[int, float]]) -> list[float]:
    """Seconds each row is charged; they add up to `step_s` exactly but for rounding.

    A row is (tokens computed, context length): its share is its tokens plus what attending costs.
    """
    costs = [tokens * (1 + context / POSITIONS_PER_TOKEN) for tokens, context in rows]
    total = sum(costs)
    return [step_s * cost / total for cost in costs]
