"""The verbs that show list prices, page by page, and what another one would have come to: for the
operator's pages (control.py)."""

from dataclasses import dataclass

from sqlalchemy import select

from gateway.limits.periods import Period, period_of
from gateway.service.control import Control, require, visible
from registry import catalog, price_effect, prices
from registry.catalog import Model
from registry.paging import Cut, Listed, listed
from registry.price_effect import Consumed
from registry.prices import PriceRecord


@dataclass(frozen=True, slots=True)
class PriceLine:
    """A model and what it costs now. `next_at`: when another price begins, if one is set."""

    model: str
    task: str
    price: PriceRecord | None
    next_at: float | None


@dataclass(frozen=True, slots=True)
class PriceView:
    """One model's prices, the newest first; `now` is the one that holds."""

    model: str
    task: str
    now: PriceRecord
    dated: list[PriceRecord]


@dataclass(frozen=True, slots=True)
class Effect:
    """Last month at its own prices and at another: at list prices, and as billed, where discounts
    leave the same share of either."""

    month: Period
    used: Consumed
    list_nanos: int
    cost_nanos: int


def prices_page(control: Control, text: str, cut: Cut) -> Listed[PriceLine]:
    """A page of the ready models, by name."""
    visible(control, "prices.read")
    now_at = control.clock()
    query = select(Model.name, Model.task).where(Model.state == "ready")
    if text:
        query = query.where(Model.name.contains(text, autoescape=True))
    with control.reading() as session:
        found = listed(session, query, Model.name, Model.name, cut)
        names = [row.name for row in found.rows]
        held = prices.prices_of(session, names, now_at)
        far = prices.prices_of(session, names, float(2**53))
        rows = []
        for row in found.rows:
            last = far.get(row.name)
            later = last.valid_from if last and last.valid_from > now_at else None
            rows.append(PriceLine(row.name, row.task, held.get(row.name), later))
        return Listed(rows, found.previous, found.next)


def price_view(control: Control, model: str) -> PriceView:
    """Raises NotFound."""
    visible(control, "prices.read")
    now_at = control.clock()
    with control.reading() as session:
        found = catalog.get_model(session, model)
        dated = prices.list_prices(session, found.name)[::-1]
        held = prices.price_at(session, found.name, now_at)
        return PriceView(found.name, found.task, held, dated)


def price_effect_of(control: Control, price: PriceRecord) -> Effect:
    """What last month would have been with it. Nothing is stored."""
    require(control, "usage.read")
    prices.check_prices(price)
    this = period_of("month", control.clock())
    last = period_of("month", this.began_at - 1)
    with control.reading() as session:
        used = price_effect.consumed(session, price.model, last.began_at, last.ends_at)
    listed_nanos = used.at_list(price)
    share = used.cost_nanos, used.list_nanos
    cost = listed_nanos if not share[1] else listed_nanos * share[0] // share[1]
    return Effect(last, used, listed_nanos, cost)
