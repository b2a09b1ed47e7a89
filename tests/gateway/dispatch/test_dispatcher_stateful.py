"""The dispatcher under random histories: two to five workers, four tenants, whatever can happen.

After every step check_integrity() holds and no worker holds more than it offered. At the end
everything is let run out: every request ends exactly once, and the queue is empty.
"""

import asyncio
from unittest import mock

import msgspec
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.protocol import Abort, FinishReason
from gateway.dispatch.tickets import RequestStream
from gateway.errors import ApiError, WorkerLost
from gateway.settings.settings import Settings
from gateway.types import BatchWindow, TokenEvent
from tests.gateway.scripted_worker import Rig, ScriptedWorker, hosted, prepared, principal

TENANTS = st.sampled_from(["a", "b", "c", "d"])
MODELS = st.sampled_from(["m", "n", "o"])
WORKERS = st.integers(0, 4)


class DispatcherMachine(RuleBasedStateMachine):
    """One event loop for the futures inside the streams; nothing here ever waits."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.rig = Rig(Settings(max_queue_per_tenant=8, max_queue_total=20, queue_timeout_s=30.0))
        self.workers: list[ScriptedWorker] = []
        self.streams: dict[str, RequestStream] = {}
        self.num_refused = 0
        self.made: dict[tuple[str, str, int], int] = {}

    def teardown(self) -> None:
        self.loop.close()

    @initialize(num_workers=st.integers(2, 5))
    def start(self, num_workers: int) -> None:
        self.rig.dispatcher.set_catalog([hosted("m"), hosted("n"), hosted("o")])
        self.workers = [
            self.rig.worker("one", num_requests=3, kv_tokens=60, states=_states("m", "n", "o")),
            self.rig.worker("two", num_requests=2, kv_tokens=40, states=_states("n", "m", "o")),
        ]
        for number in range(2, num_workers):
            states = _states("mno"[number % 3], *"mno".replace("mno"[number % 3], ""))
            more = self.rig.worker(f"w{number}", num_requests=2, kv_tokens=30, states=states)
            self.workers.append(more)

    def _at(self, which: int) -> ScriptedWorker:
        return self.workers[which % len(self.workers)]

    @rule(
        tenant=TENANTS,
        model=MODELS,
        prompt=st.integers(1, 30),
        max_tokens=st.integers(1, 20),
        window_s=st.sampled_from([None, None, 0.0, 0.0, 5.0, 60.0]),
    )
    def arrive(
        self, tenant: str, model: str, prompt: int, max_tokens: int, window_s: float | None
    ) -> None:
        """A request, perhaps of class batch: as flex (0), or a line of a batch."""
        request_id = f"r{len(self.streams) + self.num_refused}"
        request = prepared(request_id, model, prompt=prompt, max_tokens=max_tokens)
        request = msgspec.structs.replace(request, is_batch=window_s is not None)
        asked_by = principal(tenant, 1.0 + (tenant == "d"))
        if window_s:
            now_s = self.rig.clock.now_s
            window = BatchWindow(now_s - 1.0, now_s + window_s)
            asked_by = msgspec.structs.replace(asked_by, window=window)
        try:
            stream = self.rig.dispatcher.run(request, asked_by)
        except ApiError:
            self.num_refused += 1
        else:
            self.streams[request_id] = stream

    @rule(which=WORKERS, tokens=st.integers(1, 3))
    def step(self, which: int, tokens: int) -> None:
        """Every request on the worker gets tokens: the numbers from 0 on, over all attempts."""
        worker = self._at(which)
        for (request_id, attempt), submit in list(worker.running.items()):
            made = self.made_by(worker, request_id, attempt)
            until = min(made + tokens, submit.max_tokens - 1)
            self.made[worker.epoch, request_id, attempt] = max(made, until)
            if until > made:
                worker.tokens(request_id, *range(made, until), attempt=attempt)

    def made_by(self, worker: ScriptedWorker, request_id: str, attempt: int) -> int:
        """Tokens of the request that the worker knows of."""
        submit = worker.running[request_id, attempt]
        assert submit.generated == list(range(len(submit.generated)))
        assert len(submit.generated) < submit.max_tokens
        return self.made.get((worker.epoch, request_id, attempt), len(submit.generated))

    def end(
        self,
        worker: ScriptedWorker,
        key: tuple[str, int],
        reason: FinishReason,
        service_s: float = 0.1,
    ) -> None:
        """The worker ends it."""
        made = self.made_by(worker, *key)
        reason = "abort" if Abort(*key) in worker.sent else reason
        worker.finish(key[0], reason, attempt=key[1], generated=made, service_s=service_s)

    @rule(which=WORKERS, pick=st.integers(0, 9), service_s=st.floats(0.0, 2.0))
    def finish(self, which: int, pick: int, service_s: float) -> None:
        worker = self._at(which)
        if worker.running:
            key = list(worker.running)[pick % len(worker.running)]
            self.end(worker, key, "error" if pick == 9 else "stop", service_s)

    @rule(which=WORKERS, lag=st.integers(0, 2))
    def heartbeat(self, which: int, lag: int) -> None:
        """A status, perhaps from before the last Submits arrived."""
        worker = self._at(which)
        if worker.reachable:
            sent = len(worker.submitted) - worker.num_sent_earlier
            worker.status(num_received=max(worker.num_received, sent - lag))

    @rule(which=WORKERS, pick=st.integers(0, 9))
    def refuse(self, which: int, pick: int) -> None:
        worker = self._at(which)
        if worker.running:
            key = list(worker.running)[pick % len(worker.running)]
            if self._has_no_token(*key):
                worker.refuse(key[0], "overloaded", retryable=pick % 2 == 0, attempt=key[1])

    @rule(which=WORKERS)
    def move(self, which: int) -> None:
        """It is to be emptied."""
        self.rig.dispatcher.move_off(self._at(which).worker_id)

    @rule(which=WORKERS)
    def die(self, which: int) -> None:
        if self._at(which).reachable:
            self._at(which).die()

    @rule(which=WORKERS)
    def come_back(self, which: int) -> None:
        if not self._at(which).reachable:
            self._at(which).connect()

    @rule(which=WORKERS, model=MODELS)
    def swap(self, which: int, model: str) -> None:
        """The worker obeys its loads and drops another model."""
        worker = self._at(which)
        for name in worker.loads[-2:]:
            worker.states[name] = "resident"
        if not any(submit.model_id == model for submit in worker.running.values()):
            worker.states[model] = "cold"
        if worker.reachable:
            worker.status()

    @rule(pick=st.integers(0, 99))
    @precondition(lambda self: self.streams)
    def abort(self, pick: int) -> None:
        list(self.streams.values())[pick % len(self.streams)].abort()

    @rule(seconds=st.floats(0.0, 8.0))
    def wait(self, seconds: float) -> None:
        self.rig.clock.now_s += seconds
        self.rig.dispatcher.tick()

    @rule(revision=st.sampled_from(["r1", "r1", "r2"]), with_o=st.booleans())
    def catalog(self, revision: str, with_o: bool) -> None:
        models = [hosted("m"), hosted("n", revision), *([hosted("o")] if with_o else [])]
        self.rig.dispatcher.set_catalog(models)

    @invariant()
    def books_agree(self) -> None:
        self.rig.dispatcher.check_integrity()

    @invariant()
    def no_worker_holds_more_than_it_offered(self) -> None:
        for worker in self.workers:
            # What is to end frees its place before the Submits behind the Abort are looked at.
            stays = {key: s for key, s in worker.running.items() if Abort(*key) not in worker.sent}
            # What is of class batch gives way, and goes beyond nothing.
            running = {key: s for key, s in stays.items() if not s.is_batch}
            assert len(running) <= worker.num_requests
            tokens = {key: len(s.prompt_token_ids) + s.max_tokens for key, s in running.items()}
            batch = [s for s in stays.values() if s.is_batch]
            assert len(batch) <= worker.num_requests
            assert sum(len(s.prompt_token_ids) + s.max_tokens for s in batch) <= worker.kv_tokens
            # One request of each model may go beyond what is free.
            largest: dict[str, int] = {}
            for key, submit in running.items():
                largest[submit.model_id] = max(largest.get(submit.model_id, 0), tokens[key])
            assert sum(tokens.values()) <= worker.kv_tokens + sum(largest.values())

    def _has_no_token(self, request_id: str, attempt: int) -> bool:
        return any(
            ticket.key == (request_id, attempt) and not ticket.num_tokens
            for ticket in self.rig.dispatcher._running
        )


def _states(resident: str, *cold: str) -> dict[str, object]:
    return {resident: "resident", **dict.fromkeys(cold, "cold")}


class RunOutMachine(DispatcherMachine):
    """Adds the end of the story."""

    def teardown(self) -> None:
        if self.workers:
            self._run_out()
            self.loop.run_until_complete(self._every_stream_ended())
        super().teardown()

    def _run_out(self) -> None:
        for _ in range(200):
            self.rig.clock.now_s += 0.5
            for worker in self.workers:
                if not worker.reachable:
                    worker.connect()
                for name in worker.loads[-3:]:
                    worker.states[name] = "resident"
                for key in list(worker.running):
                    self.end(worker, key, "stop")
                worker.status()
            self.rig.dispatcher.tick()
        snapshot = self.rig.dispatcher.snapshot()
        assert (snapshot.num_waiting, snapshot.num_running) == (0, 0)
        self.rig.dispatcher.check_integrity()

    async def _every_stream_ended(self) -> None:
        for stream in self.streams.values():
            ends = await asyncio.wait_for(_ends(stream), timeout=5.0)
            assert ends == 1


async def _ends(stream: RequestStream) -> int:
    """How often the stream ended: by a finish or by an error."""
    ends = 0
    tokens: list[int] = []
    try:
        async for event in stream:
            assert isinstance(event, TokenEvent)
            tokens += event.token_ids
            ends += event.finish is not None
            if event.finish is not None and not stream.overflowed:
                assert event.finish.usage.generated_tokens == len(tokens)
    except (ApiError, WorkerLost):
        ends += 1
    assert tokens == list(range(len(tokens)))
    return ends


class LargeFleetMachine(RunOutMachine):
    """The same by the rules of a fleet that is too large to look at each worker."""

    def __init__(self) -> None:
        self._patches = [
            mock.patch("gateway.dispatch.dispatcher.FEW_WORKERS", 0),
            mock.patch("gateway.dispatch.matching.FIRST_LOOK", 1),
            mock.patch("gateway.dispatch.matching.MOST_LOOKED", 2),
        ]
        for patch in self._patches:
            patch.start()
        super().__init__()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            for patch in self._patches:
                patch.stop()


TestDispatcher = RunOutMachine.TestCase
TestDispatcher.settings = hypothesis_settings(max_examples=60, stateful_step_count=50)
TestLargeFleet = LargeFleetMachine.TestCase
TestLargeFleet.settings = hypothesis_settings(max_examples=30, stateful_step_count=50)
