"""A bill recomputed from raw postings and price tables, by other code than the product's.

    python -m bench.billing_check DATABASE_URL --tenant NAME --month 2026-10 [--bill FILE]

Shares nothing with the product: its own SQL (sqlite3 or psycopg), its own reading of the rules in
docs/billing.md, Fractions for arithmetic. Every posting of the tenant's month is priced anew from
its tokens, seconds and the prices of its arrival, and compared with what was posted; then all are
added up and compared with FILE (`polyhost invoices preview --json`, or `export --format json` of an
issued one). Exit status 1 where anything differs by a unit.
"""

import argparse
import importlib
import json
import math
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

POSTING = (
    "request_id, model, kind, outcome, prompt_tokens, cached_tokens, completion_tokens, service_s, "
    "load_s, arrived_at, posted_at, cost_nanos, input_nanos, cached_nanos, output_nanos, "
    "service_nanos, load_nanos, list_nanos"
)
PRICE = (
    "prompt_nanos, cached_nanos, completion_nanos, embedding_nanos, service_second_nanos, "
    "load_second_nanos"
)
ENCODERS = {"embedding", "classify", "rerank", "score"}
MOST_S = 600
SHOWN = 10
Rows = Sequence[tuple[Any, ...]]


class Database:
    """Rows of a query, on either database."""

    def __init__(self, url: str) -> None:
        if url.startswith("sqlite:///"):
            self._connection: Any = sqlite3.connect(url.removeprefix("sqlite:///"))
            self._mark = "?"
        else:
            plain = url.replace("postgresql+psycopg://", "postgresql://")
            self._connection = importlib.import_module("psycopg").connect(plain)
            self._mark = "%s"

    def rows(self, query: str, *values: object) -> Rows:
        """All of them; `?` in the query are the values."""
        cursor = self._connection.cursor()
        cursor.execute(query.replace("?", self._mark), values)
        found: Rows = cursor.fetchall()
        return found

    def close(self) -> None:
        """No more."""
        self._connection.close()


class Prices:
    """Who pays what and when, straight from the tables."""

    def __init__(self, database: Database, tenant_id: str) -> None:
        self._listed = database.rows(f"SELECT model, valid_from, {PRICE} FROM prices")
        self._discounts = database.rows("SELECT plan, valid_from, discount_bp FROM plan_discounts")
        self._own = database.rows(
            f"SELECT plan, model, valid_from, ended, {PRICE} FROM plan_prices"
        )
        self._terms = database.rows(
            "SELECT valid_from, plan, discount_bp FROM tenant_terms WHERE tenant_id = ?", tenant_id
        )

    def at(self, model: str, instant: float) -> tuple[Sequence[int], Sequence[int], Fraction]:
        """List prices, agreed prices, and what discounts leave of the latter."""
        listed = _last(((row[1], row[2:]) for row in self._listed if row[0] == model), instant)
        listed = listed or (0,) * 6
        terms = _last(((row[0], row[1:]) for row in self._terms), instant) or ("", 0)
        own = _last(
            (
                (row[2], None if row[3] else row[4:])
                for row in self._own
                if row[0] == terms[0] and row[1] == model
            ),
            instant,
        )
        left = 1 - Fraction(terms[1], 10_000)
        if own is None:
            plan = ((row[1], row[2]) for row in self._discounts if row[0] == terms[0])
            left *= 1 - Fraction(_last(plan, instant) or 0, 10_000)
        return listed, own or listed, left


def _last(dated: Iterator[tuple[float, Any]], instant: float) -> Any:
    past = [(at, what) for at, what in dated if at <= instant]
    return max(past, key=lambda one: one[0])[1] if past else None


def exact_cost(row: tuple[Any, ...], prices: Sequence[int]) -> Fraction:
    """What the posting is worth at these prices, not rounded."""
    _, _, kind, outcome, prompt, cached, made, service_s, load_s, *_ = row
    per_prompt, per_cached, per_made, per_embedded, per_second, per_load_second = prices
    if outcome == "failed":
        return Fraction(0)
    if outcome == "cache_hit":
        return Fraction((prompt + made) * per_cached)
    fresh = per_embedded if kind in ENCODERS else per_prompt
    tokens = Fraction((prompt - cached) * fresh + cached * per_cached + made * per_made)
    return tokens + _seconds(service_s) * per_second + _seconds(load_s) * per_load_second


def _seconds(seconds: float) -> Fraction:
    """Whole microseconds, and ten minutes at most."""
    return min(Fraction(max(0, math.floor(seconds * 1e6)), 10**6), Fraction(MOST_S))


def check(database: Database, tenant: str, month: str, bill: dict[str, Any] | None) -> list[str]:
    """What is wrong."""
    began, ended = _month(month)
    ((tenant_id,),) = database.rows("SELECT id FROM tenants WHERE name = ?", tenant)
    prices = Prices(database, tenant_id)
    through = bill["through_seq"] if bill else 2**62
    rows = database.rows(
        f"SELECT {POSTING} FROM postings WHERE tenant_id = ? AND posted_at >= ? AND posted_at < ? "
        "AND seq <= ?",
        *(tenant_id, began, ended, through),
    )
    wrong: list[str] = []
    total, by_outcome = 0, Counter[str]()
    for row in rows:
        by_outcome[row[3]] += 1
        total += row[11]
        parts = sum(row[12:17])
        if row[3] == "correction":
            continue
        listed, agreed, left = prices.at(row[1], row[9] or row[10])
        wanted = math.floor(exact_cost(row, agreed) * left)
        if row[11] != wanted or (row[9] and parts != wanted):
            wrong.append(f"{row[0]}: posted {row[11]} (parts {parts}), should be {wanted}")
        if row[9] and row[17] != math.floor(exact_cost(row, listed)):
            wrong.append(f"{row[0]}: list price posted {row[17]}")
    print(f"{tenant}, {month}: {len(rows)} postings {dict(by_outcome)}, {total} nano-units")
    if bill is not None:
        lines = [line for line in bill["lines"] if line["note"] != "earlier months"]
        billed = sum(line["amount_nanos"] for line in lines)
        if billed != total:
            wrong.append(f"the bill says {billed}, the postings come to {total}")
        if sum(line["amount_nanos"] for line in bill["lines"]) != bill["net_nanos"]:
            wrong.append("the bill's lines do not come to its net amount")
        wrong += _wrong_total(bill)
    return wrong


def _wrong_total(bill: dict[str, Any]) -> Iterator[str]:
    coin = Fraction(1, 10 ** bill["decimals"])
    net = Fraction(bill["net_nanos"], 10**9) // coin * coin
    tax = abs(net) * Fraction(bill["tax_bp"], 10_000) / coin
    tax = math.floor(tax + Fraction(1, 2)) * coin * (1 if net >= 0 else -1)
    if Fraction(bill["total_nanos"], 10**9) != net + tax:
        yield f"the bill's total is {bill['total_nanos']}, should be {(net + tax) * 10**9}"


def _month(text: str) -> tuple[float, float]:
    year, month = map(int, text.split("-"))
    after = (year + month // 12, month % 12 + 1)
    ends = ((year, month), after)
    began, ended = (datetime(*end, 1, tzinfo=UTC).timestamp() for end in ends)
    return began, ended


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--tenant", required=True)
    parser.add_argument("--month", required=True)
    parser.add_argument("--bill", type=Path)
    options = parser.parse_args(argv)
    bill = json.loads(options.bill.read_text("utf-8")) if options.bill else None
    with closing(Database(options.url)) as database:
        wrong = check(database, options.tenant, options.month, bill)
    for line in wrong[:SHOWN]:
        print(line)
    print("agrees to the unit" if not wrong else f"{len(wrong)} differences")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
