"""Who pays for a load: those who waited for it, and then whoever uses what it brought (pure).

    begin     a load begins: the backlogs of tenants whose work waits for it are its causes
    finish    it took so long: each cause is charged in proportion to its backlog
    use       a tenant uses the model: it pays as much again as its service, until the load is paid,
              to those who were charged for it, in proportion to what they were charged
    end       the model left: what is not paid back stays with those who caused the load

So the load of a model that many use costs each of them in proportion to its use, as far as a load's
time of use goes; who has models loaded that nobody else wants pays for them alone. A load that
nobody waited for (prefetched, pinned, an operator's) is the system's, and nobody pays it back.

Times are seconds. A residency is named by (worker, model); loads run beside steps on a device that
computes, so their time is no part of any step's.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Residency: TypeAlias = tuple[str, str]

NO_CAUSES: Mapping[str, float] = {}


class Transfer(NamedTuple):
    """Service that a tenant is charged; below 0: that it gets back."""

    tenant_id: str
    service_s: float


@dataclass(slots=True)
class _Debt:
    """`shares` add up to 1; `left_s` is not yet paid back."""

    shares: dict[str, float]
    left_s: float


class LoadAccount:
    """Loads under way and loads not yet paid back: as many as models are on devices."""

    def __init__(self) -> None:
        self._causes: dict[Residency, dict[str, float]] = {}
        self._debts: dict[Residency, _Debt] = {}
        self.charged_s: dict[str, float] = {}
        """By tenant: what loads have cost it so far, less what it was paid back."""
        self.system_s = 0.0

    def is_known(self, residency: Residency) -> bool:
        """Whether its load has begun."""
        return residency in self._causes

    def begin(self, residency: Residency, backlog_s: Mapping[str, float]) -> None:
        """`backlog_s`: predicted service that waits for the model, by tenant; empty: nobody's."""
        self._causes[residency] = {name: s for name, s in backlog_s.items() if s > 0}

    def finish(
        self, residency: Residency, took_s: float, backlog_s: Mapping[str, float] = NO_CAUSES
    ) -> list[Transfer]:
        """`backlog_s` counts where nobody saw the load begin."""
        causes = self._causes.pop(residency, None)
        if causes is None:
            causes = {name: s for name, s in backlog_s.items() if s > 0}
        self._debts.pop(residency, None)
        total_s = sum(causes.values())
        if not causes or total_s <= 0 or took_s <= 0:
            self.system_s += max(0.0, took_s)
            return []
        shares = {name: s / total_s for name, s in causes.items()}
        self._debts[residency] = _Debt(shares, took_s)
        return self._noted([Transfer(name, share * took_s) for name, share in shares.items()])

    def use(self, residency: Residency, tenant_id: str, service_s: float) -> list[Transfer]:
        """The transfers add up to 0."""
        debt = self._debts.get(residency)
        if debt is None or service_s <= 0:
            return []
        paid_s = min(debt.left_s, service_s)
        debt.left_s -= paid_s
        if debt.left_s <= 0:
            del self._debts[residency]
        if debt.shares.get(tenant_id) == 1.0:
            return []  # to itself
        back = [Transfer(name, -share * paid_s) for name, share in debt.shares.items()]
        return self._noted([Transfer(tenant_id, paid_s), *back])

    def owed_s(self, residency: Residency) -> float:
        """Of its load, what is not paid back yet."""
        debt = self._debts.get(residency)
        return 0.0 if debt is None else debt.left_s

    def end(self, residency: Residency) -> None:
        """The model has left the worker, or its load came to nothing."""
        self._causes.pop(residency, None)
        self._debts.pop(residency, None)

    def keep_under_way(self, worker_id: str, loading: Collection[Residency]) -> None:
        """Loads of that worker that are not among these have come to nothing."""
        for residency in [key for key in self._causes if key[0] == worker_id]:
            if residency not in loading:
                del self._causes[residency]

    def lose_worker(self, worker_id: str) -> None:
        """Nothing is there any more."""
        for books in (self._causes, self._debts):
            for residency in [key for key in books if key[0] == worker_id]:
                del books[residency]

    def _noted(self, transfers: list[Transfer]) -> list[Transfer]:
        for tenant_id, service_s in transfers:
            self.charged_s[tenant_id] = self.charged_s.get(tenant_id, 0.0) + service_s
        return transfers
