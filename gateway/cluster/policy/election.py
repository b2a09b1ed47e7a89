"""Which of several servers' dispatchers is active, by a lease that is a row of their database.

    candidate --takes the row--> holder --the row is another's--> lost

Pure: what was read and when comes in, what may be done goes out. Times are this machine's monotonic
seconds; no clock of another machine is compared with them. The database's only has to say that the
row changed (registry/servers/dispatcher_leases.py).

Why never two at a time, while both get answers from the database: the holder counts TTL_S from
before it asked for its last renewal, and a candidate from after it saw that renewal, for the first
time, in the row. So the holder's time is up first. A candidate that was stopped, or was without the
database meanwhile, has not seen the row unrenewed for all of that time, and begins to count anew: a
database that comes back after a pause leaves the holder where it is.

Without the database the holder goes on, for nobody can take the row then. If only the holder is cut
off from it, another one takes the next epoch, and every worker and gateway that this one reaches
leaves the old one: who obeys whom is decided there, by the epoch. What a holder must not do is to
grant when it does not know how it stands: after it was stopped, until the database has answered it
or has been asked in vain.

What is left: a holder whose one call hangs for AWAY_S counts the database as away and goes on,
though another server may reach it and take the row. Until that call ends both may grant; workers
and gateways that have seen the later epoch refuse the earlier one.
"""

TTL_S = 2.0
"""So long a lease holds without a renewal."""
RENEW_S = 0.5
LOOK_S = 0.2
"""How often a candidate reads the row."""
MOST_APART_S = 1.0
"""Looks of a candidate that lie further apart are no observation of what was between them."""
AWAY_S = 1.0
"""A database that has not answered for so long is away."""


class Candidacy:
    """What a candidate has seen of the row. `own`: the holder that it would be itself."""

    def __init__(self, own: tuple[str, str]) -> None:
        """`own`: its server's id and its address."""
        self._own = own
        self._stamp: tuple[int, float] | None = None
        self._since_s = self._asked_s = 0.0

    def may_take(
        self, holder: tuple[str, str], stamp: tuple[int, float], asked_s: float, now_s: float
    ) -> bool:
        """Whether the row, asked for at `asked_s` and read by now, may be taken as it is. `stamp`:
        its epoch, and until when it holds, by the database's clock.

        At once where it was given up, and where its holder was a process of this same server:
        whoever asks holds that server's lock, so that process is gone.
        """
        if stamp != self._stamp or now_s - self._asked_s > MOST_APART_S:
            self._stamp, self._since_s = stamp, now_s
        self._asked_s = asked_s
        return self.is_free(holder, stamp) or asked_s - self._since_s >= TTL_S

    def is_free(self, holder: tuple[str, str], stamp: tuple[int, float]) -> bool:
        """Whether nobody can hold it any more, be its time up or not."""
        return holder == self._own or stamp[1] <= 0


class Tenure:
    """What the holder knows of its lease."""

    def __init__(self, taken_s: float) -> None:
        """`taken_s`: before it was asked for."""
        self.is_lost = False
        self._known_s = taken_s
        self._waits_since_s: float | None = None
        self._looked_s = taken_s

    def may_grant(self, now_s: float) -> bool:
        """Whether it is known how things stand: the row was this one's, or the database away, a
        moment ago."""
        return not self.is_lost and now_s - self._known_s < TTL_S

    def answered(self, asked_s: float, *, is_held: bool | None) -> None:
        """The database was asked at `asked_s`, and said whether the row is still this one's; None:
        it cannot be reached."""
        self._waits_since_s = None
        if is_held is False:
            self.is_lost = True
        elif is_held or self._reaches_to(asked_s):
            self._known_s = max(self._known_s, asked_s)

    def waits(self, now_s: float) -> None:
        """It has been asked and does not answer. Called every RENEW_S at least: where calls lie
        further apart this process was stopped, and the answer may be there."""
        if self._waits_since_s is None or now_s - self._looked_s > MOST_APART_S:
            self._waits_since_s = now_s
        self._looked_s = now_s
        away_s = now_s - AWAY_S
        if away_s >= self._waits_since_s and self._reaches_to(away_s):
            self._known_s = max(self._known_s, away_s)

    def _reaches_to(self, at_s: float) -> bool:
        """Whether nothing was missed before: who was stopped for longer than a lease may have lost
        it before the database was away."""
        return at_s - self._known_s < TTL_S
