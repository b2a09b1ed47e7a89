"""Everything that is dated about prices, and what holds for one tenant and model at an instant
(pure).

    list price           of a model, from a date on; none: free of charge
    plan's price         of a model in a plan, from a date on, in place of the list price; it may
                         end, and then the list price holds again
    plan's discount      basis points off list prices, from a date on; never off the plan's own
    tenant's terms       its plan, and a discount of its own off whatever the plan says

What comes in is sorted by date; what lies in the future is in here too, so nobody has to read
prices anew at the moment when they change.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from gateway.policy.pricing import BASIS_POINTS, Prices, Rates

_T = TypeVar("_T")
Dated: TypeAlias = Sequence[tuple[float, _T]]
"""(since when, what), the oldest first."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a tenant agreed: a plan ("" for none) and basis points off."""

    plan: str = ""
    discount_bp: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A price plan. `prices` by model; None where the plan's price of it ends."""

    discounts: Dated[int] = ()
    prices: Mapping[str, Dated[Prices | None]] = field(default_factory=dict)


_NO_PRICES = Prices()
_NO_TERMS = Terms()
_NO_PLAN = Plan()


@dataclass(frozen=True, slots=True)
class PriceBook:
    """List prices by model, plans by name, terms by tenant id."""

    listed: Mapping[str, Dated[Prices]] = field(default_factory=dict)
    plans: Mapping[str, Plan] = field(default_factory=dict)
    terms: Mapping[str, Dated[Terms]] = field(default_factory=dict)

    def rates(self, tenant_id: str, model: str, at: float) -> Rates:
        """What a request that arrives at `at` is billed by."""
        listed = _holding(self.listed.get(model, ()), at, _NO_PRICES)
        terms = self.terms_of(tenant_id, at)
        plan = self.plans.get(terms.plan, _NO_PLAN)
        own = _holding(plan.prices.get(model, ()), at, None)
        left = BASIS_POINTS
        if own is None:
            left -= _holding(plan.discounts, at, 0)
        share = left * (BASIS_POINTS - terms.discount_bp)
        return Rates(at, listed, listed if own is None else own, share)

    def terms_of(self, tenant_id: str, at: float) -> Terms:
        """What the tenant has agreed at `at`."""
        return _holding(self.terms.get(tenant_id, ()), at, _NO_TERMS)

    def changes(self, from_at: float, to_at: float, tenant_id: str | None = None) -> list[float]:
        """When something changes inside the span, of one tenant's prices or of anybody's."""
        found = {at for at in self._instants(tenant_id) if from_at < at < to_at}
        return sorted(found)

    def _instants(self, tenant_id: str | None) -> Iterator[float]:
        if tenant_id is None:
            terms, plans = list(self.terms.values()), list(self.plans.values())
        else:
            terms = [self.terms.get(tenant_id, ())]
            names = {one.plan for dated in terms for _, one in dated}
            plans = [self.plans[name] for name in sorted(names) if name in self.plans]
        for dated in (*self.listed.values(), *terms):
            yield from (at for at, _ in dated)
        for plan in plans:
            yield from (at for at, _ in plan.discounts)
            for own in plan.prices.values():
                yield from (at for at, _ in own)


def _holding(dated: Dated[_T], at: float, before: _T) -> _T:
    """What holds at `at`; `before` the first date."""
    index = bisect_right(dated, at, key=lambda one: one[0])
    return before if index == 0 else dated[index - 1][1]
