"""Who may not ask a model for a while, because what they sent made its files take too much.

The fault may be the model's (a template that loops) or the tenant's (a text that an honest regular
expression cannot bear). So a tenant whose request was ended does not ask that model for FIRST_S,
twice as long each further time; others do. The third tenant within FORGET_S shows that it is the
model: then nobody does. Pure, bounded.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

FIRST_S = 10.0
LONGEST_S = 600.0
FORGET_S = 3600.0
MAX_TENANTS = 3
MAX_KEPT = 4096
EVERYBODY = ""


@dataclass(slots=True)
class _Offence:
    count: int
    last_s: float
    until_s: float
    reason: str


class Offences:
    """By revision and tenant; EVERYBODY stands for all of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: OrderedDict[tuple[str, str], _Offence] = OrderedDict()

    def add(self, revision: str, tenant_id: str, reason: str) -> float:
        """A request was ended. Returns how many seconds the next has to wait."""
        pause_s = self._add(revision, tenant_id, reason)
        horizon_s = self._clock() - FORGET_S
        tenants = sum(
            kept == revision and tenant != EVERYBODY and offence.last_s >= horizon_s
            for (kept, tenant), offence in self._kept.items()
        )
        if tenant_id != EVERYBODY and tenants >= MAX_TENANTS:
            pause_s = self._add(revision, EVERYBODY, reason)
        return pause_s

    def pause(self, revision: str, tenant_id: str) -> tuple[float, str]:
        """Seconds until it may be asked (0: now), and why not now."""
        if not self._kept:
            return 0.0, ""
        now_s = self._clock()
        found = (self._kept.get((revision, who)) for who in (EVERYBODY, tenant_id))
        waits = [(o.until_s - now_s, o.reason) for o in found if o is not None]
        return max((wait for wait in waits if wait[0] > 0), default=(0.0, ""))

    def is_known(self, revision: str) -> bool:
        """Whether anything of the model is remembered."""
        return any(kept == revision for kept, _ in self._kept)

    def _add(self, revision: str, tenant_id: str, reason: str) -> float:
        now_s, key = self._clock(), (revision, tenant_id)
        before = self._kept.pop(key, None)
        count = before.count if before is not None and now_s - before.last_s < FORGET_S else 0
        pause_s = min(LONGEST_S, FIRST_S * 2.0**count)
        self._kept[key] = _Offence(min(count + 1, 32), now_s, now_s + pause_s, reason)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return pause_s
