"""A worker played by the test: what was sent to it is a list, what it says is a call.

`ScriptedWorker` implements `worker_client.WorkerClient`. It keeps the books a real worker would
(Submits received, requests and KV tokens in use), so that its statuses are true.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

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
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.tickets import RequestStream
from gateway.settings.settings import Settings
from gateway.types import HostedModel, PreparedRequest, Principal
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

    def connect(self, status: bool = True) -> None:
        """A new process answers."""
        self.num_epochs += 1
        self.epoch = f"{self.worker_id}-e{self.num_epochs}"
        self.num_received = 0
        self.num_sent_earlier = sum(isinstance(m, Submit) for m in self.sent)
        self.running.clear()
        self.reachable = True
        self.heard.on_connected(self.worker_id, self.epoch)
        if status:
            self.status()

    def die(self, reason: str = "killed", cause: LossCause = "process") -> None:
        """The process is gone."""
        self.reachable = False
        self.heard.on_lost(self.worker_id, self.epoch, reason, cause)

    def status(
        self, num_received: int | None = None, swaps: list[SwapRecord] | None = None
    ) -> None:
        """A heartbeat. Without `num_received` it has taken in all that was sent."""
        self.num_received = (
            sum(isinstance(m, Submit) for m in self.sent) - self.num_sent_earlier
            if num_received is None
            else num_received
        )
        self.heard.on_status(self.worker_id, self.make_status(swaps or []))

    def make_status(self, swaps: list[SwapRecord]) -> WorkerStatus:
        submits = [m for m in self.sent if isinstance(m, Submit)][self.num_sent_earlier :]
        taken = {(s.request_id, s.attempt) for s in submits[: self.num_received]}
        inside = [s for key, s in self.running.items() if key in taken]
        used_tokens = sum(map(_num_tokens, inside))
        state_bytes = self.sequence_bytes * len(inside)
        free_requests = max(0, self.num_requests - len(inside))
        free_tokens = max(0, self.kv_tokens - used_tokens)
        return WorkerStatus(
            epoch=self.epoch,
            worker_id=self.worker_id,
            num_received=self.num_received,
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
        self.heard.on_deltas(self.worker_id, self.epoch, [delta])

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
        self.heard.on_deltas(self.worker_id, self.epoch, [delta])

    def vectors(self, request_id: str, vectors: bytes, *, attempt: int = 1) -> None:
        """An encoder request is answered."""
        submit = self.running.pop((request_id, attempt), None)
        num_prompt = len(submit.prompt_token_ids) if submit else 1
        finish = Finish("stop", Usage(num_prompt, 0, 0, 0.1))
        delta = TokenDelta(request_id, attempt, [], finish, vectors=vectors)
        self.heard.on_deltas(self.worker_id, self.epoch, [delta])

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


def principal(tenant_id: str, weight: float = 1.0) -> Principal:
    """A key of the tenant."""
    return Principal(tenant_id, f"key-{tenant_id}", frozenset({"inference"}), Limits(), weight)


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


@dataclass(eq=False)
class Rig:
    """A dispatcher, its clock and one or more scripted workers."""

    made: ClassVar[list["Rig"]] = []
    """Whose books are checked when a test is over (dispatch/conftest.py)."""
    settings: Settings = field(default_factory=Settings)
    clock: Clock = field(default_factory=Clock)
    orphans: list[tuple[str, Finish]] = field(default_factory=list)
    claims: bool = False

    def __post_init__(self) -> None:
        Rig.made.append(self)
        self.dispatcher = Dispatcher(self.settings, self.clock, self._orphan)
        self.dispatcher.set_catalog([hosted("m"), hosted("n")])

    def worker(self, name: str = "w", **options: object) -> ScriptedWorker:
        """One more worker, connected, with model `m` resident unless told otherwise."""
        worker = ScriptedWorker(name, **options)  # type: ignore[arg-type]
        if not worker.states:
            worker.states = {"m": "resident", "n": "cold"}
        self.dispatcher.add_worker(worker)
        worker.connect()
        return worker

    def ask(
        self,
        request_id: str,
        tenant_id: str = "t",
        model: str = "m",
        *,
        weight: float = 1.0,
        priority: int = 0,
        **more: Any,
    ) -> RequestStream:
        """A request of the tenant; `more` as for `prepared`."""
        request = replace(prepared(request_id, model, **more), priority=priority)
        return self.dispatcher.run(request, principal(tenant_id, weight))

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
