"""What a restart, or a limit that is new, has not counted, from the ledger.

Counts of limits live in memory. Minutes are soon counted anew; days and budgets would begin from
nothing with every restart. So whoever gets such a limit (at a start: everybody who has one) begins
with what the ledger says was used and spent.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.limits.limits import Rate, budget_name, budgets_of, count_name, limited
from gateway.limits.periods import PeriodKind
from gateway.policy.rate_limit import DAY_S, SLOTS, Used
from registry.ledger import OpenRecord, Posting, SlotUsage, SpendRow
from registry.quotas import Limits, LimitScope

SLOT_S = DAY_S // SLOTS


@dataclass(frozen=True, slots=True)
class DayCount:
    """A count by the day, and whose."""

    scope: LimitScope
    owner: str
    rate: Rate

    @property
    def field(self) -> str:
        """Of `Limits`."""
        return self.rate.field


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget's count, and whose."""

    scope: LimitScope
    owner: str
    kind: PeriodKind

    @property
    def field(self) -> str:
        """Of `Limits`."""
        return f"{self.kind}_budget_nanos"


def counts_of(scope: LimitScope, owner: str, limits: Limits) -> dict[str, DayCount | Budget]:
    """Its counts that have a past, by the name a store counts them under."""
    found: dict[str, DayCount | Budget] = {
        count_name(scope, owner, rate): DayCount(scope, owner, rate)
        for rate, _ in limited(limits)
        if rate.window_s == DAY_S
    }
    for kind, _ in budgets_of(limits):
        found[budget_name(scope, owner, kind)] = Budget(scope, owner, kind)
    return found


def spent(
    counts: Mapping[str, Budget], usage: Mapping[PeriodKind, Iterable[SpendRow]]
) -> dict[str, int]:
    """What was spent of each; `usage` is that of the present periods."""
    sums = dict.fromkeys(counts, 0)
    for kind, rows in usage.items():
        for row in rows:
            for scope, owner in owners_of(row):
                name = budget_name(scope, owner, kind)
                if name in sums:
                    sums[name] += row.cost_nanos
    return sums


def owners_of(
    row: SlotUsage | SpendRow | Posting | OpenRecord,
) -> tuple[tuple[LimitScope, str], ...]:
    """All whose limits it counts against."""
    return (
        ("key", row.key_id),
        ("tenant", row.tenant_id),
        ("model", row.model),
        ("gateway", ""),
    )


def amounts(
    counts: Mapping[str, DayCount], usage: Iterable[SlotUsage]
) -> dict[str, list[tuple[float, int]]]:
    """(begin of the slot, what was used in it) by name, the oldest first."""
    by_owner: dict[tuple[LimitScope, str], list[tuple[str, Rate]]] = {}
    for name, count in counts.items():
        by_owner.setdefault((count.scope, count.owner), []).append((name, count.rate))
    sums: dict[str, dict[float, int]] = {name: {} for name in counts}
    for row in usage:
        used = Used(row.prompt_tokens, row.completion_tokens)
        for owner in owners_of(row):
            for name, rate in by_owner.get(owner, ()):
                amount = row.num_requests if rate.meter == "requests" else used.of(rate.meter)
                sums[name][row.began_at] = sums[name].get(row.began_at, 0) + amount
    return {name: sorted(by_slot.items()) for name, by_slot in sums.items()}
