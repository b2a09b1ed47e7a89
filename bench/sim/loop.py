"""The events of a simulation, one after the other in simulated time.

Of events at one time deliveries come first, so that whoever looks at that moment sees what has
arrived; then in the order in which they were asked for. Nothing else decides: a run is the same
every time.
"""

import heapq
from collections.abc import Callable

Call = Callable[[], None]

DELIVERY = 0
ACTION = 1


class Event:
    """Something that will happen, unless it is cancelled."""

    __slots__ = ("call", "time_s")

    def __init__(self, time_s: float, call: Call) -> None:
        self.time_s = time_s
        self.call: Call | None = call

    def cancel(self) -> None:
        """It will not happen. Harmless afterwards."""
        self.call = None


class Loop:
    """A heap of events. `now_s` is the time of the one that happens now."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, int, Event]] = []
        self._num_asked = 0
        self._stopped = False
        self.after_event: Call | None = None
        """Called after every event, for those who check."""

    def clock(self) -> float:
        """`now_s`, as a clock."""
        return self.now_s

    def at(self, time_s: float, call: Call, rank: int = ACTION) -> Event:
        """Have `call` happen at `time_s`, which must not have passed."""
        if time_s < self.now_s:
            raise ValueError(f"an event at {time_s} was asked for at {self.now_s}")
        event = Event(time_s, call)
        self._num_asked += 1
        heapq.heappush(self._heap, (time_s, rank, self._num_asked, event))
        return event

    def after(self, delay_s: float, call: Call, rank: int = ACTION) -> Event:
        """Have `call` happen `delay_s` from now."""
        return self.at(self.now_s + delay_s, call, rank)

    def stop(self) -> None:
        """End the run after the event that happens now."""
        self._stopped = True

    def run(self, until_s: float | None = None) -> None:
        """Until `stop`, or nothing is left, or the next event is later than `until_s`."""
        heap = self._heap
        while heap and not self._stopped:
            time_s, _, _, event = heap[0]
            if event.call is None:
                heapq.heappop(heap)
                continue
            if until_s is not None and time_s > until_s:
                self.now_s = until_s
                return
            heapq.heappop(heap)
            self.now_s = time_s
            self.num_events += 1
            call, event.call = event.call, None
            call()
            if self.after_event is not None:
                self.after_event()
        self._stopped = False
