"""The production engine over stamp runners: every step is checked, every answer known beforehand.

Engine, scheduler, residency, pool, prefix cache and KV memory are the real ones. Made for the test
are what they stand on: time (an argument), the device's own clock, fences that pass late and by
chance, loader threads (`HandLoader` works parts off when it is told to), and memory that is
overwritten the moment its fence has passed. So a life depends on its seed alone and can be told
again.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from engine.backend.cpu import CpuBackend, CpuPending
from engine.config import EngineConfig
from engine.constraints.constrained_rows import Settled
from engine.engine import Engine
from engine.errors import RequestRefused
from engine.pack import PackIndex, read_index
from engine.packs.loader import ReadJob
from engine.packs.weight_store import DiskWeightStore
from engine.protocol import Finish, ModelSpec, SamplingParams, Submit
from engine.request import Request
from tests.engine.engine_hooks import count_events, poison_what_is_freed
from tests.engine.stamp_packs import Shape, stamp_pack
from tests.engine.stamp_runner import Oracle, StampLog, StampRunner
from tests.engine.stamp_states import LossyRow

T = TypeVar("T")
Pace = Literal["inline", "slow", "thread"]

STEP_S = 0.001
TICK_S = 0.01
LOAD_BYTES_PER_S = 1e8


class LaggingBackend(CpuBackend):
    """A device in one thread: fences pass up to `lag` steps late, by chance; a step takes STEP_S.

    inline   work runs as it is handed over
    slow     it runs as late as it may: when somebody waits for it, or by chance while the engine
             asks how far the device is. So steps read, and copies copy, long after the engine went
             on, as on a GPU, and the same each time
    thread   in a thread, as in the product
    """

    def __init__(self, arena_bytes: int, rng: random.Random, lag: int, pace: Pace) -> None:
        super().__init__(arena_bytes, 0, "inline" if pace == "inline" else "thread")
        self._rng = rng
        self._lag = lag
        self._told = 0
        self._is_slow = pace == "slow"
        self._to_do: deque[CpuPending[Any]] = deque()

    def launch(self, step: int, work: Callable[[], T]) -> CpuPending[T]:
        """Hand a step over."""
        pending = super().launch(step, work)
        if not self._is_slow and pending.done():
            pending.device_s = STEP_S
        return pending

    def last_done(self) -> int:
        """Never goes back."""
        while self._to_do and self._rng.random() < 0.3:
            self._work_off(1)
        done = super().last_done() - (self._rng.randint(0, self._lag) if self._lag else 0)
        self._told = max(self._told, done)
        return self._told

    def close(self) -> None:
        """Everything is done first."""
        self._work_off(len(self._to_do))
        super().close()

    def _hand_over(self, pending: CpuPending[Any]) -> None:
        if not self._is_slow:
            super()._hand_over(pending)
            return
        self._under_way.append(pending)
        self._to_do.append(pending)
        wait = pending.wait

        def work_and_wait() -> Any:
            if pending in self._to_do:
                self._work_off(self._to_do.index(pending) + 1)
            return wait()

        pending.wait = work_and_wait  # type: ignore[method-assign]

    def _work_off(self, count: int) -> None:
        for _ in range(count):
            pending = self._to_do.popleft()
            pending.run()
            pending.device_s = STEP_S


class HandLoader:
    """Stands in for `loader.PackLoader`: parts are done when `work` says so, in this thread."""

    def __init__(self) -> None:
        self._parts: deque[tuple[ReadJob, int, Future[None]]] = deque()

    def start(self, job: ReadJob) -> None:
        """Queue every part."""
        job._started_s = 0.0
        for number in range(len(job.index.chunks)):
            future: Future[None] = Future()
            job.attach(future)
            self._parts.append((job, number, future))

    start_slowly = start

    def work(self, num_parts: int) -> None:
        """Do so many parts."""
        for _ in range(min(num_parts, len(self._parts))):
            job, number, future = self._parts.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                job.run_part(number)
            except Exception as error:  # noqa: BLE001 - the job keeps it, as an executor would
                future.set_exception(error)
            else:
                future.set_result(None)
            job._ended_s = job.index.total_bytes / LOAD_BYTES_PER_S

    def close(self) -> None:
        """Nothing is left running."""
        self.work(len(self._parts))


@dataclass(slots=True)
class Told:
    """A request as the caller knows it. `excuse`: why it may end with an error, if it may."""

    submit: Submit
    instance: Path
    at_s: float
    answer: list[int]
    chains: list[int]
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    aborted: bool = False
    excuse: str = ""


class StampRig:
    """An engine, its packs, and all that was asked of it."""

    def __init__(
        self,
        folder: Path,
        rng: random.Random,
        shapes: dict[str, Shape],
        num_pages: int,
        page_bytes: int,
        lag: int = 0,
        pace: Pace = "inline",
        **config: Any,
    ) -> None:
        self.rng = rng
        self.now_s = 1000.0
        self.dead = False
        self.log = StampLog()
        self.events: Counter[str] = Counter()
        self.requests: dict[str, Told] = {}
        self.open: dict[str, Told] = {}
        self.catalog: dict[str, ModelSpec] = {}
        self._chains: dict[tuple[str, Path], Counter[int]] = {}
        self._swept: Counter[str] = Counter()
        shm = folder / "shm"
        shm.mkdir(parents=True)
        self.packs = {
            name: stamp_pack(folder / name, shape, number)
            for number, (name, shape) in enumerate(shapes.items())
        }
        self.oracles = {pack: Oracle(read_index(pack)) for pack in self.packs.values()}
        self.config = EngineConfig(
            arena_bytes=num_pages * page_bytes,
            page_bytes=page_bytes,
            shm_dir=str(shm),
            shm_prefix="stamps",
            load_kv_tokens=1,
            **config,
        )
        self.backend = LaggingBackend(self.config.arena_bytes, rng, lag, pace)
        self.backend.poison(0, self.config.arena_bytes)
        self.engine = Engine(self.config, self.backend)
        self._settle = self.engine._constrained.settle
        self.engine._constrained.settle = self._settle_lossy  # type: ignore[method-assign]
        self.loader = HandLoader()
        weight_store = self.engine._manager.residency._weight_store
        assert isinstance(weight_store, DiskWeightStore)
        weight_store._loader.close()
        weight_store._loader = self.loader  # type: ignore[assignment]
        self.engine._manager._bind = self._bind  # type: ignore[method-assign,assignment]
        poison_what_is_freed(self.engine, self.backend)

    # What a caller does ---------------------------------------------------------------------

    def set_catalog(self, specs: Sequence[ModelSpec]) -> None:
        """The whole list. Requests of names that go or change their pack may end with an error."""
        named = {spec.model_id: spec for spec in specs}
        for told in self.open.values():
            now = named.get(told.submit.model_id)
            if now is None or Path(now.pack_dir) != told.instance:
                told.excuse = "its model was taken away"
        self.catalog = named
        self.engine.set_catalog(specs, self.now_s)
        self.events["catalogs"] += 1

    def submit(
        self,
        model_id: str,
        tenant: str,
        prompt: list[int],
        max_tokens: int,
        stop: Sequence[int] = (),
        timeout_s: float = 0.0,
        loses: bool = False,
        is_batch: bool = False,
    ) -> str:
        """Ask. `loses`: some of its tokens are computed twice. Raises RequestRefused."""
        name = f"r{len(self.requests)}"
        submit = Submit(
            name,
            1,
            tenant,
            model_id,
            prompt,
            max_tokens,
            SamplingParams(0.0),
            list(stop),
            timeout_s=timeout_s,
            is_batch=is_batch,
        )
        try:
            self.engine.submit(submit, self.now_s)
        except RequestRefused as refused:
            self.events[f"refused: {refused.code}"] += 1
            raise
        if loses:
            (request,) = self.engine._scheduler.find([(name, 1)])
            request.constrained = LossyRow(self.rng)
        instance = Path(self.catalog[model_id].pack_dir)
        story = self.oracles[instance].story(prompt, max_tokens)
        answer = list(story.token_ids[len(prompt) :])
        for i, token in enumerate(answer):
            if token in stop:
                del answer[i + 1 :]
                break
        block = self.config.block_tokens
        chains = [int(story.chain[end - 1]) for end in range(block, len(story.chain) + 1, block)]
        self._chains.setdefault((tenant, instance), Counter()).update(chains)
        told = Told(submit, instance, self.now_s, answer, chains)
        self.requests[name] = self.open[name] = told
        self.events["requests"] += 1
        return name

    def abort(self, name: str) -> None:
        """Give up on a request."""
        if name in self.open:
            self.open[name].aborted = True
        self.engine.abort(name, 1)
        self.events["aborts"] += 1

    def fault(self, kind: Any) -> None:
        """The next step that runs fails in this way."""
        if not self.log.faults:
            self.log.faults.append(kind)

    def step(self, after_s: float = TICK_S, load_parts: int = 2) -> None:
        """One engine step, and everything that can be checked after it."""
        self.dead = True  # until all of it is seen to be right
        self._step(after_s, load_parts)
        self.dead = False

    def _step(self, after_s: float, load_parts: int) -> None:
        self.now_s += after_s
        self.loader.work(load_parts)
        faults = self.log.num_faults
        before = dict(self.open)
        for delta in self.engine.step(self.now_s):
            told = self.open.get(delta.request_id)
            assert told is not None, f"{delta.request_id} speaks after its end"
            told.tokens.extend(delta.token_ids)
            assert told.tokens == told.answer[: len(told.tokens)], (
                f"{delta.request_id}: {told.tokens}, should be {told.answer}"
            )
            if delta.finish is not None:
                told.finish = delta.finish
                del self.open[delta.request_id]
        assert not self.log.wrong, "\n".join(self.log.wrong)
        self.engine.check_integrity()
        self._move_batch_off()
        self.events["steps"] += 1
        self.events["faults"] += self.log.num_faults - faults
        for name, told in before.items():
            if told.finish is not None:
                self._check_end(name, told, told.finish)
        self._check_deadlines()
        for swap in self.engine.take_swaps()[0]:
            self.events[f"swaps: {swap.kind}"] += 1

    def _move_batch_off(self) -> None:
        """As a dispatcher: requests of class batch do not wait for a model that has left."""
        states = self.states()
        for name, told in list(self.open.items()):
            state = states.get(told.submit.model_id, "gone")
            if told.submit.is_batch and state in ("cold", "warm", "gone") and not told.aborted:
                self.abort(name)
                self.events["batch moved off"] += 1

    def states(self) -> dict[str, str]:
        """State of each hosted model."""
        cold = dict.fromkeys(self.catalog, "cold")
        return cold | {row.model_id: row.state for row in self.engine.status(self.now_s).models}

    def count(self) -> Counter[str]:
        """Events so far, the engine's counters among them."""
        total = self.events + count_events(self.engine, self.now_s)
        total["model steps"] = self.log.num_steps
        total["positions read"] = self.log.num_positions
        total["states read"] = self.log.num_states
        return total

    def end(self, max_steps: int = 4000) -> Counter[str]:
        """Let everything end, unload, forget: every request has ended, every page is back."""
        for number in range(max_steps):
            if not self.open:
                break
            if number == max_steps // 2:  # nobody's weights leave for the KV of class batch
                for name in [name for name, told in self.open.items() if told.submit.is_batch]:
                    self.abort(name)
            self.step(load_parts=100)
        assert not self.open, f"lost: {sorted(self.open)} {self._why()}"
        total = self.count()
        # A pin keeps the other names of its pack from being unloaded.
        self.set_catalog([msgspec.structs.replace(s, pinned=False) for s in self.catalog.values()])
        for model_id in list(self.catalog):
            self.engine.unload(model_id, self.now_s)
        self._until_all_is_free(max_steps)
        self.set_catalog([])
        self.step()
        self._until_all_is_free(max_steps)
        assert not self.engine._manager.runners
        self.loader.work(10_000)
        self.engine.close()
        self.backend.close()
        return total

    # What must hold -------------------------------------------------------------------------

    def _until_all_is_free(self, max_steps: int) -> None:
        pool = self.engine.pool
        for _ in range(max_steps):
            if pool.num_free == pool.num_pages:
                return
            self.step(load_parts=100)
        raise AssertionError(f"pages never come back: {pool.pages_by_owner()} {self._why()}")

    def _check_end(self, name: str, told: Told, finish: Finish) -> None:
        usage = finish.usage
        self.events[f"ended: {finish.reason}"] += 1
        assert usage.prompt_tokens == len(told.submit.prompt_token_ids), name
        assert usage.generated_tokens == len(told.tokens), (name, usage, told.tokens)
        assert usage.cached_tokens <= max(0, usage.prompt_tokens - 1), (name, usage)
        assert usage.cached_tokens % self.config.block_tokens == 0, (name, usage)
        assert usage.cached_tokens <= self._most_cached(told), (name, usage)
        self.events["hits"] += usage.cached_tokens > 0
        ended_itself = told.tokens == told.answer
        faulted = name in self.log.faulted
        # A step ahead may fail with a row of a request that had come to its stop before it.
        fair = ("error", "abort", "timeout", "stop" if self.config.steps_ahead else "error")
        assert not faulted or finish.reason in fair, (name, finish)
        if finish.reason in ("stop", "length"):
            assert ended_itself, (name, finish, told)
            stopped = told.tokens[-1] in told.submit.stop_token_ids
            assert (finish.reason == "stop") == stopped, (name, finish)
        elif finish.reason == "abort":
            assert told.aborted, (name, finish)
        elif finish.reason == "timeout":
            assert told.submit.timeout_s, (name, finish)
            assert self.now_s >= told.at_s + told.submit.timeout_s - 1e-6, (name, finish)
        else:
            # A pin that came later may take the room that the request was promised.
            pinned = any(spec.pinned for spec in self.catalog.values())
            squeezed = pinned and ("pinned" in finish.error or "does not fit" in finish.error)
            assert faulted or told.excuse or squeezed, (name, finish)

    def _most_cached(self, told: Told) -> int:
        """Leading tokens that another request of the same tenant and pack shares."""
        known = self._chains[told.submit.tenant_id, told.instance]
        num_blocks = 0
        for chain in told.chains:
            if known[chain] < 2:  # itself, and another one
                break
            num_blocks += 1
        return num_blocks * self.config.block_tokens

    def _settle_lossy(self, request: Request, token: int) -> Settled:
        """In place of `ConstrainedRows.settle`."""
        if isinstance(request.constrained, LossyRow) and request.constrained.loses():
            self.events["lost tokens"] += 1
            return "lost"
        return self._settle(request, token)

    def _check_deadlines(self) -> None:
        for name, told in self.open.items():
            if told.submit.timeout_s:
                late_s = self.now_s - (told.at_s + told.submit.timeout_s)
                assert late_s < 1e-6, f"{name} should have ended {late_s} s ago"

    def _why(self) -> str:
        queues = {
            q.instance_id: (len(q.running), len(q.waiting)) for q in self.engine._scheduler.queues()
        }
        return f"states {self.states()}, queues {queues}, free {self.engine.pool.num_free}"

    def _bind(self, instance_id: str, index: PackIndex, runner: StampRunner | None) -> StampRunner:
        """In place of `ModelManager._bind`: the same with another kind of runner."""
        residency = self.engine._manager.residency
        runner = runner or StampRunner(
            instance_id,
            residency.pack_dir(instance_id),
            index,
            self.backend.arena,
            self.engine.pool,
            self.config.block_tokens,
            caching=self.config.prefix_cache,
            max_chunk=self.config.max_batch_tokens,
            log=self.log,
            rng=self.rng,
        )
        views = residency.weights(instance_id)
        runner.bind(views.tensors, views.generation)
        return runner
