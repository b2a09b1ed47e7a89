"""Fleet mode: the product's dispatcher over workers that serve by rate (rate_worker.py).

No engine, no limiter, no ledger: a request goes into the gateway's fair queue, and its stream is
listened to. So ten simulated minutes of a thousand workers take minutes. Requests come by the clock
(`arrive`) or as soon as the one before has ended (`keep_asking`).
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from bench.sim.loop import DELIVERY, Loop
from bench.sim.rate_worker import Rates, RateWorker
from engine.protocol import SamplingParams
from gateway.cluster.local_dispatcher import LocalDispatcher
from gateway.dispatch.dispatcher import TICK_S
from gateway.errors import ApiError, WorkerLost
from gateway.settings.settings import Settings
from gateway.types import HostedModel, PreparedRequest, Principal
from registry.accounts.quotas import Limits

GREEDY = SamplingParams(temperature=0.0)
FIRST_TOKEN = 16


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a workload."""

    tenant: int
    model: str
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Seen:
    """What clients saw."""

    first_token_s: list[float] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    tokens: int = 0


class FleetWorld:
    """One dispatcher and its workers."""

    def __init__(
        self,
        num_workers: int,
        sizes: Mapping[str, int],
        num_tenants: int = 16,
        rates: Rates = Rates(),  # noqa: B008 - frozen
        settings: Settings | None = None,
        seed: int = 0,
    ) -> None:
        self.loop = Loop()
        self.sizes = sizes
        self.rng = random.Random(f"fleet {seed}")
        self.requests = LocalDispatcher(
            settings or Settings(),
            self.loop.clock,
            soon=lambda call: self.loop.after(0.0, call, DELIVERY),
        )
        self.dispatcher = self.requests.dispatcher
        self.seen = Seen()
        self._models = {
            name: HostedModel(
                name=name,
                revision="r",
                pack_dir=f"packs/{name}",
                max_context=1 << 20,
                vocab_size=1 << 16,
                created_at=0,
                weight_bytes=size,
            )
            for name, size in sizes.items()
        }
        self._principals = [
            Principal(f"tenant{number}", f"key{number}", frozenset(), Limits(), 1.0)
            for number in range(num_tenants)
        ]
        self._prompts: dict[int, list[int]] = {}
        self._num_asked = 0
        self.requests.set_catalog(list(self._models.values()))
        self.workers = [
            RateWorker(f"w{number}", self.loop, rates, sizes) for number in range(num_workers)
        ]
        for worker in self.workers:
            # Heartbeats do not stay in step.
            self.loop.after(self.rng.random() * rates.status_interval_s, self._start_of(worker))
        self.loop.after(TICK_S, self._tick)

    def weigh(self, weights: Sequence[float]) -> None:
        """Weights of the tenants, which have 1 else; before anybody asks."""
        tenants = zip(self._principals, weights, strict=True)
        self._principals = [
            msgspec.structs.replace(tenant, weight=weight) for tenant, weight in tenants
        ]

    def ask(self, ask: Ask, on_end: Callable[[], None] = lambda: None) -> None:
        """A client sends a request now."""
        self._num_asked += 1
        prompt = self._prompts.setdefault(ask.prompt_tokens, [FIRST_TOKEN] * ask.prompt_tokens)
        request = PreparedRequest(
            request_id=str(self._num_asked),
            kind="completion",
            model=self._models[ask.model],
            prompt_token_ids=prompt,
            max_tokens=ask.output_tokens,
            sampling=GREEDY,
            stop_token_ids=[],
        )
        asked_s, has_token = self.loop.now_s, False
        seen = self.seen
        try:
            stream = self.requests.run(request, self._principals[ask.tenant])
        except ApiError as error:
            seen.ended[error.kind.code] += 1
            on_end()
            return

        def take() -> None:
            nonlocal has_token
            try:
                event = stream.take()
            except ApiError as error:
                seen.ended[error.kind.code] += 1
                on_end()
                return
            except WorkerLost:
                seen.ended["worker lost"] += 1
                on_end()
                return
            if event is None:
                return
            if event.token_ids and not has_token:
                has_token = True
                seen.first_token_s.append(self.loop.now_s - asked_s)
            if event.finish is not None:
                seen.ended[event.finish.reason] += 1
                seen.tokens += event.finish.usage.generated_tokens
                self.requests.ack_usage([request.request_id])
                on_end()

        stream.listen(take)

    def arrive(self, draw: Callable[[], Ask], per_s: float, until_s: float) -> None:
        """Requests at random times, so many a second."""

        def come() -> None:
            if self.loop.now_s < until_s:
                self.loop.after(self.rng.expovariate(per_s), come)
                self.ask(draw())

        self.loop.after(self.rng.expovariate(per_s), come)

    def play(self, asks: Sequence[tuple[float, Ask]]) -> None:
        """Requests at their times, which ascend."""

        def come(place: int) -> None:
            self.ask(asks[place][1])
            plan(place + 1)

        def plan(place: int) -> None:
            if place < len(asks):
                self.loop.at(asks[place][0], lambda: come(place))

        plan(0)

    def keep_asking(self, draw: Callable[[], Ask], until_s: float, pause_s: float = 0.0) -> None:
        """One client: a request, and the next one when it has ended."""

        def again() -> None:
            if self.loop.now_s < until_s:
                # Never within the call that ended the last one.
                self.loop.after(pause_s, lambda: self.ask(draw(), again))

        again()

    def copies(self, model: str) -> int:
        """Workers on which it is resident."""
        return sum(model in worker.resident for worker in self.workers)

    def _start_of(self, worker: RateWorker) -> Callable[[], None]:
        return lambda: self.requests.add_workers(worker, worker.observing)

    def _tick(self) -> None:
        self.loop.after(TICK_S, self._tick)
        self.requests.tick()


def percentile(values: Sequence[float], share: float) -> float:
    """NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan
