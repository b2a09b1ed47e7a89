"""Whose job a prepare process takes next: the tenant's that has had least of their time. Pure.

Start-time fair queueing (Goyal et al. 1996), with a job's time known only at its end: a tenant's
jobs are charged one after the other from the time at which it came, and the waiting tenant that was
charged least goes first. So a tenant with hundreds of slow jobs delays another's by what is being
worked on, and one that comes back gets nothing for the time that it was away.
"""

from collections import Counter

MAX_TENANTS = 1024


class PrepareTurns:
    """Seconds of work by tenant, as far as they are more than everybody has had."""

    def __init__(self) -> None:
        # Those of a tenant with running jobs lack the time at which each began.
        self._charged_s: dict[str, float] = {}
        self._running: Counter[str] = Counter()
        self._everybody_s = 0.0

    def charged_s(self, tenant_id: str, now_s: float) -> float:
        """Until now; the least goes first."""
        charged_s = self._charged_s.get(tenant_id)
        if charged_s is None:
            return self._everybody_s
        running = self._running[tenant_id] * now_s
        return max(charged_s + running, self._everybody_s)

    def begin(self, tenant_id: str, now_s: float) -> None:
        """A process takes a job of it."""
        charged_s = self.charged_s(tenant_id, now_s)
        self._everybody_s = charged_s
        self._running[tenant_id] += 1
        self._charged_s[tenant_id] = charged_s - self._running[tenant_id] * now_s

    def end(self, tenant_id: str, now_s: float) -> None:
        """And has done it."""
        charged_s = self.charged_s(tenant_id, now_s)
        self._running[tenant_id] -= 1
        if self._running[tenant_id]:
            self._charged_s[tenant_id] = charged_s - self._running[tenant_id] * now_s
            return
        del self._running[tenant_id]
        self._charged_s[tenant_id] = charged_s
        if len(self._charged_s) > MAX_TENANTS:
            self._forget()

    def clear(self) -> None:
        """Nobody waits and nothing is worked on."""
        self._charged_s.clear()
        self._running.clear()
        self._everybody_s = 0.0

    def _forget(self) -> None:
        """Those who had no more than everybody; if they are too few, all but those at work."""
        kept = {
            name: charged_s
            for name, charged_s in self._charged_s.items()
            if name in self._running or charged_s > self._everybody_s
        }
        if len(kept) > MAX_TENANTS:
            kept = {name: kept[name] for name in self._running}
        self._charged_s = kept
