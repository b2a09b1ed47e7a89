"""Steps between the scheduler and the device: launched in order, collected in order.

A step is laid out and launched while the one before it may still run; the tokens that one samples
stay on the device and are put into the batch there. What a request is said to have computed is
advanced at the launch; what it has generated, at the collection:

    launch n    num_computed += row, num_pending += 1 where the row samples
    collect n   num_pending -= 1; the engine appends the token and tells the cache what is good

A step of an encoder samples nothing; what it brings are the rows of its inputs, and nothing that is
launched behind it depends on them.

A row whose request was preempted or has ended between the two is collected all the same: the first
still gets its token, the second's is thrown away. A step that would have to compute with tokens of
a failed step computes nothing (`StepAbandoned`) and is rolled back.

Owns the step numbers, and nothing of what a token means: that is `engine.py`.

`Charges` says who pays for a step: its time is split over its rows, and so is the memory that they
held meanwhile.

    device_s   its part of each step's time; with the system's these add up to the steps exactly
    memory_s   time of the device multiplied by the share of the arena that the request held in it,
               steps of other requests and models included while it was running
    service    the larger of the two: what fair shares count (Ghodsi et al., "Dominant Resource
               Fairness", NSDI'11, for one request)

The system's own account has what no request should pay for: rows of requests that ended while their
step was under way, and positions that are computed again after a preemption. Waiting for the next
step costs a request nothing: only the time of steps counts, of memory too. Tenants, weights and
prices are the gateway's.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch

from engine.backend import Backend, Pending
from engine.encoders import EncoderBatch, EncoderRunner, build_encoder_batch, split_rows
from engine.encoding import Rows
from engine.errors import EngineError, StepAbandoned
from engine.memory import KvCache, PagePool
from engine.protocol import RequestService, TokenLogprobs
from engine.request import Request
from engine.running import LayOut, Runner, ScheduledRow, Scoring, StepBatch, build_batch
from engine.sampling import Logprobs, SampleOutput
from engine.scheduling.policy.batching import arena_share, split_time
from engine.scheduling.queues import ModelQueue


class LaunchedRow(NamedTuple):
    """A row as it was launched. `place`: among the sampled tokens of its step; -1: none.

    `generation` is the request's number of preemptions: another one now means that its blocks, and
    what it had computed, are gone.
    """

    row: ScheduledRow
    generation: int
    place: int

    @property
    def still_runs(self) -> bool:
        """Whether the request has gone on from here undisturbed."""
        request = self.row.request
        return request.state == "running" and request.num_preemptions == self.generation


class SampledToken(NamedTuple):
    """What a row sampled. `broken`: its logits were, and the token means nothing."""

    token: int
    broken: bool
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Collected:
    """A step that has ended. `tokens`: by row; None where it did not sample, unless its logits
    show that what it computed is broken. `scores`: logprobs of prompts, by request, from a position
    on.

    `error` is what its model did wrong; `abandoned`: nothing was computed, and nobody is to blame.
    `encoded`: by row, the rows of its inputs; None: the step was no encoder's.
    """

    queue: ModelQueue
    rows: tuple[LaunchedRow, ...]
    tokens: tuple[SampledToken | None, ...]
    device_s: float
    error: Exception | None = None
    abandoned: bool = False
    scores: tuple[tuple[Request, int, list[TokenLogprobs]], ...] = ()
    encoded: tuple[Rows, ...] | None = None

    @property
    def produced(self) -> bool:
        """Whether a token or an input's row came of it."""
        return self.encoded is not None or any(item.place >= 0 for item in self.rows)


@dataclass(frozen=True, slots=True)
class _Launched:
    queue: ModelQueue
    rows: tuple[LaunchedRow, ...]
    pending: Pending[SampleOutput]
    scoring: Scoring | None


@dataclass(frozen=True, slots=True)
class _Encodes:
    """A step of an encoder."""

    queue: ModelQueue
    rows: tuple[LaunchedRow, ...]
    pending: Pending[torch.Tensor]
    batch: EncoderBatch


class StepPipeline:
    """The steps of one device. Single-threaded, but what it launches may run elsewhere."""

    def __init__(self, backend: Backend, pool: PagePool, lay_out: LayOut = build_batch) -> None:
        self._backend = backend
        self._lay_out = lay_out
        self._pool = pool
        self._step = 0
        self._in_flight: deque[_Launched | _Encodes] = deque()

    @property
    def num_in_flight(self) -> int:
        """Steps launched and not collected."""
        return len(self._in_flight)

    def launch(
        self,
        queue: ModelQueue,
        runner: Runner | EncoderRunner,
        cache: KvCache,
        rows: Sequence[ScheduledRow],
    ) -> Exception | None:
        """Lay a step out and hand it to the device. The error where it cannot be laid out."""
        if isinstance(runner, EncoderRunner):
            return self._launch_encoder(queue, runner, rows)
        try:
            batch = self._lay_out(rows, cache, self._backend.device)
        except EngineError:
            raise
        except Exception as error:  # noqa: BLE001 - a model's failure; the engine logs it
            return error
        self._begin_step()
        pending = self._backend.launch(self._step, self._work(batch, runner))
        places = {row.request: place for place, row in enumerate(batch.sampling_rows)}
        launched = tuple(
            LaunchedRow(row, row.request.num_preemptions, places.get(row.request, -1))
            for row in batch.rows
        )
        for item in launched:
            request = item.row.request
            request.num_computed = item.row.first + item.row.num_scheduled_tokens
            if item.place >= 0:
                request.num_pending += 1
                request.pending_row = item.place
        self._in_flight.append(_Launched(queue, launched, pending, batch.scoring))
        return None

    def _launch_encoder(
        self, queue: ModelQueue, runner: EncoderRunner, rows: Sequence[ScheduledRow]
    ) -> Exception | None:
        try:
            batch = build_encoder_batch(rows, self._backend.device)
        except Exception as error:  # noqa: BLE001 - a model's failure; the engine logs it
            return error
        self._begin_step()
        pending = self._backend.launch(self._step, partial(runner.encode, batch))
        launched = tuple(LaunchedRow(row, row.request.num_preemptions, -1) for row in rows)
        for row in rows:
            row.request.num_computed = row.end
        self._in_flight.append(_Encodes(queue, launched, pending, batch))
        return None

    def _begin_step(self) -> None:
        self._step += 1
        self._pool.begin_step(self._step)

    def pass_fence(self) -> None:
        """An empty step: pages freed since the last one wait for it."""
        self._begin_step()
        self._backend.launched(self._step)

    def collect(self) -> Collected:
        """Wait for the oldest step in flight. Raises IntegrityError and its like only."""
        launched = self._in_flight.popleft()
        if isinstance(launched, _Encodes):
            return _collect_encoder(launched)
        for item in launched.rows:
            if item.place >= 0:
                request = item.row.request
                request.num_pending -= 1
                if not request.num_pending:
                    request.pending_row = -1
        queue, rows, none = launched.queue, launched.rows, (None,) * len(launched.rows)
        try:
            output = launched.pending.wait()
            output = output if output.on_host is None else output.on_host
            tokens = tuple(_tokens(_sampled(output, rows), output, rows))
            scores = _scores(output.prompt, launched.scoring)
        except StepAbandoned:
            for item in rows:
                if item.still_runs:
                    item.row.request.num_computed = item.row.first
            return Collected(queue, rows, none, launched.pending.device_s, abandoned=True)
        except EngineError:
            raise
        except Exception as error:  # noqa: BLE001 - a model's failure; the engine logs it
            return Collected(queue, rows, none, launched.pending.device_s, error)
        return Collected(queue, rows, tokens, launched.pending.device_s, scores=scores)

    def _work(self, batch: StepBatch, runner: Runner) -> "Work":
        previous = self._in_flight[-1] if self._in_flight and len(batch.pending_index) else None
        assert not isinstance(previous, _Encodes), "a token of an encoder is waited for"
        return Work(batch, runner, None if previous is None else previous.pending)


def _collect_encoder(launched: _Encodes) -> Collected:
    queue, rows, none = launched.queue, launched.rows, (None,) * len(launched.rows)
    try:
        encoded = split_rows(launched.batch, launched.pending.wait())
    except EngineError:
        raise
    except Exception as error:  # noqa: BLE001 - a model's failure; the engine logs it
        return Collected(queue, rows, none, launched.pending.device_s, error)
    return Collected(queue, rows, none, launched.pending.device_s, encoded=encoded)


def _sampled(output: SampleOutput, rows: Sequence[LaunchedRow]) -> list[SampledToken]:
    """By place; reading them waits for the device."""
    ids, broken = output.token_ids.tolist(), output.broken.tolist()
    sampled = [SampledToken(token, bad) for token, bad in zip(ids, broken, strict=True)]
    if output.logprobs is not None:
        asked = [(item.place, item.row.request.sampling.logprobs) for item in rows]
        wanted = [(place, count) for place, count in asked if place >= 0 and count >= 0]
        messages = output.logprobs.messages([count for _, count in wanted])
        for (place, _), message in zip(wanted, messages, strict=True):
            sampled[place] = SampledToken(ids[place], broken[place], message)
    return sampled


def _tokens(
    sampled: Sequence[SampledToken], output: SampleOutput, rows: Sequence[LaunchedRow]
) -> Iterator[SampledToken | None]:
    """By row. A prompt's chunk is as bad as its last logits: they depend on all of its KV."""
    others = output.unsampled_broken
    flags = iter([] if others is None else others.tolist())
    for item in rows:
        if item.place >= 0:
            yield sampled[item.place]
        else:
            yield SampledToken(0, broken=True) if next(flags, False) else None


def _scores(
    output: Logprobs | None, scoring: Scoring | None
) -> tuple[tuple[Request, int, list[TokenLogprobs]], ...]:
    """By request, with the position of the first."""
    if output is None or scoring is None:
        return ()
    counts = [row.request.submit.prompt_logprobs for row, places in scoring.rows for _ in places]
    messages = iter(output.messages(counts))
    return tuple(
        (row.request, places.start, list(islice(messages, len(places))))
        for row, places in scoring.rows
    )


@dataclass(slots=True)
class Work:
    """What the device does for a step: take the last step's tokens, compute, sample."""

    batch: StepBatch
    runner: Runner
    previous: Pending[SampleOutput] | None

    def __call__(self) -> SampleOutput:
        """Runs in device order, perhaps in another thread."""
        previous, self.previous = self.previous, None
        if previous is not None:
            try:
                tokens = previous.value().token_ids
            except Exception as error:
                raise StepAbandoned("the step before failed: its tokens are missing") from error
            self.batch.resolve(tokens)
        return self.runner.execute(self.batch)


class Charges:
    """Charges the rows of steps. `counters` are the engine's: what they hold is running totals."""

    def __init__(self, num_pages: int, counters: dict[str, float]) -> None:
        self._num_pages = num_pages
        self._counters = counters

    def step(self, ended: Collected) -> float:
        """The step's time to its rows; what has no request any more to the engine itself. Returns
        what of it is not class batch's."""
        rows = [item.row for item in ended.rows]
        shares = split_time(
            ended.device_s, [(row.num_scheduled_tokens, row_context(row)) for row in rows]
        )
        sizes = [row.num_scheduled_tokens for row in rows]
        self._count("rows", len(rows))
        self._count("tokens", sum(sizes))
        with_batch = any(row.request.is_batch for row in rows)
        pace = ended.queue.batch_pace if with_batch else ended.queue.pace
        pace.observe(ended.device_s, sum(sizes), sum(n for n in sizes if n > 1))
        began_s = self._counters["busy_seconds"]
        busy_s = began_s + ended.device_s
        rates = ended.queue.page_rates
        for item, share in zip(ended.rows, shares, strict=True):
            row, request = item.row, item.row.request
            if request.state == "finished":
                self._counters["unbilled_seconds"] += share
                continue
            again = min(row.end, request.num_lost) - row.first
            if again > 0 and item.still_runs:
                lost_s = share * again / row.num_scheduled_tokens
                self._counters["recompute_seconds"] += lost_s
                share -= lost_s
            request.device_s += share
            if row.first < request.num_prompt + request.num_resumed:
                request.prefill_s += share
            if request.state == "running":
                since_s = began_s if request.held_since_s is None else request.held_since_s
                held = arena_share(rates, row.end, self._num_pages)
                request.memory_s += (busy_s - since_s) * held
                request.held_since_s = busy_s
        self._counters["busy_seconds"] = busy_s
        batch_s = sum(
            share
            for item, share in zip(ended.rows, shares, strict=True)
            if item.row.request.is_batch
        )
        self._counters["batch_seconds"] += batch_s
        return max(0.0, ended.device_s - batch_s)

    def _count(self, what: str, size: int) -> None:
        """The sum, and the steps by size: `step_rows_le_8` counts those of 5 to 8 rows. A size that
        never was has no counter."""
        bucket = f"step_{what}_le_{1 << max(0, size - 1).bit_length()}"
        for name, amount in ((f"batch_{what}", size), (bucket, 1)):
            self._counters[name] = self._counters.get(name, 0.0) + amount


def services(requests: Iterable[Request]) -> list[RequestService]:
    """What running requests have had so far, for the worker's status."""
    return [
        RequestService(*request.key, request.service_s, request.device_s)
        for request in requests
        if request.state == "running" and request.device_s
    ]


def row_context(row: ScheduledRow) -> float:
    """Positions that each of the row's tokens attends to, for the split of a step's time."""
    encoding = row.request.encoding
    return row.end if encoding is None else encoding.mean_length(row.first, row.end)
