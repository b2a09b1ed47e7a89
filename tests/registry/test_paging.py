"""Pages by key: each row once, in both directions, while rows with equal keys lie at the seams."""

from typing import Any

import pytest
from sqlalchemy import Engine, select

from registry.lists import models as model_list
from registry.lists.models import ModelFilter
from registry.models import catalog
from registry.models.catalog import Model, PackFacts
from registry.money import prices
from registry.money.prices import PriceRecord
from registry.paging import Cut, listed, listed_rows
from registry.session import reading, writing

NOW = 1_700_000_000.0
SIZES = {"a": 5, "b": 5, "c": 1, "d": 9, "e": 5, "f": 1, "g": 7}


@pytest.fixture
def filled(engine: Engine) -> Engine:
    with writing(engine, "test") as session:
        for name, size in SIZES.items():
            row = catalog.add_model(session, name, "/x", now_at=NOW, pinned=name == "a")
            facts = PackFacts(f"r-{name}", name, "llama", "bfloat16", size, 128, 100)
            catalog.finish(session, row.registration, facts, now_at=NOW)
    return engine


def in_memory(cut: Cut) -> tuple[list[str], Any, Any]:
    """The page of the same rows without a database."""
    page = listed_rows(reversed(SIZES), lambda name: SIZES[name], str, cut)
    return page.rows, page.previous, page.next


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 50])
def test_forth_and_back_every_row_comes_once(filled: Engine, descending: bool, limit: int) -> None:
    wanted = sorted(SIZES, key=lambda name: (SIZES[name], name), reverse=descending)
    query, sort = select(Model.name), Model.weight_bytes.expression
    with reading(filled) as session:
        cut, seen, pages = Cut(limit, descending), list[str](), list[list[str]]()
        while True:
            page = listed(session, query, sort, Model.name.expression, cut)
            assert in_memory(cut) == ([row.name for row in page.rows], page.previous, page.next)
            pages.append([row.name for row in page.rows])
            seen += pages[-1]
            if page.next is None:
                break
            cut = Cut(limit, descending, after=page.next)
        assert seen == wanted
        for earlier in reversed(pages[:-1]):
            assert page.previous is not None
            cut = Cut(limit, descending, before=page.previous)
            page = listed(session, query, sort, Model.name.expression, cut)
            assert [row.name for row in page.rows] == earlier
            assert in_memory(cut) == (earlier, page.previous, page.next)
        assert page.previous is None


def test_models_are_filtered_and_sorted(filled: Engine) -> None:
    def names(wanted: ModelFilter, sort: str = "name", descending: bool = False) -> list[str]:
        with reading(filled) as session:
            cut = Cut(50, descending)
            page = model_list.page(session, wanted, sort, cut, since_at=NOW, now_at=NOW)
        return [line.name for line in page.rows]

    assert names(ModelFilter()) == list(SIZES)
    assert names(ModelFilter(text="LLA", names=["a", "g"])) == ["a", "g"]
    assert names(ModelFilter(not_names=["a", "b", "c", "d"])) == ["e", "f", "g"]
    assert names(ModelFilter(pinned=True)) == ["a"]
    assert names(ModelFilter(text="%")) == []
    assert names(ModelFilter(state="failed")) == []
    assert names(ModelFilter(names=[])) == []
    with writing(filled, "test") as session:
        for name, nanos in (("b", 3), ("d", 2), ("e", 9)):
            prices.set_price(session, PriceRecord(name, NOW, nanos), now_at=NOW)
    assert names(ModelFilter(), "price", True)[:3] == ["e", "b", "d"]
    with reading(filled) as session:
        loads = {"c": 2.0, "g": 0.5, "gone": 9.0}
        page = model_list.page(
            *(session, ModelFilter(), "load", Cut(3, descending=True)),
            since_at=NOW, now_at=NOW, load_s=loads,
        )  # fmt: skip
        assert [line.name for line in page.rows] == ["c", "g", "f"]
        assert page.next is not None
    for sort in model_list.SORTS:
        assert sorted(names(ModelFilter(), sort, True)) == list(SIZES)


@pytest.mark.parametrize("key", [(1, 2), ("x", "a"), (1, 3.5)])
def test_a_key_of_another_kind_is_as_if_not_said(filled: Engine, key: Any) -> None:
    query, sort = select(Model.name), Model.weight_bytes.expression
    with reading(filled) as session:
        for cut in (Cut(after=key), Cut(before=key)):
            if key != (1, 3.5):  # of which memory can tell what lies beyond
                assert in_memory(cut) == (sorted(SIZES, key=lambda n: (SIZES[n], n)), None, None)
            page = listed(session, query, sort, Model.name.expression, cut)
            assert len(page.rows) == len(SIZES)
            assert page.previous is page.next is None
