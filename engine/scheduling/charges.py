"""Who pays for a step: its time split over its rows, and the memory that they held meanwhile.

    device_s   its part of each step's time; with the system's these add up to the steps exactly
    memory_s   time of the device multiplied by the share of the arena that the request held in it,
               steps of other requests and units included while it was running
    service    the larger of the two: what fair shares count (Ghodsi et al., "Dominant Resource
               Fairness", NSDI'11, for one request)

The system's own account has what no request should pay for: rows of requests that ended while their
step was under way, and positions that are computed again after a preemption. Waiting for the next
step costs a request nothing: only the time of steps counts, of memory too.

Knows rows and seconds; tenants, weights and prices are the gateway's.
"""

from collections.abc import Iterable

from engine.encoders.encoder_queue import row_context
from engine.policy.batching import arena_share, split_time
from engine.protocol import RequestService
from engine.request import Request
from engine.scheduling.step_pipeline import Collected


class Charges:
    """Charges the rows of steps. `counters` are the engine's: what they hold is running totals."""

    def __init__(self, num_pages: int, counters: dict[str, float]) -> None:
        self._num_pages = num_pages
        self._counters = counters

    def step(self, ended: Collected) -> None:
        """The step's time to its rows; what has no request any more to the engine itself."""
        rows = [item.row for item in ended.rows]
        shares = split_time(ended.device_s, [(row.num_tokens, row_context(row)) for row in rows])
        sizes = [row.num_tokens for row in rows]
        ended.queue.pace.observe(ended.device_s, sum(sizes), sum(n for n in sizes if n > 1))
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
                lost_s = share * again / row.num_tokens
                self._counters["recompute_seconds"] += lost_s
                share -= lost_s
            request.device_s += share
            if row.first < request.num_prompt:
                request.prefill_s += share
            if request.state == "running":
                since_s = began_s if request.held_since_s is None else request.held_since_s
                held = arena_share(rates, row.end, self._num_pages)
                request.memory_s += (busy_s - since_s) * held
                request.held_since_s = busy_s
        self._counters["busy_seconds"] = busy_s


def services(requests: Iterable[Request]) -> list[RequestService]:
    """What running requests have had so far, for the worker's status."""
    return [
        RequestService(*request.key, request.service_s, request.device_s)
        for request in requests
        if request.state == "running" and request.device_s
    ]
