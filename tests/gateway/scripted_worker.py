"""A worker played by the test: what was sent to it is a list, what it says is a call.

`ScriptedWorker` implements `worker_client.WorkerClient`: the gateway's connection to it;
`observing` is the dispatcher's. It keeps the books a real worker would (Submits received, requests
and KV tokens in use), so that its statuses are true.

A `Rig` has the product's gateway and dispatcher around it. What they have to say to each other is
said after each call of the test, so that a test sees what came of it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from engine.protocol import (
    Abort,
    AckUsage,
    Finish,
    FinishReason,
    Lease,
    LoadModel,
    ModelStatus,
    RefusalCode,
    Refused,
    ResidencyState,
    SamplingParams,
    SetCatalog,
    Submit,
    SwapRecord,
    TokenDelta,
    TokenLogprobs,
    ToWorker,
    UnloadModel,
    Usage,
    WorkerStatus,
    encode,
)
from gateway.cluster.local_dispatcher import LocalDispatcher
from gateway.dispatch.tickets import RequestStream
from gateway.errors import ApiError
from gateway.settings.settings import Settings
from gateway.types import BatchWindow, HostedModel, PreparedRequest, Principal
from gateway.workers.worker_client import LossCause, WorkerListener, WorkerUnavailable
from registry.accounts.quotas import Limits

KV_BYTES = 10
WEIGHT_BYTES = 1000


class Clock:
    """Time that moves when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(eq=False)
class Observer:
    """The dispatcher's connection to a scripted worker. Implements WorkerClient."""

    worker: "ScriptedWorker"
    listener: WorkerListener | None = None

    @property
    def worker_id(self) -> str:
        return self.worker.worker_id

    def start(self, listener: WorkerListener) -> None:
        self.listener = listener

    def send(self, message: ToWorker) -> None:
        self.worker.send(message)

    def lose(self, reason: str, cause: LossCause) -> None:
        """The worker tells both of its ends."""

    def close(self) -> None:
        self.worker.close()


@dataclass(eq=False)
class ScriptedWorker:
    """One worker. `states` are its models; resident ones are leased."""

    worker_id: str = "w"
    num_requests: int = 4
    kv_tokens: int = 1000
    arena_bytes: int = 100_000
    states: dict[str, ResidencyState] = field(default_factory=dict)
    epoch: str = ""
    sent: list[ToWorker] = field(default_factory=list)
    running: dict[tuple[str, int], Submit] = field(default_factory=dict)
    num_received: int = 0
    reachable: bool = True
    listener: WorkerListener | None = None
    num_epochs: int = 0
    num_sent_earlier: int = 0
    reasons: dict[str, str] = field(default_factory=dict)
    block_tokens: int = 1
    sequence_bytes: int = 0  # of states, however long a request is
    started_at: float = 1.0
    num_foreign: int = 0  # requests for each resident model that another dispatcher granted
    num_told: int = 0  # Submits of which the dispatcher has been told
    deliver: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.observing = Observer(self)

    # WorkerClient.

    def start(self, listener: WorkerListener) -> None:
        self.listener = listener

    def send(self, message: ToWorker) -> None:
        if not self.reachable:
            raise WorkerUnavailable(self.worker_id)
        encode(message)
        self.sent.append(message)
        if isinstance(message, Submit):
            self.running[message.request_id, message.attempt] = message

    def lose(self, reason: str, cause: LossCause) -> None:
        self.die(reason, cause)

    def close(self) -> None:
        self.reachable = False

    # The script.

    @property
    def heard(self) -> WorkerListener:
        assert self.listener is not None
        return self.listener

    @property
    def ends(self) -> list[WorkerListener]:
        """The dispatcher, where there is one, and the gateway."""
        return [end for end in (self.observing.listener, self.listener) if end is not None]

    def connect(self, status: bool = True) -> None:
        """A new process answers."""
        self.num_epochs += 1
        self.epoch = f"{self.worker_id}-e{self.num_epochs}"
        self.num_received = self.num_told = 0
        self.num_sent_earlier = sum(isinstance(m, Submit) for m in self.sent)
        self.running.clear()
        self.reachable = True
        self.greet(self.epoch)
        if status:
            self.status()

    def greet(self, epoch: str) -> None:
        """A process answers, perhaps one that was silent."""
        for end in self.ends:
            end.on_connected(self.worker_id, epoch)
        self.deliver()

    def step(self, *deltas: TokenDelta) -> None:
        """One step's output is just that."""
        self.heard.on_deltas(self.worker_id, self.epoch, list(deltas))
        self.deliver()

    def die(self, reason: str = "killed", cause: LossCause = "process") -> None:
        """The process is gone."""
        self.reachable = False
        for end in self.ends:
            end.on_lost(self.worker_id, self.epoch, reason, cause)
        self.deliver()

    def status(
        self, num_received: int | None = None, swaps: list[SwapRecord] | None = None
    ) -> None:
        """A heartbeat. Without `num_received` it has taken in all that was sent."""
        self.num_received = (
            sum(isinstance(m, Submit) for m in self.sent) - self.num_sent_earlier
            if num_received is None
            else num_received
        )
        self.say(self.make_status(swaps or []))

    def say(self, status: WorkerStatus) -> None:
        """This heartbeat, to both."""
        self.heard.on_status(self.worker_id, msgspec.structs.replace(status, swaps=[], service=[]))
        submits = [m for m in self.sent if isinstance(m, Submit)][self.num_sent_earlier :]
        told = submits[self.num_told : self.num_received]
        self.num_told = max(self.num_told, self.num_received)
        taken = [(submit.request_id, submit.attempt) for submit in told]
        if self.observing.listener is not None:
            status = msgspec.structs.replace(status, taken=taken)
            self.observing.listener.on_status(self.worker_id, status)
        self.deliver()

    def make_status(self, swaps: list[SwapRecord]) -> WorkerStatus:
        submits = [m for m in self.sent if isinstance(m, Submit)][self.num_sent_earlier :]
        taken = {(s.request_id, s.attempt) for s in submits[: self.num_received]}
        inside = [s for key, s in self.running.items() if key in taken]
        live = [submit for submit in inside if not submit.is_batch]
        batch = [submit for submit in inside if submit.is_batch]
        used_tokens = sum(map(_num_tokens, live))
        state_bytes = self.sequence_bytes * len(live)
        free_requests = max(0, self.num_requests - len(live))
        free_tokens = max(0, self.kv_tokens - used_tokens)
        return WorkerStatus(
            epoch=self.epoch,
            worker_id=self.worker_id,
            free_requests=free_requests,
            free_kv_bytes=max(0, free_tokens * KV_BYTES - state_bytes),
            lease_ttl_s=2.0,
            page_bytes=1,
            num_pages=self.arena_bytes,
            pages={},
            models=[
                ModelStatus(
                    model_id=name,
                    state=state,
                    weight_bytes=WEIGHT_BYTES,
                    kv_bytes_used=KV_BYTES
                    * sum(_num_tokens(s) for s in inside if s.model_id == name),
                    num_running=sum(s.model_id == name for s in inside)
                    + self.num_foreign * (state == "resident"),
                    num_waiting=0,
                    load_s_estimate=0.5,
                    reason=self.reasons.get(name, ""),
                    num_batch=sum(s.model_id == name for s in batch),
                )
                for name, state in self.states.items()
            ],
            leases=[
                Lease(
                    name,
                    free_requests,
                    free_tokens,
                    KV_BYTES,
                    self.block_tokens,
                    self.sequence_bytes,
                )
                for name, state in self.states.items()
                if state == "resident"
            ],
            swaps=swaps,
            counters={},
            started_at=self.started_at,
            batch_requests=len(batch),
            batch_kv_bytes=sum(_num_tokens(s) * KV_BYTES + self.sequence_bytes for s in batch),
        )

    def tokens(
        self,
        request_id: str,
        *token_ids: int,
        attempt: int = 1,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
    ) -> None:
        """One step gave a request tokens."""
        delta = TokenDelta(
            request_id,
            attempt,
            list(token_ids),
            logprobs=logprobs or [],
            prompt_logprobs=prompt_logprobs or [],
        )
        self.step(delta)

    def finish(
        self,
        request_id: str,
        reason: FinishReason = "stop",
        *,
        attempt: int = 1,
        token_ids: tuple[int, ...] = (),
        generated: int = 1,
        service_s: float = 0.1,
        error: str = "",
    ) -> None:
        """One step ended a request."""
        submit = self.running.pop((request_id, attempt), None)
        num_prompt = len(submit.prompt_token_ids) if submit else 1
        finish = Finish(reason, Usage(num_prompt, 0, generated, service_s), error)
        delta = TokenDelta(request_id, attempt, list(token_ids), finish)
        self.step(delta)

    def vectors(self, request_id: str, vectors: bytes, *, attempt: int = 1) -> None:
        """An encoder request is answered."""
        submit = self.running.pop((request_id, attempt), None)
        num_prompt = len(submit.prompt_token_ids) if submit else 1
        finish = Finish("stop", Usage(num_prompt, 0, 0, 0.1))
        delta = TokenDelta(request_id, attempt, [], finish, vectors=vectors)
        self.step(delta)

    def refuse(
        self,
        request_id: str,
        code: RefusalCode,
        *,
        retryable: bool,
        message: str = "because",
        attempt: int = 0,
    ) -> None:
        """A Submit was not taken; of several attempts that are there, this one."""
        (key,) = [key for key in self.running if key[0] == request_id and attempt in (0, key[1])]
        del self.running[key]
        self.heard.on_refused(self.worker_id, Refused(self.epoch, *key, code, message, retryable))
        self.deliver()

    # What it was told.

    @property
    def submitted(self) -> list[str]:
        """Request ids in the order of their Submits; a second try as `id/2`."""
        return [
            m.request_id if m.attempt == 1 else f"{m.request_id}/{m.attempt}"
            for m in self.sent
            if isinstance(m, Submit)
        ]

    @property
    def aborted(self) -> list[str]:
        return [m.request_id for m in self.sent if isinstance(m, Abort)]

    @property
    def acked(self) -> list[tuple[str, int]]:
        return [key for m in self.sent if isinstance(m, AckUsage) for key in m.requests]

    @property
    def loads(self) -> list[str]:
        return [m.model_id for m in self.sent if isinstance(m, LoadModel)]

    @property
    def unloads(self) -> list[str]:
        return [m.model_id for m in self.sent if isinstance(m, UnloadModel)]

    @property
    def catalog(self) -> list[str]:
        """The models of the last SetCatalog."""
        sent = [m for m in self.sent if isinstance(m, SetCatalog)]
        return [spec.model_id for spec in sent[-1].models]


def _num_tokens(submit: Submit) -> int:
    return len(submit.prompt_token_ids) + submit.max_tokens


def hosted(name: str, revision: str = "r1", *, pinned: bool = False, pack: str = "") -> HostedModel:
    """A catalog entry, of a pack of its own where none is named."""
    return HostedModel(
        name=name,
        revision=revision,
        pack_dir=f"/packs/{pack or f'{name}-{revision}'}",
        max_context=512,
        vocab_size=100,
        created_at=0,
        pinned=pinned,
    )


def principal(tenant_id: str, weight: float = 1.0, **more: Any) -> Principal:
    """A key of the tenant."""
    about = (f"key-{tenant_id}", frozenset({"inference"}), Limits(), weight)
    return Principal(tenant_id, *about, **more)


def prepared(
    request_id: str, model: str = "m", *, prompt: int = 4, max_tokens: int = 6, revision: str = "r1"
) -> PreparedRequest:
    """A request in token ids."""
    return PreparedRequest(
        request_id=request_id,
        kind="completion",
        model=hosted(model, revision),
        prompt_token_ids=[1] * prompt,
        max_tokens=max_tokens,
        sampling=SamplingParams(),
        stop_token_ids=[],
    )


class Delivered:
    """The product's gateway and dispatcher as one thing. What they say is heard before and after
    each call."""

    def __init__(self, local: LocalDispatcher, deliver: Callable[[], None]) -> None:
        self._local = local
        self._deliver = deliver

    def __getattr__(self, name: str) -> Any:
        self._deliver()
        gateway_has = name in GATEWAYS or not hasattr(self._local.dispatcher, name)
        found = getattr(self._local if gateway_has else self._local.dispatcher, name)
        if not callable(found):
            return found

        def call(*args: Any, **more: Any) -> Any:
            result = found(*args, **more)
            self._deliver()
            return result

        return call

    def run(self, request: PreparedRequest, asked_by: Principal) -> RequestStream:
        """Raises what comes at once in place of an event."""
        stream = self._local.run(request, asked_by)
        self._deliver()
        if isinstance(stream._end, ApiError):
            raise stream._end
        return stream


GATEWAYS = frozenset(
    {"run", "tick", "set_catalog", "snapshot", "close", "check_integrity", "ready"}
)
"""What both have, and the gateway's does for both."""


@dataclass(eq=False)
class Rig:
    """A gateway with its dispatcher, their clock and one or more scripted workers."""

    made: ClassVar[list["Rig"]] = []
    """Whose books are checked when a test is over (dispatch/conftest.py)."""
    settings: Settings = field(default_factory=Settings)
    clock: Clock = field(default_factory=Clock)
    orphans: list[tuple[str, Finish]] = field(default_factory=list)
    claims: bool = False

    def __post_init__(self) -> None:
        Rig.made.append(self)
        self._calls: deque[Callable[[], None]] = deque()
        soon = self._calls.append
        self.local = LocalDispatcher(self.settings, self.clock, self._orphan, soon=soon)
        self.dispatcher = Delivered(self.local, self.deliver)
        self.dispatcher.set_catalog([hosted("m"), hosted("n")])

    def worker(self, name: str = "w", **options: object) -> ScriptedWorker:
        """One more worker, connected, with model `m` resident unless told otherwise."""
        worker = ScriptedWorker(name, **options)  # type: ignore[arg-type]
        if not worker.states:
            worker.states = {"m": "resident", "n": "cold"}
        self.join(worker)
        worker.connect()
        return worker

    def join(self, worker: ScriptedWorker) -> None:
        """It will be heard."""
        worker.deliver = self.deliver
        self.local.add_workers(worker, worker.observing)

    def deliver(self) -> None:
        """All that gateway and dispatcher have to say to each other."""
        while self._calls:
            self._calls.popleft()()

    def ask(
        self,
        request_id: str,
        tenant_id: str = "t",
        model: str = "m",
        *,
        weight: float = 1.0,
        priority: int = 0,
        is_batch: bool = False,
        window: BatchWindow | None = None,
        **more: Any,
    ) -> RequestStream:
        """A request of the tenant; `more` as for `prepared`."""
        request = msgspec.structs.replace(prepared(request_id, model, **more), priority=priority)
        asked_by = principal(tenant_id, weight, is_batch=is_batch, window=window)
        return self.dispatcher.run(request, asked_by)

    def refused(self, request_id: str, tenant_id: str, model: str) -> ApiError:
        """What a request of the tenant is told at once."""
        try:
            self.ask(request_id, tenant_id, model)
        except ApiError as error:
            return error
        raise AssertionError("it was taken")

    def advance(self, seconds: float) -> None:
        """Time passes, and the dispatcher's timer fires."""
        self.clock.now_s += seconds
        self.dispatcher.tick()
        self.dispatcher.check_integrity()

    def _orphan(self, request_id: str, finish: Finish, _attempt: int) -> bool:
        self.orphans.append((request_id, finish))
        return self.claims


def served(settings: Settings | None = None, **options: Any) -> tuple[Rig, ScriptedWorker]:
    """A rig with one worker; `options` as for `Rig.worker`."""
    rig = Rig(settings or Settings())
    return rig, rig.worker(**options)
