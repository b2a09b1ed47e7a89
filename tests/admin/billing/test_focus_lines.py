"""Lines from templates against the csv module's, cell for cell."""

import csv
import io
import random

import pytest

from admin.billing import focus
from admin.billing.focus import FocusWriter, Seller, columns
from gateway.pricing.policy.pricing import Plan, PriceBook, Prices, Terms
from registry.money.exports import HourSum

BOOK = PriceBook(
    {
        "m": [(0.0, Prices(150, 15, 600))],
        'odd "100 %s" model, ü': [(0.0, Prices(1, 0, 10**9, 7, 3, 5))],
    },
    {"partner": Plan([(0.0, 1250)])},
    {"t2": [(0.0, Terms("partner", 333))]},
)
NAMES = ("plain", "with, comma", 'with "quotes"', "=1+1", "100 %d", "line\nend", "", "häuser")


def sums(seed: int, count: int = 300) -> list[HourSum]:
    draw = random.Random(seed)

    def amount() -> int:
        return draw.choice((0, draw.randrange(10), draw.randrange(10**12)))

    return [
        HourSum._make(
            (
                draw.randrange(3) * 3600,
                draw.choice(("t1", "t2")),
                draw.choice(("k1", "k2", "")),
                draw.choice(("m", 'odd "100 %s" model, ü', "gone")),
                draw.random() < 0.3,
                0,
                draw.choice(NAMES),
                draw.choice(NAMES),
                *(amount() for _ in range(11)),
                draw.randrange(1, 9),
            )
        )
        for _ in range(count)
    ]


def writer() -> FocusWriter:
    return FocusWriter(BOOK, -1.0, [], Seller("=Häuser, Hosting", "EUR"))


def spelled_out(made: FocusWriter, rows: list[HourSum]) -> bytes:
    """Every cell of every line by itself."""
    buffer = io.StringIO(newline="")
    out = csv.writer(buffer, lineterminator="\n")
    for row in rows:
        for line in made.lines(row):
            cells = made._usage_row(row, line)
            out.writerow([cells.get(name, "") for name in columns()])
    return buffer.getvalue().encode()


@pytest.mark.parametrize("seed", range(5))
def test_they_are_what_the_csv_module_writes(seed: int) -> None:
    rows = sums(seed)
    found = writer().usage(rows)
    assert found == spelled_out(writer(), rows)
    assert found.count(b"\n") > 300


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(focus, "MAX_KEPT", 4)
    made, rows = writer(), sums(9)
    assert made.usage(rows) == spelled_out(writer(), rows)
    assert len(made._maker._templates) <= 4
    assert len(made._maker._owners) <= 4
