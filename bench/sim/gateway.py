"""A gateway in simulated time: the product's dispatcher, limiter and worker connections.

    submit -> limits -> fair queue ==cables==> workers -> stream -> posted -> acknowledged

Gateway and dispatcher are in one process, and each has its own cable to each worker, as there.

What stands in for the rest of the gateway: `SimClient` for pipeline and HTTP, `Postings` for the
ledger (what is durable outlives the gateway, and a finish that a restarted gateway is told again is
claimed from it). Coroutines of the limiter never wait, so they are run to their end at once.
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bench.sim.baselines.choose import DispatchPolicies
from bench.sim.cable import Cable
from bench.sim.client import SimClient
from bench.sim.loop import DELIVERY, Event, Loop
from bench.sim.parts import END_TOKEN
from bench.sim.types import Arrival
from bench.sim.worker import SimWorker
from engine.protocol import Finish, FromWorker, SamplingParams, Submit, SwapRecord, ToWorker
from gateway.cluster.local_dispatcher import DISPATCHER_ID, LocalDispatcher
from gateway.dispatch.dispatcher import TICK_S
from gateway.errors import ApiError
from gateway.limits.limits import Limiter
from gateway.limits.store import MemoryStore
from gateway.settings.settings import Settings
from gateway.types import HostedModel, PreparedRequest, Principal
from gateway.workers.worker_client import LossCause, WorkerConnection, WorkerListener

T = TypeVar("T")

GREEDY = SamplingParams(temperature=0.0)


def run_now(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("a coroutine waits that should not")


@dataclass(slots=True, eq=False)
class Postings:
    """What the ledger would hold. Outlives a gateway.

    open      requests that may have tokens and have no posting
    orphans   of these, those that a dead gateway left
    """

    open: set[str] = field(default_factory=set)
    orphans: set[str] = field(default_factory=set)
    num_posted: int = 0
    num_voided: int = 0
    num_claimed: int = 0

    def begin(self, request_id: str) -> None:
        """The open record."""
        self.open.add(request_id)

    def post(self, request_id: str) -> None:
        """Raises AssertionError for a second posting."""
        if request_id not in self.open:
            raise AssertionError(f"{request_id} is posted twice, or was never open")
        self.open.remove(request_id)
        self.num_posted += 1

    def void(self, request_id: str) -> None:
        """Nothing is owed."""
        self.open.discard(request_id)
        self.num_voided += 1

    def recover(self) -> None:
        """A gateway starts: what is open was left by one that died."""
        self.orphans = set(self.open)

    def claim(self, request_id: str) -> bool:
        """A finish that no request waits for: whether it is owed a posting, which it has now.

        Only what was left by a dead gateway: a late attempt of a request that lives owes nothing.
        """
        if request_id not in self.orphans:
            return False
        self.orphans.remove(request_id)
        self.post(request_id)
        self.num_claimed += 1
        return True


class SimWorkerClient:
    """Implements gateway.workers.worker_client.WorkerClient over a `Cable`."""

    def __init__(
        self,
        loop: Loop,
        worker: SimWorker,
        gateway_id: str,
        heartbeat_timeout_s: float,
        latency_s: Callable[[], float],
        on_submit: Callable[[Submit, int], None],
    ) -> None:
        self.worker = worker
        self.cable = Cable(loop, worker, gateway_id, self._receive, latency_s)
        about = (worker.worker_id, gateway_id, heartbeat_timeout_s, self.cable, loop.clock)
        self.connection = WorkerConnection(*about, observes=gateway_id == DISPATCHER_ID)
        self._loop = loop
        self._on_submit = on_submit
        self._timer: Event | None = None
        worker.attach(self.cable)

    @property
    def worker_id(self) -> str:
        """Its name in the dispatcher."""
        return self.worker.worker_id

    def start(self, listener: WorkerListener) -> None:
        """Begin to connect."""
        self.connection.start(listener)
        self._check()

    def send(self, message: ToWorker) -> None:
        """Queue a message. Raises WorkerUnavailable."""
        self.connection.send(message)
        if type(message) is Submit:
            self._on_submit(message, self.worker.number)

    def lose(self, reason: str, cause: LossCause) -> None:
        """It is known that the worker process ended."""
        self.connection.lose(reason, cause)

    def close(self) -> None:
        """Say nothing more."""
        if self._timer is not None:
            self._timer.cancel()
        self.connection.close()
        self.worker.detach(self.cable)

    def _receive(self, message: FromWorker) -> None:
        self.connection.receive(message)

    def _check(self) -> None:
        """The product looks several times a second; here, when there may be something to see."""
        self.connection.check()
        step_s = self.connection.check_interval_s
        wait_s = max(step_s, self.connection.patient_until_s + step_s - self._loop.now_s)
        self._timer = self._loop.after(wait_s, self._check)


class SimGateway:
    """One gateway process with its dispatcher. A restart makes a new one."""

    def __init__(
        self,
        loop: Loop,
        settings: Settings,
        workers: Sequence[SimWorker],
        models: Sequence[HostedModel],
        principals: Sequence[Principal],
        postings: Postings,
        latency_s: Callable[[], float],
        posting_s: float,
        on_end: Callable[[SimClient], None],
        on_swap: Callable[[str, SwapRecord], None],
        policies: DispatchPolicies,
    ) -> None:
        self.loop = loop
        postings.recover()
        self.requests = LocalDispatcher(
            settings,
            loop.clock,
            self._claim,
            policies.share(),
            policies.placement(),
            soon=lambda call: loop.after(0.0, call, DELIVERY),
        )
        self.requests.marks_prompts = policies.marks_prompts
        self.dispatcher = self.requests.dispatcher
        self.requests.add_swap_listener(on_swap)
        self.requests.set_catalog(models)
        self.store = MemoryStore()
        self.limiter = Limiter(self.store, loop.clock, lambda dimension: None)
        self.clients: dict[str, SimClient] = {}
        """Requests that have not ended."""
        self._models = models
        self._principals = principals
        self._postings = postings
        self._posting_s = posting_s
        self._on_end = on_end
        self._to_ack: list[str] = []
        self._ack_event: Event | None = None
        timeout_s = settings.worker_heartbeat_timeout_s
        self.worker_clients = [
            [
                SimWorkerClient(loop, worker, name, timeout_s, latency_s, self._submitted)
                for name in ("gateway-0", DISPATCHER_ID)
            ]
            for worker in workers
        ]
        for own, observing in self.worker_clients:
            self.requests.add_workers(own, observing)
        self._tick_event = loop.after(TICK_S, self._tick)

    def submit(self, number: int, arrival: Arrival, prompt_token_ids: list[int]) -> None:
        """A request comes in; it ends in `on_end`, perhaps at once."""
        client = SimClient(str(number), number, arrival, self._ended, self.loop.clock)
        self.clients[client.request_id] = client
        principal = self._principals[arrival.tenant]
        request = PreparedRequest(
            request_id=client.request_id,
            kind="completion",
            model=self._models[arrival.model],
            prompt_token_ids=prompt_token_ids,
            max_tokens=arrival.max_tokens,
            sampling=GREEDY,
            stop_token_ids=[END_TOKEN],
        )
        try:
            client.hold = run_now(self.limiter.reserve(principal, request, {}))
            self._postings.begin(client.request_id)
            stream = self.requests.run(request, principal)
        except ApiError as error:
            client.refuse(error)
            return
        client.listen(stream)
        if arrival.abort_after_s >= 0 and client.outcome is None:
            client.leaving = self.loop.after(arrival.abort_after_s, client.leave)

    def die(self) -> None:
        """The process is gone; what is durable stays, and what workers have not been told of."""
        self._tick_event.cancel()
        if self._ack_event is not None:
            self._ack_event.cancel()
        self.requests.close()
        for client in list(self.clients.values()):
            client.cut()

    def worker_ended(self, number: int, reason: str) -> None:
        """The supervisor has seen a worker process end."""
        for client in self.worker_clients[number]:
            client.lose(reason, "process")

    def _tick(self) -> None:
        self._tick_event = self.loop.after(TICK_S, self._tick)
        self.requests.tick()

    def _submitted(self, submit: Submit, worker: int) -> None:
        client = self.clients.get(submit.request_id)
        if client is not None:
            client.worker = worker
            client.granted_s = self.loop.now_s

    def _ended(self, client: SimClient) -> None:
        del self.clients[client.request_id]
        if client.hold is not None:
            used = client.usage.prompt_tokens, client.usage.generated_tokens, 0, 0.0
            run_now(client.hold.settle(*used) if client.num_tokens else client.hold.release())
        if client.error != "the gateway died":
            self._close_record(client)
        self._on_end(client)

    def _close_record(self, client: SimClient) -> None:
        if client.num_tokens:
            self._postings.post(client.request_id)
            self._ack(client.request_id)
        elif client.hold is not None:
            self._postings.void(client.request_id)

    def _claim(self, request_id: str, _finish: Finish, _attempt: int) -> bool:
        if not self._postings.claim(request_id):
            return False
        self._ack(request_id)
        return True

    def _ack(self, request_id: str) -> None:
        """Durable after a while; whatever came in meanwhile shares one write."""
        self._to_ack.append(request_id)
        if self._ack_event is None:
            self._ack_event = self.loop.after(self._posting_s, self._acknowledge)

    def _acknowledge(self) -> None:
        self._ack_event = None
        request_ids, self._to_ack = self._to_ack, []
        self.requests.ack_usage(request_ids)
