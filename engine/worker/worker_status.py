"""When a worker speaks of itself, and what it says: WorkerStatus out of the engine's status.

A status goes out every `status_interval_s`, and at once after what somebody may be waiting for: a
swap, a changed residency, capacity that grew, and a request that ended where a gateway may be near
the end of what was reported. So a grant does not wait for the interval, and a worker with room for
many does not speak of each end. Shrinking capacity can wait: the dispatcher subtracts its own
grants meanwhile.

The engine's status is asked for only when one of these may be true. Sending is `worker_loop.py`'s.
"""

import logging
import time
from collections.abc import Callable, Mapping

import msgspec

from engine.config import WorkerConfig
from engine.engine import Engine
from engine.protocol import Layout, Lease, SwapChoice, SwapRecord, WorkerStatus

logger = logging.getLogger(__name__)

_GROWTH_SHARE = 8
"""Capacity has grown when it is more than 1/8 over what was last reported."""
LAYOUT_EVERY_S = 0.5
"""Pages of KV come and go all the time: who looks at a picture is shown that often enough."""
_TIGHT_ROWS_SHARE = 4
"""Where gateways have less than 1/4 of a step's rows left, every end is reported at once."""


def is_news(reported: WorkerStatus, now: WorkerStatus) -> bool:
    """Pure: whether `now` has a residency or a capacity somebody may be waiting for."""
    if {m.model_id: m.state for m in reported.models} != {m.model_id: m.state for m in now.models}:
        return True
    before, after = _capacity(reported), _capacity(now)
    return any(amount > _grown(before.get(name, 0)) for name, amount in after.items())


def _grown(amount: int) -> int:
    return amount + amount // _GROWTH_SHARE


def _capacity(status: WorkerStatus) -> dict[str, int]:
    capacity = {"requests": status.free_requests, "kv_bytes": status.free_kv_bytes}
    for lease in status.leases:
        capacity[f"requests of {lease.model_id}"] = lease.num_requests
        capacity[f"kv_tokens of {lease.model_id}"] = lease.kv_tokens
    return capacity


class StatusBoard:
    """Keeps what was last reported. `worker_counters` are merged into the engine's counters."""

    def __init__(
        self,
        config: WorkerConfig,
        epoch: str,
        engine: Engine,
        worker_counters: Callable[[], Mapping[str, float]],
        device: str = "",
    ) -> None:
        self._config = config
        self._epoch = epoch
        self._engine = engine
        self._worker_counters = worker_counters
        self._device = device
        self._reported: WorkerStatus | None = None
        self._next_s = 0.0
        self._due = True
        self._look_again = False
        self._layout: Layout | None = None  # as last reported
        self._started_at = time.time()
        self._next_layout_s = 0.0
        self._swaps: list[SwapRecord] = []
        self._choices: list[SwapChoice] = []
        self._reported_residency: object = None
        self._num_taken = 0  # Submits since then
        self._taken_bytes = 0  # of KV, at most, since then, as the next
        self._freed_bytes = 0
        self._leases: dict[str, Lease] = {}

    def ask(self) -> None:
        """Something happened that a gateway may be waiting for: tell at the next `collect`."""
        self._due = True

    def taken(self, model_id: str, num_tokens: int) -> int:
        """A Submit was taken in, for so many tokens at most. Returns the bytes of their KV."""
        self._num_taken += 1
        lease = self._leases.get(model_id)
        num_bytes = 0
        if lease is not None:
            num_bytes = num_tokens * lease.kv_bytes_per_token + lease.kv_bytes_per_sequence
        self._taken_bytes += num_bytes
        return num_bytes

    def ended(self, num_bytes: int) -> None:
        """A request has ended: reported now if gateways may lack its KV, of so many bytes."""
        self._freed_bytes += num_bytes
        reported = self._reported
        if (
            reported is None
            or (reported.free_requests - reported.batch_requests - self._num_taken)
            * _TIGHT_ROWS_SHARE
            < self._config.engine.max_num_seqs
            or self._taken_bytes * 2 > reported.free_kv_bytes - reported.batch_kv_bytes
            or reported.free_kv_bytes + self._freed_bytes > _grown(reported.free_kv_bytes)
        ):
            self._due = True

    def rest_s(self, now_s: float) -> float:
        """How long nothing needs to be reported."""
        return 0.0 if self._due or self._look_again else max(0.0, self._next_s - now_s)

    def collect(self, now_s: float, *, draining: bool) -> WorkerStatus | None:
        """The status to tell every peer now, with the swaps since the last; None: not now."""
        self._take_swaps()
        on_time = now_s >= self._next_s
        residency = self._engine.residency_key
        moved = residency != self._reported_residency
        if not (self._due or on_time or self._look_again or moved):
            return None
        status = self._engine.status(now_s)
        news = moved or self._reported is None or is_news(self._reported, status)
        is_due = self._due or on_time or news
        # Pages given back are fenced for a step, so capacity may grow a tick after its cause.
        self._look_again = self._due or news
        if not is_due:
            return None
        self._reported, self._due = status, False
        self._reported_residency = residency
        self._num_taken = self._taken_bytes = self._freed_bytes = 0
        self._leases = {lease.model_id: lease for lease in status.leases}
        self._next_s = now_s + self._config.status_interval_s
        swaps, self._swaps = self._swaps, []
        choices, self._choices = self._choices, []
        return self._message(status, swaps, choices, self._new_layout(now_s), draining=draining)

    def greeting(self, now_s: float, *, draining: bool) -> WorkerStatus:
        """A status for a peer that just came; swaps wait for the next one to all."""
        layout, self._layout = self._laid_out(), None  # the next is reported to all again
        return self._message(self._engine.status(now_s), [], [], layout, draining=draining)

    def _laid_out(self) -> Layout:
        return msgspec.structs.replace(self._engine.layout(), device=self._device)

    def _new_layout(self, now_s: float) -> Layout | None:
        """Where it is due and has changed."""
        if now_s < self._next_layout_s:
            return None
        self._next_layout_s = now_s + LAYOUT_EVERY_S
        before, self._layout = self._layout, self._laid_out()
        return None if self._layout == before else self._layout

    def _take_swaps(self) -> None:
        swaps, choices = self._engine.take_swaps()
        self._choices += choices
        for swap in swaps:
            logger.info(
                "swap model=%s kind=%s tier=%s bytes=%d seconds=%.4f reason=%s",
                swap.model_id,
                swap.kind,
                swap.tier,
                swap.size_bytes,
                swap.duration_s,
                swap.reason or "-",
            )
            self._swaps.append(swap)
            self._due = True

    def _message(
        self,
        status: WorkerStatus,
        swaps: list[SwapRecord],
        choices: list[SwapChoice],
        layout: Layout | None,
        *,
        draining: bool,
    ) -> WorkerStatus:
        """A draining worker offers nothing."""
        return msgspec.structs.replace(
            status,
            epoch=self._epoch,
            worker_id=self._config.worker_id,
            lease_ttl_s=self._config.lease_ttl_s,
            free_requests=0 if draining else status.free_requests,
            leases=[] if draining else status.leases,
            swaps=swaps,
            counters={**status.counters, **self._worker_counters()},
            choices=choices,
            layout=layout,
            started_at=self._started_at,
        )
