"""Lines of FOCUS fast: what many of them have in common is spelled once.

Of the columns of a line of usage six are amounts and five say whose it is; the others are the same
for all keys of an hour, model, meter and price. Two or three million lines are an ordinary month,
so those are made into a template, and a line is the template with its amounts. What stands in a
cell is focus.py's to say: this file gets whole rows of cells, and gives what the csv module would.
"""

import csv
import io
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import itemgetter
from typing import TypeVar

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
