"""Lists in pages that stay right while rows come and go: by a key, never by an offset.

A page is asked for by what its neighbour ended with: `after` or `before`, each the sort column's
value and the tie-breaker's. Both columns must not be null; the database needs an order on the pair
to be quick.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from sqlalchemy import Select, literal, or_
from sqlalchemy.orm import Session

MAX_LIMIT = 200
MAX_NUMBER = 2**63 - 1
Key: TypeAlias = tuple[str | int | float, str | int]
"""What the page before ended with: the sort column's value, the tie-breaker's."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cut:
    """Which page of a list."""

    limit: int = 50
    descending: bool = False
    after: Key | None = None
    before: Key | None = None


@dataclass(frozen=True, slots=True)
class Listed(Generic[T]):
    """One page, with the keys of its neighbours; None: there is none."""

    rows: list[T] = field(default_factory=list)
    previous: Key | None = None
    next: Key | None = None


def listed(
    session: Session,
    query: Select[*tuple[Any, ...]],
    sort: Any,
    tie: Any,
    cut: Cut,
) -> Listed[Any]:
    """A page of the query's rows (as tuples), in the order of `sort`, then `tie`: columns."""
    limit = max(1, min(cut.limit, MAX_LIMIT))
    backwards = cut.before is not None
    down = cut.descending != backwards
    key = cut.before if backwards else cut.after
    if key is not None and not (_fits(key[0], sort) and _fits(key[1], tie)):
        key, backwards, down = None, False, cut.descending
    query = query.add_columns(sort.label("sort_key"), tie.label("tie_key"))
    if key is not None:
        value, at = literal(key[0], sort.type), literal(key[1], tie.type)
        beyond = sort < value if down else sort > value
        same = tie < at if down else tie > at
        query = query.where(or_(beyond, (sort == value) & same))
    order = (sort.desc(), tie.desc()) if down else (sort.asc(), tie.asc())
    found: Sequence[Any] = session.execute(query.order_by(*order).limit(limit + 1)).all()
    more, found = len(found) > limit, list(found[:limit])
    if backwards:
        found.reverse()
    if not found:
        return Listed()
    first, last = ((row.sort_key, row.tie_key) for row in (found[0], found[-1]))
    has_previous = more if backwards else key is not None
    has_next = True if backwards else more
    return Listed(found, first if has_previous else None, last if has_next else None)


def listed_rows(
    rows: Iterable[T],
    sort: Callable[[T], str | int | float],
    tie: Callable[[T], str | int],
    cut: Cut,
) -> Listed[T]:
    """As `listed`, of rows in memory. `sort` and `tie` each give values of one kind."""
    backwards = cut.before is not None
    down = cut.descending != backwards
    every = [((sort(row), tie(row)), row) for row in rows]
    key = cut.before if backwards else cut.after
    if key is not None and every and not _alike(key, every[0][0]):
        key, backwards, down = None, False, cut.descending
    if key is not None:
        every = [each for each in every if (each[0] < key if down else each[0] > key)]
    every.sort(key=lambda each: each[0], reverse=down)
    limit = max(1, min(cut.limit, MAX_LIMIT))
    more, found = len(every) > limit, every[:limit]
    if backwards:
        found.reverse()
    if not found:
        return Listed()
    has_previous = more if backwards else key is not None
    has_next = True if backwards else more
    return Listed(
        [row for _, row in found],
        found[0][0] if has_previous else None,
        found[-1][0] if has_next else None,
    )


def _alike(key: Key, other: Key) -> bool:
    """Whether they can be compared."""
    return all(
        isinstance(mine, str) == isinstance(its, str) for mine, its in zip(key, other, strict=True)
    )


def _fits(value: str | int | float, column: Any) -> bool:
    """A key comes from an address, where anybody may have written anything."""
    is_text: bool = column.type.python_type is str
    if isinstance(value, str):
        return is_text and value.isprintable()  # no NUL, no half of a surrogate pair
    return not is_text and abs(value) <= MAX_NUMBER
