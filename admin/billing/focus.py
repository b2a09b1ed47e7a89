"""Bills in the form of FOCUS 1.2 (FinOps Open Cost and Usage Specification, focus.finops.org).

One row for each hour, key, model and meter: input, cached, output, an encoder's input, seconds of
service and of loading; another one where a price changed inside the hour. Units are tokens (and
seconds), never requests; the billing period is the calendar month, UTC. `focus_columns.json` is the
specification's table of columns, and says why those that are left out are.

`BilledCost` and `EffectiveCost` are the ledger's nano-units and add up to it; `ListCost` and
`ContractedCost` are quantity times price, unrounded: the parts of a nano-unit that rounding each
bill leaves to the client are the difference. A correction is an Adjustment row of its own, of class
"Correction" where it puts an earlier month right.

Two or three million lines are an ordinary month. Of the columns of a line of usage six are amounts
and five say whose it is; the others are the same for all keys of an hour, model, meter and price.
So those are made into a template (`LineMaker`), and a line is the template with its amounts.
"""

import csv
import io
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from admin.billing.export_rows import decimal_text, harmless, short_decimal
from gateway.pricing.policy.pricing import WHOLE, PriceBook, Rates
from registry.money.exports import HOUR_AMOUNTS, HOUR_S, Corrected, HourSum

_T = TypeVar("_T")

AMOUNTS = (
    "BilledCost",
    "EffectiveCost",
    "ConsumedQuantity",
    "PricingQuantity",
    "ListCost",
    "ContractedCost",
)
OWNERS = (
    "BillingAccountId",
    "BillingAccountName",
    "SubAccountId",
    "SubAccountName",
    "SubAccountType",
)
MAX_KEPT = 20_000
"""Templates and owners; beyond that they are made anew."""
COLUMNS_PATH = Path(__file__).with_name("focus_columns.json")
SERVICE_NAME = "Polyhost"
MICROS_PLACES = 6
NANOS_PLACES = 9
SHARE_PLACES = 8
"""WHOLE is 10^8."""
MAX_RATES = 20_000
"""Of tenants and models, that are remembered while rows are written."""


def spelled(cells: Sequence[str]) -> str:
    """As the csv module writes them, without the line's end."""
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="\n").writerow(["", *cells])  # It quotes what ends lines.
    return buffer.getvalue()[1:-1]


class LineMaker:
    """Lines of one order of columns."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = list(columns)
        self._open = [name for name in columns if name in (*AMOUNTS, *OWNERS)]
        billed, quantity, listed, agreed = range(4)
        places = {
            **dict(zip(AMOUNTS, (billed, billed, quantity, quantity, listed, agreed), strict=True)),
            **{name: 4 + number for number, name in enumerate(OWNERS)},
        }
        self._arranged = itemgetter(*(places[name] for name in self._open))
        self._templates: dict[Hashable, str] = {}
        self._owners: dict[Hashable, tuple[str, ...]] = {}

    def template(self, key: Hashable, cells: Callable[[], Mapping[str, str]]) -> str:
        """What lines with this key have in common; `cells` makes one of them."""
        found = self._templates.get(key)
        if found is None:
            row = cells()
            parts = [
                "%s" if name in self._open else spelled([row.get(name, "")]).replace("%", "%%")
                for name in self._columns
            ]
            found = _keep(self._templates, key, ",".join(parts) + "\n")
        return found

    def owner(self, key: Hashable, cells: Callable[[], Mapping[str, str]]) -> tuple[str, ...]:
        """Whose lines with this key are."""
        found = self._owners.get(key)
        if found is None:
            row = cells()
            cut = tuple(spelled([row.get(name, "")]) for name in OWNERS)
            found = _keep(self._owners, key, cut)
        return found

    def line(
        self,
        template: str,
        owner: tuple[str, ...],
        amounts: tuple[str, str, str, str],
    ) -> str:
        """`amounts`: billed cost, quantity, cost by the list and as agreed."""
        text: str = template % self._arranged(amounts + owner)
        return text


def _keep(kept: dict[Hashable, _T], key: Hashable, value: _T) -> _T:
    if len(kept) >= MAX_KEPT:
        kept.clear()
    kept[key] = value
    return value


@dataclass(frozen=True, slots=True)
class Seller:
    """Who bills, and in what currency (ISO 4217)."""

    issuer: str
    currency: str


class Line(NamedTuple):
    """One meter of an HourSum: `quantity` in units of 10^-places."""

    meter: str
    unit: str
    places: int
    quantity: int
    billed_nanos: int
    listed_nanos: int
    agreed_nanos: int


def columns() -> list[str]:
    """What is written, in order."""
    table = json.loads(COLUMNS_PATH.read_text(encoding="utf-8"))
    return [row["column"] for row in table if not row["left_out"]] + ["x_Model"]


def header() -> bytes:
    """The first line."""
    return (",".join(columns()) + "\n").encode()


class FocusWriter:
    """Rows as CSV. `changes` are the instants that segments of HourSums are counted by, `before_at`
    one before the first of them from which on nothing else changed."""

    def __init__(
        self, book: PriceBook, before_at: float, changes: Sequence[float], seller: Seller
    ) -> None:
        self._book = book
        self._instants = (before_at, *changes)
        self._seller = seller
        self._columns = columns()
        self._maker = LineMaker(self._columns)
        self._found: dict[tuple[str, str, bool, int], tuple[_Meter, ...]] = {}

    def usage(self, rows: Iterable[HourSum]) -> bytes:
        """Lines of hours' sums."""
        return "".join([text for row in rows for text in self._usage_lines(row)]).encode()

    def corrections(self, rows: Iterable[Corrected]) -> bytes:
        """Lines of corrections."""
        return self._lines(self._correction_row(row) for row in rows)

    def merged(self, rows: Iterable[HourSum]) -> Iterator[HourSum]:
        """Neighbours that differ in nothing but somebody else's change of prices as one."""
        last: HourSum | None = None
        for row in rows:
            if last is not None and _key(last) == _key(row) and self._alike(last, row):
                last = _added(last, row)
                continue
            if last is not None:
                yield last
            last = row
        if last is not None:
            yield last

    def lines(self, row: HourSum) -> Iterator[Line]:
        """The meters that were used."""
        amounts: Any = row  # by place: all of a meter's are whole numbers
        for name, unit, places, of, paid, counts, listed, agreed in self._meters(row):
            quantity, billed = amounts[of], amounts[paid]
            if billed or (quantity and counts):
                yield Line(name, unit, places, quantity, billed, listed, agreed)

    def _rates(self, row: HourSum) -> Rates:
        return self._book.rates(row.tenant_id, row.model, self._instants[row.segment])

    def _meters(self, row: HourSum) -> "tuple[_Meter, ...]":
        key = (row.tenant_id, row.model, row.is_encoder, row.segment)
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= MAX_RATES:
                self._found.clear()
            found = tuple(_meters(row.is_encoder, self._rates(row)))
            self._found[key] = found
        return found

    def _alike(self, one: HourSum, other: HourSum) -> bool:
        before, after = self._rates(one), self._rates(other)
        prices = (before.listed, before.agreed, before.share)
        return prices == (after.listed, after.agreed, after.share)

    def _usage_lines(self, row: HourSum) -> Iterator[str]:
        maker, cells = self._maker, self._usage_row
        owner = None
        for line in self.lines(row):
            prices = (line.meter, line.listed_nanos, line.agreed_nanos)
            kind = (row.began_at, row.model, row.is_encoder, *prices)
            template = maker.template(kind, partial(cells, row, line))
            owner = owner or maker.owner(row[1:3] + row[6:8], partial(cells, row, line))
            quantity, places = line.quantity, line.places
            listed = _cost(quantity * line.listed_nanos, places)
            is_same = line.agreed_nanos == line.listed_nanos
            agreed = listed if is_same else _cost(quantity * line.agreed_nanos, places)
            billed = decimal_text(line.billed_nanos, NANOS_PLACES)
            amounts = (billed, short_decimal(quantity, places), listed, agreed)
            yield maker.line(template, owner, amounts)

    def _lines(self, rows: Iterator[dict[str, str]]) -> bytes:
        buffer = io.StringIO(newline="")
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerows([row.get(name, "") for name in self._columns] for row in rows)
        return buffer.getvalue().encode()

    def _usage_row(self, row: HourSum, line: Line) -> dict[str, str]:
        quantity = short_decimal(line.quantity, line.places)
        billed = decimal_text(line.billed_nanos, NANOS_PLACES)
        sku = f"{row.model}/{line.meter.lower().replace(' ', '-')}"
        details = {"x_Model": row.model, "x_Meter": line.meter}
        return {
            **self._account(row.tenant_id, row.tenant_name, row.key_id, row.key_name, row.model),
            **_period(row.began_at),
            "BilledCost": billed,
            "EffectiveCost": billed,
            "ChargeCategory": "Usage",
            "ChargeDescription": f"{row.model}: {line.meter.lower()}",
            "ChargeFrequency": "Usage-Based",
            "ConsumedQuantity": quantity,
            "ConsumedUnit": line.unit,
            "PricingCategory": "Standard",
            "PricingQuantity": quantity,
            "PricingUnit": line.unit,
            "ListUnitPrice": short_decimal(line.listed_nanos, NANOS_PLACES + SHARE_PLACES),
            "ListCost": _cost(line.quantity * line.listed_nanos, line.places),
            "ContractedUnitPrice": short_decimal(line.agreed_nanos, NANOS_PLACES + SHARE_PLACES),
            "ContractedCost": _cost(line.quantity * line.agreed_nanos, line.places),
            "ServiceSubcategory": "Machine Learning" if row.is_encoder else "Generative AI",
            "SkuId": sku,
            "SkuMeter": line.meter,
            "SkuPriceId": sku,
            "SkuPriceDetails": json.dumps(details, separators=(",", ":")),
        }

    def _correction_row(self, row: Corrected) -> dict[str, str]:
        amount = decimal_text(row.cost_nanos, NANOS_PLACES)
        hour = int(row.posted_at // HOUR_S) * HOUR_S
        period = _period(hour)
        earlier = _month(row.corrected_at)[0] < period["BillingPeriodStart"]
        return {
            **self._account(row.tenant_id, row.tenant_name, row.key_id, row.key_name, row.model),
            **period,
            **dict.fromkeys(("BilledCost", "EffectiveCost", "ListCost", "ContractedCost"), amount),
            "ChargeCategory": "Adjustment",
            "ChargeClass": "Correction" if earlier else "",
            "ChargeDescription": f"Correction of {row.corrects}",
            "ChargeFrequency": "One-Time",
            "ServiceSubcategory": "Generative AI",
        }

    def _account(
        self, tenant_id: str, tenant_name: str, key_id: str, key_name: str, model: str
    ) -> dict[str, str]:
        issuer = harmless(self._seller.issuer)
        return {
            "BillingAccountId": tenant_id,
            "BillingAccountName": harmless(tenant_name),
            "BillingCurrency": self._seller.currency,
            "InvoiceIssuerName": issuer,
            "ProviderName": issuer,
            "PublisherName": issuer,
            "ServiceCategory": "AI and Machine Learning",
            "ServiceName": SERVICE_NAME,
            "SubAccountId": key_id,
            "SubAccountName": harmless(key_name),
            "SubAccountType": "API Key" if key_id else "",
            "x_Model": model,
        }


def _key(row: HourSum) -> tuple[object, ...]:
    return row[:5]


def _added(one: HourSum, other: HourSum) -> HourSum:
    return one._replace(
        **{name: getattr(one, name) + getattr(other, name) for name in HOUR_AMOUNTS}
    )


class _Meter(NamedTuple):
    """One of a model's meters at some prices. `quantity_at` and `billed_at` are places in an
    HourSum; without `counts` it is no line where nothing is billed."""

    name: str
    unit: str
    places: int
    quantity_at: int
    billed_at: int
    counts: bool
    listed_nanos: int
    agreed_nanos: int


def _meters(is_encoder: bool, rates: Rates) -> Iterator[_Meter]:
    fresh = "embedding_nanos" if is_encoder else "prompt_nanos"
    meters = (
        ("Input Tokens", fresh, "input_tokens", "input_nanos"),
        ("Cached Input Tokens", "cached_nanos", "cached_tokens", "cached_nanos"),
        ("Output Tokens", "completion_nanos", "output_tokens", "output_nanos"),
        ("Service Seconds", "service_second_nanos", "service_us", "service_nanos"),
        ("Loading Seconds", "load_second_nanos", "load_us", "load_nanos"),
    )
    for name, price, quantity, billed in meters:
        of_list, of_plan = getattr(rates.listed, price), getattr(rates.agreed, price)
        is_time = name.endswith("Seconds")
        yield _Meter(
            name,
            "Seconds" if is_time else "Tokens",
            MICROS_PLACES if is_time else 0,
            HourSum._fields.index(quantity),
            HourSum._fields.index(billed),
            # Every request takes seconds; they are a meter only where they have a price.
            not is_time or bool(of_list or of_plan),
            of_list * WHOLE,
            of_plan * rates.share,
        )


def _cost(exact: int, places: int) -> str:
    return short_decimal(exact, NANOS_PLACES + SHARE_PLACES + places)


def _period(hour: int) -> dict[str, str]:
    began, ended = _month(hour)
    return {
        "BillingPeriodStart": began,
        "BillingPeriodEnd": ended,
        "ChargePeriodStart": _instant(hour),
        "ChargePeriodEnd": _instant(hour + HOUR_S),
    }


@lru_cache(maxsize=4096)
def _month(at: float) -> tuple[str, str]:
    """Start and end of the calendar month."""
    day = datetime.fromtimestamp(at, UTC)
    later = (day.year + day.month // 12, day.month % 12 + 1)
    return f"{day.year:04}-{day.month:02}-01T00:00:00Z", "{:04}-{:02}-01T00:00:00Z".format(*later)


@lru_cache(maxsize=4096)
def _instant(at: int) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
