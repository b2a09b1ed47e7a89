"""Many steps of plain decoding at one go: what they leave behind, without running them.

For devices whose time is modelled. Where all that runs decodes and nobody else could start, steps
differ in their lengths only, and a simulation need not go through each. `decodes` says whether that
is so, `run` brings scheduler, caches, pool and books to where so many single steps would have
brought them: blocks are reserved and offered to the prefix cache by the same calls in the same
order, and sums are made in the order of the steps. Whoever plans the steps sees to it that no
request ends in one, that none begins at `until_s` or later, and that `pages_for` of them are free.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from engine.engine import Engine
from engine.errors import IntegrityError
from engine.memory.kv_cache import KvCache
from engine.request import Request
from engine.residency.residency import Residency
from engine.scheduling.policy.batching import POSITIONS_PER_TOKEN, arena_share, split_time
from engine.scheduling.queues import ModelQueue

FEW_SHARES = 48
"""Up to so many rows times steps plain arithmetic is quicker than numpy's."""
_RESERVE, _ADVANCE = 0, 1
_Event: TypeAlias = tuple[int, int, int, int, int]
"""(step, what, model, row, the model's own number of the step): sorted as a step goes."""


@dataclass(slots=True, eq=False)
class Decode:
    """One model: its running requests, if any runs.

    stops      its next step is not plain decoding: somebody may start, or a prompt is computed
    contexts   tokens of the rows before its next step
    is_tried   the scheduler would look at who waits there
    """

    queue: ModelQueue
    cache: KvCache
    rows: list[Request]
    stops: bool
    contexts: list[int] = field(default_factory=list)
    is_tried: bool = False

    def look(self) -> None:
        """Contexts as of now."""
        self.contexts = [len(request.token_ids) for request in self.rows]


@dataclass(slots=True, eq=False)
class Steps:
    """Steps one after the other. A block is a model's steps in a row: (model, first, end) by place
    of the model and its own numbers; `starts_s` and `device_s` are those of all steps, in order.
    """

    blocks: list[tuple[int, int, int]]
    starts_s: list[float]
    device_s: list[float]

    def __len__(self) -> int:
        return len(self.starts_s)

    def cut(self, first: int, end: int) -> "Steps":
        """From step `first` up to `end`, with the models' own numbers from 0 on."""
        blocks: list[tuple[int, int, int]] = []
        taken: dict[int, int] = {}
        number = 0
        for model, low, high in self.blocks:
            count = min(end, number + high - low) - max(first, number)
            number += high - low
            if count > 0:
                start = taken.get(model, 0)
                blocks.append((model, start, start + count))
                taken[model] = start + count
        return Steps(blocks, self.starts_s[first:end], self.device_s[first:end])

    def of_models(self, num_models: int) -> list[list[int]]:
        """By model, the numbers of its steps."""
        own: list[list[int]] = [[] for _ in range(num_models)]
        number = 0
        for model, low, high in self.blocks:
            own[model].extend(range(number, number + high - low))
            number += high - low
        return own


class FastForward:
    """Over the parts of one engine, private ones too: nothing in the product is there for it."""

    def __init__(self, engine: Engine) -> None:
        self._config = engine._config
        self._pool = engine.pool
        self._kv = engine._kv
        self._scheduler = engine._scheduler
        self._residency = engine._residency
        self._pipeline = engine._pipeline
        self._deadlines = engine._deadlines
        self._counters = engine._counters

    def decodes(self) -> list[Decode]:
        """Models with requests, where something decodes and nothing is in flight; else none."""
        if self._config.steps_ahead or self._pipeline.num_in_flight or self._scheduler.num_batch:
            return []
        queues = [queue for queue in self._scheduler.queues() if queue.num_unfinished]
        if len(queues) > 1 and any(map(self._scheduler._is_urgent, queues)):
            return []  # turns are cut short for it
        num_running = sum(len(queue.running) for queue in queues)
        is_full = num_running >= self._config.max_num_seqs
        found: list[Decode] = []
        for queue in queues:
            if queue.cache is None:
                continue  # waits for its load
            rows = queue.running
            stops = (
                (bool(queue.waiting) and not is_full)
                or self._takes_over(queue)
                or len(rows) > self._config.max_num_seqs
                or not all(map(_decodes, rows))
            )
            found.append(Decode(queue, queue.cache, list(rows), stops))
        if not any(decode.rows and not decode.stops for decode in found):
            return []
        for decode in found:
            decode.look()
        return found

    def until_s(self, now_s: float, poll_s: float) -> float:
        """No step at this time or later may be skipped. At most `now_s`: none at all.

        A load that waits for others to leave looks at the clock in every step; with `poll_s` above
        0 it is let look so often only.
        """
        deadlines = self._deadlines._heap
        next_s = deadlines[0][0] if deadlines else math.inf
        return min(_waits_until_s(self._residency, now_s, poll_s), next_s)

    def pages_for(self, decodes: Sequence[Decode], num_steps: int) -> int:
        """Pages that so many steps of each model take at most."""
        return sum(
            (group.plan.extents_for(blocks) + 1) * group.plan.pages_per_extent
            for decode in decodes
            if (blocks := _blocks_for(decode, num_steps))
            for group in decode.cache.groups
        )

    @property
    def num_spare_pages(self) -> int:
        """Pages that may be taken without anybody giving way."""
        return self._pool.num_free - self._kv.num_spare_pages

    @property
    def min_run_steps(self) -> int:
        """Steps a model runs before another may take the device."""
        return self._config.min_run_steps

    def last_run(self, decodes: Sequence[Decode]) -> tuple[int, int]:
        """What `next_model` begins with: the model that ran last (-1: another), steps in a row."""
        current, num_steps = self._scheduler._current, self._scheduler._steps_run
        for place, decode in enumerate(decodes):
            if decode.queue.instance_id == current and (decode.rows or decode.stops):
                return place, num_steps
        return -1, 0

    def run(self, decodes: Sequence[Decode], steps: Steps, token: int) -> None:
        """As if these steps had run; `token` is what every row has sampled in each."""
        if not len(steps):
            return
        own = steps.of_models(len(decodes))
        for decode, numbers in zip(decodes, own, strict=True):
            for request in decode.rows:
                request.token_ids += [token] * len(numbers)
        self._grow(decodes, steps, own)
        num_tokens = 0
        counters = self._counters
        busy_s = list(accumulate(steps.device_s, initial=counters["busy_seconds"]))
        for decode, numbers in zip(decodes, own, strict=True):
            if numbers:
                self._charge(decode, steps, numbers, busy_s)
                num_tokens += len(decode.rows) * len(numbers)
        for model, low, high in steps.blocks:
            self._scheduler._note_runs(decodes[model].queue, high - low)
        counters["busy_seconds"] = busy_s[-1]
        counters["steps"] += len(steps)
        counters["batch_tokens"] += num_tokens
        counters["generation_tokens"] += num_tokens
        for decode in decodes:
            if decode.queue.waiting and decode.is_tried:
                # That somebody waits for a row, or is held back by a share, is noted at a look.
                self._look_at_waiting(decode.queue, steps.starts_s[-1])
            decode.look()

    def _grow(self, decodes: Sequence[Decode], steps: Steps, own: list[list[int]]) -> None:
        """Reserve and advance, step by step and within a step in the order of the rows."""
        pipeline = self._pipeline
        first_step = pipeline._step + 1
        pipeline._step += len(steps)
        pipeline._backend.launched(pipeline._step)
        self._pool.retire(first_step - 1)
        events: list[_Event] = []
        for place, decode in enumerate(decodes):
            for row in range(len(decode.rows)):
                for kind in (_RESERVE, _ADVANCE):
                    _push(events, kind, place, row, decode, own[place])
        last, is_begun = -1, False
        while events:
            number, kind, place, row, local = heapq.heappop(events)
            decode = decodes[place]
            if number != last:
                self._pool.retire(first_step + number - 1)
                last, is_begun = number, False
            if kind == _ADVANCE and not is_begun:
                self._pool.begin_step(first_step + number)
                is_begun = True
            request, context = decode.rows[row], decode.contexts[row] + local
            assert request.kv is not None
            if kind == _RESERVE:
                decode.cache.reserve(request.kv, context)
            else:
                now_s = steps.starts_s[number]
                decode.cache.advance(request.kv, request.token_ids, context, now_s)
            _push(events, kind, place, row, decode, own[place])
        self._pool.begin_step(first_step + len(steps) - 1)
        for decode, numbers in zip(decodes, own, strict=True):
            for request in decode.rows:
                request.num_computed += len(numbers)

    def _charge(
        self, decode: Decode, steps: Steps, numbers: list[int], busy_s: Sequence[float]
    ) -> None:
        """The steps' time and the memory held to the rows, as `Charges` does; the queue's tag and
        the model's demand. `busy_s`: the device's work before each step and after the last."""
        device_s = [steps.device_s[number] for number in numbers]
        ends_s = [busy_s[number + 1] for number in numbers]
        rates, num_pages = decode.queue.page_rates, self._pool.num_pages
        if len(decode.rows) * len(numbers) <= FEW_SHARES:
            for place, seconds in enumerate(device_s):
                contexts_then = [(1, context + place) for context in decode.contexts]
                shares_then = split_time(seconds, contexts_then)
                began_s = busy_s[numbers[place]]
                for request, share, (_, context) in zip(
                    decode.rows, shares_then, contexts_then, strict=True
                ):
                    since_s = began_s if request.held_since_s is None else request.held_since_s
                    held = arena_share(rates, context, num_pages)
                    request.device_s += share
                    request.memory_s += (ends_s[place] - since_s) * held
                    request.held_since_s = ends_s[place]
        else:
            contexts = np.array(decode.contexts, dtype=np.float64)[:, None] + np.arange(
                len(numbers)
            )
            costs = 1 + contexts / POSITIONS_PER_TOKEN
            shares = np.array(device_s) * costs / np.cumsum(costs, axis=0)[-1]  # in rows' order
            since = np.empty(contexts.shape)
            since[:, 1:] = ends_s[:-1]
            for row, request in enumerate(decode.rows):
                held_since_s = request.held_since_s
                since[row, 0] = busy_s[numbers[0]] if held_since_s is None else held_since_s
            holds = np.zeros(contexts.shape)
            for pages_per_token, most in rates:
                holds += pages_per_token * np.minimum(contexts, most) / num_pages
            holds *= np.array(ends_s) - since
            device = _sums([request.device_s for request in decode.rows], shares)
            memory = _sums([request.memory_s for request in decode.rows], holds)
            for request, used_s, held_s in zip(decode.rows, device, memory, strict=True):
                request.device_s, request.memory_s = used_s, held_s
                request.held_since_s = ends_s[-1]
        decode.queue.tag = _plus(decode.queue.tag, device_s)
        for seconds in device_s:
            decode.queue.pace.observe(seconds, len(decode.rows), 0)
        used = [(steps.starts_s[number], steps.device_s[number]) for number in numbers]
        _touch_often(self._residency, decode.queue.instance_id, used)

    def _takes_over(self, queue: ModelQueue) -> bool:
        """Whether somebody who waits there might start although all rows are taken."""
        admission = self._scheduler._admission
        return (
            admission._tenants.num > 1
            and admission._num_running()[0] < admission._max_running
            and any(map(admission._tenants.may_take_over, queue.waiting))
        )

    def _look_at_waiting(self, queue: ModelQueue, now_s: float) -> None:
        """Those that wait are looked at, while every row is taken."""
        if self._scheduler._admission.admit(queue, now_s):
            raise IntegrityError(f"{queue.instance_id}: a request was let in without a row")


def _touch_often(
    residency: Residency, instance_id: str, used: Sequence[tuple[float, float]]
) -> None:
    """`Residency.touch` for many steps that gave tokens, each (now, service)."""
    model = residency._get(instance_id)
    model.demand = model.demand.added_often(used, residency._half_lives)
    model.used = True
    model.last_used_s = used[-1][0]


def _waits_until_s(residency: Residency, now_s: float, poll_s: float) -> float:
    """Until when `Residency.poll` has nothing to do, but for loads that end and models that fall
    idle. Where a load waits for room, which every poll may find, `now_s` + `poll_s`.
    """
    if residency._unsettled or residency._store_changed:
        return now_s
    until_s = now_s + poll_s if residency._queue.is_waiting else math.inf
    for model in residency._models.lists.moving.values():
        if model.job is not None or residency._queue.count(model):
            continue
        if model.state != "draining" or model.views is None:
            return now_s
        until_s = min(until_s, model.drain_since_s + residency._config.drain_timeout_s)
    return until_s


def _sums(before: Sequence[float], added: npt.NDArray[np.float64]) -> list[float]:
    """By row, what there was and what is added, one after the other."""
    first = np.array(before)[:, None]
    sums: list[float] = np.cumsum(np.hstack([first, added]), axis=1)[:, -1].tolist()
    return sums


def _plus(total: float, values: Iterable[float]) -> float:
    """One after the other, as steps add them; `sum` may be more exact than that."""
    for value in values:
        total += value
    return total


def _decodes(request: Request) -> bool:
    """The first token is waited for: the step that makes it is not skipped, though after a hit on
    all of the prompt but its last token it is a step like any other."""
    return (
        request.num_generated > request.num_resumed
        and request.num_runnable == 1
        and not request.num_pending
        and request.num_uncomputed == 1
    )


def _blocks_for(decode: Decode, num_steps: int) -> int:
    size = decode.cache.plan.block_tokens
    blocks = 0
    for request, context in zip(decode.rows, decode.contexts, strict=True):
        assert request.kv is not None
        blocks += max(0, -(-(context + num_steps) // size) - request.kv.num_blocks)
    return blocks


def _push(
    events: list[_Event], kind: int, place: int, row: int, decode: Decode, numbers: Sequence[int]
) -> None:
    """Note the next of these steps in which the row needs a block, or has one to offer."""
    kv = decode.rows[row].kv
    assert kv is not None
    if kind == _RESERVE:
        due = kv.num_blocks * decode.cache.plan.block_tokens + 1
    else:
        due = kv.next_advance
    local = max(0, due - decode.contexts[row])
    if local < len(numbers):
        heapq.heappush(events, (numbers[local], kind, place, row, local))
