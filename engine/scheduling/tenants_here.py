"""Which tenants have requests on this worker, how many, and who has gone lately.

Counts only: what follows from them is decided by the scheduler, by admission, and by
`policy/step_pace.py`. A tenant that asks seldom is mostly not here, so whether there is more than
one is remembered for RECENT_S.
"""

from collections import Counter

from engine.errors import IntegrityError
from engine.request import Request

RECENT_S = 10.0
MAX_REMEMBERED = 64
RARE_SHARE = 0.5


class TenantsHere:
    """Of unfinished requests, of all units."""

    def __init__(self) -> None:
        self._num: Counter[str] = Counter()
        self._total = 0
        self._left_s: dict[str, float] = {}  # when a tenant's last request here ended; newest last

    def add(self, tenant_id: str) -> None:
        """It has one more."""
        self._num[tenant_id] += 1
        self._total += 1
        self._left_s.pop(tenant_id, None)

    def remove(self, tenant_id: str, now_s: float) -> None:
        """One of its has ended."""
        self._num[tenant_id] -= 1
        self._total -= 1
        if not self._num[tenant_id]:
            del self._num[tenant_id]
            self._left_s[tenant_id] = now_s
            if len(self._left_s) > MAX_REMEMBERED:
                del self._left_s[next(iter(self._left_s))]

    @property
    def num(self) -> int:
        """Tenants that have requests here."""
        return len(self._num)

    def rank(self, request: Request) -> int:
        """Requests that its tenant has here: whoever has fewest goes first."""
        return self._num[request.submit.tenant_id]

    @property
    def mean(self) -> float:
        """Requests that a tenant has here. A tenant with fewer asks seldom, the others crowd."""
        return self._total / max(1, len(self._num))

    def is_newcomer(self, request: Request) -> bool:
        """Whether it waits for its first token, of a tenant with fewer requests than the mean."""
        if request.num_generated or request.num_pending:
            return False
        return self.rank(request) * len(self._num) < self._total

    def may_take_over(self, request: Request) -> bool:
        """Whether its tenant has so little here that it need not wait for a row.

        A RARE_SHARE of the mean: a tenant of a small weight that always has a backlog has less than
        the mean too, and its share of the rows.
        """
        if request.num_generated or request.num_pending:
            return False
        return self.rank(request) * len(self._num) <= self._total * RARE_SHARE

    def is_shared(self, now_s: float) -> bool:
        """Whether there is, or lately was, more than one tenant."""
        if len(self._num) > 1:
            return True
        last_s = next(reversed(self._left_s.values()), None)
        return last_s is not None and now_s - last_s <= RECENT_S

    def check_integrity(self, num_by_tenant: Counter[str]) -> None:
        """Raises IntegrityError unless these are the counts."""
        if num_by_tenant != self._num or num_by_tenant.total() != self._total:
            raise IntegrityError(f"{self._num} requests booked, {num_by_tenant} found")
