"""Which gateways of other servers are lost: their rows have not changed for so long, in front of
somebody who has looked all the while.

Pure. A gateway renews its row every RENEW_S (registry/servers/gateway_leases.py). Whoever could not
look for longer than MOST_APART_S (or half of lost_after_s) begins to count anew: while the database
is away nobody can renew anything, and when it is back everybody is to have the time to do so.

    renewed since the last look      it lives, and its time begins anew
    the same, for lost_after_s       lost, at every look until its row is gone
    the row is gone                  forgotten: it stopped in order, or its books were closed

Bounded by the rows, of which there is one for each gateway process.
"""

from collections.abc import Mapping

RENEW_S = 2.0
MOST_APART_S = 10.0


class Absences:
    """Of one observer."""

    def __init__(self, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        self._most_apart_s = min(MOST_APART_S, lost_after_s / 2)
        self._seen: dict[str, tuple[float, float]] = {}
        """When a row was renewed last, by the database's clock, and since when it is seen here."""
        self._asked_s = 0.0

    def look(self, rows: Mapping[str, float], asked_s: float, now_s: float) -> list[str]:
        """Who is lost, of the rows that were asked for at `asked_s` and have come by now."""
        if now_s - self._asked_s > self._most_apart_s:
            self._seen = {}
        self._asked_s = asked_s
        before = self._seen
        self._seen = {
            name: before[name] if name in before and before[name][0] == at else (at, now_s)
            for name, at in rows.items()
        }
        due_s = asked_s - self._lost_after_s
        return [name for name, (_, since_s) in self._seen.items() if since_s <= due_s]
