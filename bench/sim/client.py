"""One request from its client's side: what it sends, what it sees, and the row that it leaves.

Stands where the pipeline and the exchange stand in the gateway (stages 3 to 10 without HTTP and
text): limits are held and settled by the real limiter, events come out of the real stream, usage is
posted once. A client may go away; then it aborts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from bench.sim.loop import Event
from bench.sim.types import OUTCOMES, Arrival, RecordOutcome, Records
from engine.protocol import Usage
from gateway.dispatch.tickets import RequestStream
from gateway.errors import ApiError, WorkerLost
from gateway.limits.limits import LimitReservation
from gateway.types import TokenEvent

_CODES = {outcome: code for code, outcome in enumerate(OUTCOMES)}
REFUSED_STATUS = (429, 503)
NO_USAGE = Usage(0, 0, 0, 0.0)


@dataclass(slots=True, eq=False)
class SimClient:
    """A request under way. `on_end` is called once, with this."""

    request_id: str
    number: int
    arrival: Arrival
    on_end: "Callable[[SimClient], None]"
    clock: Callable[[], float]
    stream: RequestStream | None = None
    hold: LimitReservation | None = None
    leaving: Event | None = None
    worker: int = -1
    granted_s: float = math.nan
    first_token_s: float = math.nan
    num_tokens: int = 0
    outcome: RecordOutcome | None = None
    usage: Usage = NO_USAGE
    error: str = ""
    refused_for: str = ""
    """The code of the error that a refused request was answered with."""
    retry_after_s: float | None = None
    """When it was told to come again."""

    def listen(self, stream: RequestStream) -> None:
        """The dispatcher has taken it."""
        self.stream = stream
        stream.listen(self._take)

    def leave(self) -> None:
        """The client goes away."""
        if self.outcome is None and self.stream is not None:
            self.stream.abort()

    def cut(self) -> None:
        """The gateway died: nothing comes any more."""
        self._end("error", error="the gateway died")

    def refuse(self, error: ApiError) -> None:
        """It ended before it was queued, or in the queue."""
        outcome: RecordOutcome = "refused" if error.kind.status in REFUSED_STATUS else "error"
        self.refused_for = error.kind.code if outcome == "refused" else ""
        self.retry_after_s = error.retry_after_s
        self._end(outcome, error=error.message)

    def _take(self) -> None:
        assert self.stream is not None
        while self.outcome is None:
            try:
                event = self.stream.take()
            except ApiError as error:
                self.refuse(error)
                return
            except WorkerLost as error:
                self._end("error", error=str(error))
                return
            if event is None:
                return
            self._see(event)

    def _see(self, event: TokenEvent) -> None:
        if event.token_ids:
            if not self.num_tokens:
                self.first_token_s = self.clock()
            self.num_tokens += len(event.token_ids)
        if event.finish is not None:
            self._end(event.finish.reason, event.finish.usage, event.finish.error)

    def _end(self, outcome: RecordOutcome, usage: Usage = NO_USAGE, error: str = "") -> None:
        if self.outcome is not None:
            return
        self.outcome, self.usage, self.error = outcome, usage, error
        if self.leaving is not None:
            self.leaving.cancel()
        self.on_end(self)

    def write(self, records: Records) -> None:
        """Its row."""
        assert self.outcome is not None
        arrival = self.arrival
        records.tenant.append(arrival.tenant)
        records.model.append(arrival.model)
        records.worker.append(self.worker)
        records.outcome.append(_CODES[self.outcome])
        records.arrival_s.append(arrival.at_s)
        records.granted_s.append(self.granted_s)
        records.first_token_s.append(self.first_token_s)
        records.ended_s.append(self.clock())
        records.prompt_tokens.append(arrival.prompt_tokens)
        records.cached_tokens.append(self.usage.cached_tokens)
        records.output_tokens.append(self.num_tokens)
        records.service_s.append(self.usage.service_s)
