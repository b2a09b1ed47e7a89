"""Which requests are out of time: a heap of deadlines, looked at once a step."""

import heapq
import math

from engine.request import Request

SLACK = 64
"""Ended requests that may lie in the heap before it is cleared of them."""


class Deadlines:
    """Requests with a deadline, until they end. Knows nothing else about them."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._limit = SLACK

    def add(self, request: Request) -> None:
        """Watch a request that the scheduler has taken (its `order` is unique)."""
        if request.deadline_s == math.inf:
            return
        if len(self._heap) >= self._limit:
            # A request's tokens must not be held until a deadline long after its end.
            self._heap = [item for item in self._heap if item[2].state != "finished"]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + SLACK
        heapq.heappush(self._heap, (request.deadline_s, request.order, request))

    @property
    def next_s(self) -> float:
        """The earliest deadline there may be; infinite: none."""
        return self._heap[0][0] if self._heap else math.inf

    def pop_due(self, now_s: float) -> list[Request]:
        """Unfinished requests whose deadline has come, each told once."""
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            request = heapq.heappop(self._heap)[2]
            if request.state != "finished":
                due.append(request)
        return due
