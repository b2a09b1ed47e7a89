"""A stretch of decode steps of one worker, planned ahead: where nothing is decided, k at once.

    plan     after a step: how far could it go on like this? Until the step in which the first row
             ends, a deadline, the end of a load, the next status, memory that could become short
    cut      a message comes in between: the stretch ends at the first step's end after that
    advance  the steps up to a moment are brought into the engine (`bench/sim/fast_forward.py`)

The outcome is that of single steps, for the times of steps come from the same figures and are
summed in the same order. What is sent later than by single steps are tokens between a request's
first and its last: they come together, and nobody looks at them in between.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate

from bench.sim.device import ModelCost, Roofline, SimBackend
from bench.sim.fast_forward import Decode, FastForward, Steps
from bench.sim.parts import PLAIN_TOKEN, SimRunner
from engine.engine import Engine
from engine.protocol import TokenDelta

FIRST_STEPS = 32
LOOK_AHEAD = 8
MAX_STEPS = 1024
"""Tokens of one request in one message stay below what a stream buffers."""
FEWEST_STEPS = 2
"""A shorter stretch costs more than its steps."""


@dataclass(slots=True, eq=False)
class Stretch:
    """`ends_s[n]` is when step n ends. The first `num_done` have been brought in, `num_steps` will
    be."""

    fast_forward: FastForward
    backend: SimBackend
    decodes: list[Decode]
    steps: Steps
    ends_s: list[float]
    start_s: float
    num_steps: int
    num_done: int = 0
    _first_contexts: list[list[int]] | None = None

    @property
    def end_s(self) -> float:
        """When the last step ends."""
        return self.ends_s[self.num_steps - 1] if self.num_steps else self.start_s

    def next_most(self, most_steps: int) -> int:
        """How far the next one should be planned: what is planned and cut off was for nothing."""
        if self.num_steps < len(self.ends_s):
            return max(FIRST_STEPS, 2 * self.num_steps)
        return min(MAX_STEPS, 2 * most_steps)

    def cut(self, now_s: float) -> bool:
        """Something wants the worker's attention: end with the step under way. True if shorter."""
        begun = 0 if now_s <= self.start_s else bisect_left(self.ends_s, now_s) + 1
        num_steps = max(self.num_done, begun)
        if num_steps >= self.num_steps:
            return False
        self.num_steps = num_steps
        return True

    def advance_begun(self, now_s: float) -> None:
        """Bring in what has begun by `now_s`, as single steps would have it by then."""
        self._advance(bisect_right(self.steps.starts_s, now_s, hi=self.num_steps))

    def advance_ended(self, now_s: float) -> float:
        """Bring in what has ended by `now_s`; when that was."""
        num_steps = max(self.num_done, bisect_right(self.ends_s, now_s, hi=self.num_steps))
        self._advance(num_steps)
        return self.ends_s[num_steps - 1] if num_steps else now_s

    def deltas(self) -> list[TokenDelta]:
        """What the steps run so far have said."""
        assert self._first_contexts is not None
        return [
            TokenDelta(*request.key, [PLAIN_TOKEN] * (now - before))
            for decode, contexts in zip(self.decodes, self._first_contexts, strict=True)
            for request, before, now in zip(decode.rows, contexts, decode.contexts, strict=True)
            if now > before
        ]

    def _advance(self, num_steps: int) -> None:
        if self._first_contexts is None:
            self._first_contexts = [decode.contexts for decode in self.decodes]
        if num_steps > self.num_done:
            steps = self.steps
            if self.num_done or num_steps < len(steps):
                steps = steps.cut(self.num_done, num_steps)
            self.fast_forward.run(self.decodes, steps, PLAIN_TOKEN)
            self.backend.fast_forward(steps.device_s, self.ends_s[num_steps - 1])
            self.num_done = num_steps


def plan(
    engine: Engine,
    fast_forward: FastForward,
    backend: SimBackend,
    now_s: float,
    until_s: float,
    poll_s: float,
    most_steps: int,
) -> Stretch | None:
    """A stretch from now on of which no step begins at `until_s` or later; no step of a model more
    than `most_steps`."""
    decodes = fast_forward.decodes()
    if not decodes:
        return None
    until_s = min(until_s, fast_forward.until_s(now_s, poll_s))
    if until_s <= now_s:
        return None
    runners = [_runner(engine, decode) for decode in decodes]
    left = [
        0
        if decode.stops
        else min((runner.steps_to_end(request) for request in decode.rows), default=1) - 1
        for decode, runner in zip(decodes, runners, strict=True)
    ]
    longest = _in_memory(fast_forward, decodes, min(most_steps, max(left)))
    if longest < FEWEST_STEPS:
        return None
    costs = [
        _Costs(backend.roofline, runner.cost, decode, min(longest, most))
        for decode, runner, most in zip(decodes, runners, left, strict=True)
    ]
    blocks = _walk(fast_forward, decodes, costs, now_s, until_s)
    device_s = [
        seconds for model, low, high in blocks for seconds in costs[model].device_s[low:high]
    ]
    times = list(accumulate(device_s, initial=now_s))
    num_steps = min(bisect_left(times, until_s), len(device_s), MAX_STEPS)
    if num_steps < FEWEST_STEPS:
        return None
    steps = Steps(blocks, times[:-1], device_s)
    if num_steps < len(device_s):
        steps = steps.cut(0, num_steps)
    return Stretch(
        fast_forward, backend, decodes, steps, times[1 : num_steps + 1], now_s, num_steps
    )


class _Costs:
    """What a model's next steps take, known as far as somebody has asked.

    device_s  of each step
    tags      the model's tag before each of them and after the last
    num_steps that there may be at most
    """

    def __init__(
        self, roofline: Roofline, model: ModelCost, decode: Decode, num_steps: int
    ) -> None:
        self.num_steps = num_steps
        self.device_s: list[float] = []
        self.tags = [decode.queue.tag]
        self._roofline = roofline
        self._model = model
        self._contexts = decode.contexts

    def know(self, num_steps: int) -> int:
        """Have so many known, or all there are; how many are."""
        known = len(self.device_s)
        if known < min(num_steps, self.num_steps):
            more = min(max(num_steps, known + LOOK_AHEAD, 2 * known), self.num_steps) - known
            contexts = [context + known for context in self._contexts]
            seconds = self._roofline.decode_steps_s(self._model, contexts, more)
            self.device_s += seconds
            self.tags += list(accumulate(seconds, initial=self.tags[-1]))[1:]
        return len(self.device_s)


def _walk(
    fast_forward: FastForward,
    decodes: list[Decode],
    costs: list[_Costs],
    now_s: float,
    until_s: float,
) -> list[tuple[int, int, int]]:
    """Blocks of steps of the model whose turn it is, until one may end a request.

    The rule is that of `policy.batching.choose_model`, applied to blocks: a model goes on for
    `min_run_steps`, and then for as long as its tag is the smallest.
    """
    model, in_a_row = fast_forward.last_run(decodes)
    if len(decodes) == 1:  # and it does not stop, for something decodes
        decodes[0].is_tried = True
        return [(0, 0, costs[0].know(costs[0].num_steps))]
    done = [0] * len(decodes)
    blocks: list[tuple[int, int, int]] = []
    num_steps = 0
    while now_s < until_s and num_steps < MAX_STEPS:
        # The model goes on, or the one with the smallest tag of those that run takes over.
        keys = [(costs[u].tags[done[u]], decodes[u].queue.instance_id, u) for u in range(len(done))]
        forced = max(0, fast_forward.min_run_steps - in_a_row) if model >= 0 else 0
        if not forced:
            chosen = min(key for key in keys if decodes[key[2]].rows or decodes[key[2]].stops)
            if decodes[chosen[2]].stops:
                break
            _try(decodes, keys, chosen)
            if chosen[2] != model:
                in_a_row, forced = 0, fast_forward.min_run_steps
            model = chosen[2]
        elif decodes[model].stops:
            break
        decodes[model].is_tried = True
        first, end = done[model], costs[model].num_steps
        others = [
            key
            for key in keys
            if key[2] != model and (decodes[key[2]].rows or decodes[key[2]].stops)
        ]
        last = _end_of_block(costs[model], first + forced, decodes[model], others)
        stop = min(end, last)
        if stop > first + forced:
            tag = costs[model].tags[stop - 1]
            _try(decodes, keys, (tag, decodes[model].queue.instance_id, model))
        if stop > first:
            blocks.append((model, first, stop))
            now_s += sum(costs[model].device_s[first:stop])
            num_steps += stop - first
            in_a_row += stop - first
            done[model] = stop
        if stop == end and last >= end:
            break  # its next step ends a request
    return blocks


def _end_of_block(
    costs: _Costs, begin: int, decode: Decode, others: list[tuple[float, str, int]]
) -> int:
    """The first of its own steps from `begin` on at which another model takes over."""
    known = costs.know(begin)
    if not others:
        return costs.know(costs.num_steps) + 1
    tag, instance_id, _ = min(others)
    bisect = bisect_right if decode.queue.instance_id < instance_id else bisect_left
    while True:
        found = bisect(costs.tags, tag, lo=min(begin, known))
        if found <= known or known == costs.num_steps:
            return max(begin, found)
        known = costs.know(known + 1)


def _try(
    decodes: list[Decode], keys: list[tuple[float, str, int]], chosen: tuple[float, str, int]
) -> None:
    """The scheduler looks at whoever comes before the one that runs, in vain."""
    for key in keys:
        if key <= chosen:
            decodes[key[2]].is_tried = True


def _in_memory(fast_forward: FastForward, decodes: list[Decode], num_steps: int) -> int:
    """So many steps, or fewer where pages could become short."""
    spare = fast_forward.num_spare_pages
    while num_steps and (spare < 0 or fast_forward.pages_for(decodes, num_steps) > spare):
        num_steps //= 2
    return num_steps


def _runner(engine: Engine, decode: Decode) -> SimRunner:
    runner = engine.runner(decode.queue.instance_id)
    assert isinstance(runner, SimRunner)
    return runner
