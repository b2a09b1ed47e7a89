"""Lines of exports: CSV as the csv module would write it, numbers that are exact."""

import csv
import io
import json
from decimal import Decimal
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from admin.billing import export_rows
from admin.billing.export_rows import COLUMNS, csv_lines, decimal_text, jsonl_lines, short_decimal
from registry.money.exports import COLUMNS as POSTING_COLUMNS
from registry.money.ledger import Posting

_TYPES = {name: field.type for name, field in Posting.__dataclass_fields__.items()}
NAMES = ("model", "tenant_name", "key_name")
# What a spreadsheet may take for a formula, in ASCII and in the wide forms.
STARTS = (*"=+-@\t\r\n", *"\uff1d\uff0b\uff0d\uff20")


def values(name: str) -> st.SearchStrategy[Any]:
    kind = _TYPES.get(name, str)
    if name == "posted_at":
        return st.floats(0, 4e9)
    if kind in (int, "int"):
        return st.integers(-(2**62), 2**62)
    if kind in (float, "float"):
        return st.floats(0, 1e9)
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=5) | st.sampled_from(
        [
            "plain",
            "=1+1",
            "-x",
            "@y",
            "+z",
            "\tw",
            'quo"te',
            "com,ma",
            "li\nne",
            "car\rriage",
            "",
            "\uff1dv",
        ]
    )


rows = st.tuples(*(values(name) for name in POSTING_COLUMNS))


@given(st.lists(rows, min_size=1, max_size=3))
def test_csv_is_what_the_csv_module_writes(batch: list[tuple[Any, ...]]) -> None:
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    for row in batch:
        cells = list(export_rows.row_values(row))
        for name in NAMES:
            index = COLUMNS.index(name)
            if str(cells[index]).startswith(STARTS):
                cells[index] = f"'{cells[index]}"
        # Floats as JSON has them: 1e-7, not 1e-07.
        writer.writerow(
            msgspec.json.encode(cell).decode() if isinstance(cell, float) else cell
            for cell in cells
        )
    assert csv_lines(batch).decode() == buffer.getvalue()


@given(st.lists(rows, min_size=1, max_size=3))
def test_json_lines_hold_the_values_themselves(batch: list[tuple[Any, ...]]) -> None:
    lines = jsonl_lines(batch).decode().split("\n")
    assert lines.pop() == ""
    assert [tuple(json.loads(line).values()) for line in lines] == [
        export_rows.row_values(row) for row in batch
    ]


@given(st.integers(-(10**30), 10**30), st.integers(0, 20))
def test_decimals_are_exact(value: int, places: int) -> None:
    for text in (decimal_text(value, places), short_decimal(value, places)):
        told = Decimal(text).as_tuple()
        assert isinstance(told.exponent, int)
        scaled = int("".join(map(str, told.digits))) * 10 ** (places + told.exponent)
        assert (-scaled if told.sign else scaled) == value
