"""CPU that tenants' constraints use: who is dear, whose turn it is, who has used too much. Pure.

One process computes the masks of all tenants, one row after the other, and a row cannot be
interrupted. An ordinary row takes 0.02 to 0.3 ms; a row of an ambiguous grammar takes up to 100.
So each tenant has an account:

    earns     STEP_S for each row and OPEN_S for each new constraint, and REPAY of each second
    pays      the CPU that its rows and constraints took
    is dear   while the account is below zero. Its work then waits here: one piece at a time, from
              the tenant that owes least, and for at most SHARE of the time while others are served
    is spent  below -DEBT_S: it gets no new constraints, and its dear requests end

An ordinary tenant never gets there, however many requests it has, for the account grows with them.
The caller does the work and says what it took; `now_s` is passed in.
"""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

# Ten times the mean of 400 ordinary schemas at 100k tokens, twice the dearest of them.
STEP_S = 0.0005
# A trial in a fork and compiling: ten times the median, three times the 99th percentile.
OPEN_S = 0.03
CREDIT_S = 0.05
DEBT_S = 2.0
REPAY = 0.05
SHARE = 0.1
MAX_STRETCH = 3.0
# For so long after an ordinary tenant's last piece others may still come.
RECENT_S = 1.0
MAX_TENANTS = 1024

ItemT = TypeVar("ItemT")


class CpuShares(Generic[ItemT]):
    """Accounts of tenants, and the pieces of work of those that are dear."""

    def __init__(self) -> None:
        # Seconds below CREDIT_S and when that was; those who owe nothing are not here.
        self._owed: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._waiting: dict[str, deque[ItemT]] = {}
        self._is_out = False
        self._begun_s = self._free_s = 0.0
        self._ordinary_s = -RECENT_S

    @property
    def num_waiting(self) -> int:
        """Pieces of work that wait for their turn."""
        return sum(map(len, self._waiting.values()))

    def pay(self, tenant: str, cpu_s: float, earned_s: float, now_s: float) -> None:
        """A piece of the tenant's work took `cpu_s`."""
        owed_s = max(0.0, self._owed_s(tenant, now_s) + cpu_s - earned_s)
        self._owed.pop(tenant, None)
        if owed_s:
            self._owed[tenant] = owed_s, now_s
            if len(self._owed) > MAX_TENANTS:
                self._owed.popitem(last=False)

    def is_dear(self, tenant: str, now_s: float) -> bool:
        """Whether its work has to wait for turns."""
        return tenant in self._waiting or self._owed_s(tenant, now_s) > CREDIT_S

    def spent_for_s(self, tenant: str, now_s: float) -> float:
        """Seconds until it may have new constraints again; 0: it may."""
        return max(0.0, self._owed_s(tenant, now_s) - CREDIT_S - DEBT_S) / REPAY

    def serve_at_once(self, now_s: float) -> None:
        """An ordinary tenant's work is being done: the dear ones' must leave it room."""
        self._ordinary_s = now_s

    def wait(self, tenant: str, item: ItemT) -> None:
        """Queue a dear tenant's work."""
        self._waiting.setdefault(tenant, deque()).append(item)

    def next(self, now_s: float) -> ItemT | None:
        """The piece whose turn it is, until `done`; None: not now."""
        if self._is_out or not self._waiting:
            return None
        if now_s < self._free_s and now_s < self._ordinary_s + RECENT_S:
            return None
        tenant = min(self._waiting, key=lambda name: self._owed_s(name, now_s))
        queue = self._waiting[tenant]
        item = queue.popleft()
        if not queue:
            del self._waiting[tenant]
        self._is_out, self._begun_s = True, now_s
        return item

    def done(self, cpu_s: float, now_s: float) -> None:
        """What `next` gave has been done. It counts as long as others may have waited for it: on a
        busy machine that is longer than it computed; how long nobody asked is not counted.
        """
        self._is_out = False
        held_s = min(now_s - self._begun_s, MAX_STRETCH * cpu_s)
        self._free_s = now_s + held_s * (1 / SHARE - 1)

    def drop(self, tenant: str, item: ItemT) -> bool:
        """Take a waiting piece out again; False: it does not wait."""
        queue = self._waiting.get(tenant)
        if queue is None or item not in queue:
            return False
        queue.remove(item)
        if not queue:
            del self._waiting[tenant]
        return True

    def clear(self) -> None:
        """All pieces are void; the accounts stay."""
        self._waiting.clear()
        self._is_out = False

    def _owed_s(self, tenant: str, now_s: float) -> float:
        owed_s, at_s = self._owed.get(tenant, (0.0, now_s))
        return max(0.0, owed_s - REPAY * (now_s - at_s))
