"""A table as its page's address has it: search, filters, sort, which page; and as SQL takes it.

    ?q=llama&state=ready&sort=-size&after=...

`TableState` is read from a query string and never fails: what means nothing is as if not said.
"""

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar
from urllib.parse import urlencode

from registry.paging import Cut, Key, Listed, listed_rows

MAX_SEARCH_LEN = 128
PAGE_ROWS = 50
_CURSORS = ("after", "before")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Column:
    """A column's head. `sort`: its name in the address; "" where it cannot be sorted by."""

    label: str
    sort: str = ""
    kind: Literal["text", "number", "action"] = "text"
    first: Literal["up", "down"] = "up"
    """Which way the first click sorts."""


@dataclass(frozen=True, slots=True)
class Filter:
    """A choice above the table: value -> what it is called; "" is all."""

    name: str
    label: str
    choices: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TableSpec:
    """What a table can be asked."""

    columns: Sequence[Column]
    default_sort: str
    """With a minus: downwards."""
    filters: Sequence[Filter] = ()
    search: str = ""
    """What the search field says; "": there is none."""


@dataclass(frozen=True, slots=True)
class TableState:
    """What it is asked now."""

    spec: TableSpec
    path: str
    query: Mapping[str, str]
    search: str
    sort: str
    descending: bool
    chosen: Mapping[str, str]
    cut: Cut
    listed: Listed[object] = field(default_factory=Listed)

    def url(self, **changes: str) -> str:
        """The same table asked otherwise, from its first page on."""
        wanted = {**{k: v for k, v in self.query.items() if k not in _CURSORS}, **changes}
        kept = {name: value for name, value in wanted.items() if value}
        return f"{self.path}?{urlencode(kept)}" if kept else self.path

    def sort_url(self, column: Column) -> str:
        """Sorted by this column; the other way where it is already."""
        down = not self.descending if self.sort == column.sort else column.first == "down"
        return self.url(sort=("-" if down else "") + column.sort)

    def aria_sort(self, column: Column) -> str:
        """For assistive technology."""
        if not column.sort or column.sort != self.sort:
            return "none"
        return "descending" if self.descending else "ascending"

    @property
    def sorts(self) -> Mapping[str, str]:
        """What a choice of the order offers: `sort` of the address -> the column's label."""
        columns = [column for column in self.spec.columns if column.sort]
        found = {("-" if c.first == "down" else "") + c.sort: c.label for c in columns}
        labels = {column.sort: column.label for column in columns}
        return {self.order: f"{labels[self.sort]}, reversed"} | found

    @property
    def order(self) -> str:
        """`sort` of the address."""
        return ("-" if self.descending else "") + self.sort

    def cut_rows(
        self,
        rows: Iterable[T],
        values: Mapping[str, Callable[[T], str | float]],
        tie: Callable[[T], str | int],
    ) -> Listed[T]:
        """The page of rows in memory. `values`: a column's `sort` -> what a row has of it."""
        return listed_rows(rows, values[self.sort], tie, self.cut)

    @property
    def others(self) -> Mapping[str, str]:
        """Of the address, what is not of the table itself and stays: whose list it is."""
        own = {"q", "sort", *_CURSORS, *(each.name for each in self.spec.filters)}
        return {name: value for name, value in self.query.items() if name not in own}

    @property
    def clear_url(self) -> str:
        """Without search and filters."""
        return self.url(q="", **{each.name: "" for each in self.spec.filters})

    @property
    def is_filtered(self) -> bool:
        """Whether rows may be missing for what was asked."""
        return bool(self.search or any(self.chosen.values()))

    def previous_url(self, page: Listed[object]) -> str:
        """ "" where there is none."""
        return "" if page.previous is None else self.url(before=_text(page.previous))

    def next_url(self, page: Listed[object]) -> str:
        """ "" where there is none."""
        return "" if page.next is None else self.url(after=_text(page.next))


def table_state(
    spec: TableSpec, path: str, query: Mapping[str, str], limit: int = PAGE_ROWS
) -> TableState:
    """Read an address."""
    known = {column.sort for column in spec.columns if column.sort}
    wanted = query.get("sort", "")
    if wanted.removeprefix("-") not in known:
        wanted = spec.default_sort
    descending = wanted.startswith("-")
    chosen = {
        each.name: query.get(each.name, "") if query.get(each.name, "") in each.choices else ""
        for each in spec.filters
    }
    after, before = (_key(query.get(name, "")) for name in _CURSORS)
    return TableState(
        spec=spec,
        path=path,
        query=query,
        search=query.get("q", "").strip()[:MAX_SEARCH_LEN] if spec.search else "",
        sort=wanted.removeprefix("-"),
        descending=descending,
        chosen=chosen,
        cut=Cut(limit, descending, None if before else after, before),
    )


def _text(key: Key) -> str:
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode().rstrip("=")


def _key(text: str) -> Key | None:
    if not text or len(text) > 1000:
        return None
    try:
        found = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, RecursionError):
        return None
    if not (isinstance(found, list) and len(found) == 2):
        return None
    if not all(isinstance(part, str | int | float) and part == part for part in found):
        return None
    return found[0], found[1]
