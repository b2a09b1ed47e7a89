"""What is down or behind, in one sentence each: the banner that all pages have.

Told to users who may see the whole installation. What follows from the running server's figures
costs nothing; the database is asked at most every ALERTS_S.
"""

from dataclasses import dataclass
from typing import Final, Literal

from admin.context.operator_context import OperatorContext
from admin.live.fleet_watch import FleetWatch, LiveState, Shared
from admin.operations.limits import num_failing_alerts
from admin.rendering.templating import exact, number, size, span

ALERTS_S: Final = 10.0
LATE_S: Final = 10.0
"""Of the database, behind the journal."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """`kind`: "bad" where requests are not served, "warn" where they are. `code`: two words for it;
    `text` says what it means and what happens next. `page` has more of it, at `path`."""

    kind: Literal["bad", "warn"]
    code: str
    text: str
    page: str = "Health"
    path: str = "/health"


class TroubleWatch:
    """Of one process."""

    def __init__(self, context: OperatorContext, fleet: FleetWatch) -> None:
        """`context`: with the server's own rights."""
        self._has_redis = bool(context.settings.redis_url)
        self._fleet = fleet
        self._num_failing = Shared(lambda: num_failing_alerts(context), ALERTS_S)

    def look(self, live: LiveState) -> list[Trouble]:
        """The worst first. In a thread. Raises what a database that does not answer raises."""
        found = [*self._workers(live), *self._ledger(live)]
        if live.limits_degraded:
            who = "Redis" if self._has_redis else "The dispatcher"
            text = f"{who} does not answer: each process enforces its share of the limits."
            found.append(Trouble("warn", "limits per process", text))
        if num := self._num_failing.get():
            what = "1 spending alert" if num == 1 else f"{number(num)} spending alerts"
            text = f"{what} could not be delivered; delivery is tried again."
            found.append(Trouble("warn", "alerts failing", text, "Alerts", "/alerts"))
        return sorted(found, key=lambda each: each.kind)

    def _workers(self, live: LiveState) -> list[Trouble]:
        if not live.workers:
            fleet = self._fleet.look()
            lost = max(fleet.lost.values(), default=None) if fleet is not None else None
            since = "" if lost is None else f" since {exact(lost)[11:]}"
            text = f"No worker is connected{since}. Requests wait; it restarts automatically."
            return [Trouble("bad", "no worker", text)]
        if not live.ready:
            return [Trouble("bad", "not ready", "Requests cannot be served now.")]
        return []

    def _ledger(self, live: LiveState) -> list[Trouble]:
        ledger = live.ledger
        if ledger.refuses:
            text = f"The journal holds {size(ledger.journal_bytes)}, its maximum. New requests are "
            text += "refused until the database takes records again."
            return [Trouble("bad", "journal full", text)]
        if ledger.lag_s <= LATE_S:
            return []
        text = f"{number(ledger.num_pending)} records wait for the database, the oldest for "
        text += f"{span(ledger.lag_s)}. Requests are served; usage and budgets are late."
        return [Trouble("warn", "database behind", text)]
