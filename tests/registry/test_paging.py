"""Pages by key: each row once, in both directions, while rows with equal keys lie at the seams."""

from typing import Any

import pytest
from sqlalchemy import Engine, select

from registry.lists import models as model_list
from registry.lists.models import ModelFilter
from registry.models import catalog
from registry.models.catalog import Model, PackFacts
from registry.paging import Cut, listed
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


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 50])
def test_forth_and_back_every_row_comes_once(filled: Engine, descending: bool, limit: int) -> None:
    wanted = sorted(SIZES, key=lambda name: (SIZES[name], name), reverse=descending)
    query, sort = select(Model.name), Model.weight_bytes.expression
    with reading(filled) as session:
        cut, seen, pages = Cut(limit, descending), list[str](), list[list[str]]()
        while True:
            page = listed(session, query, sort, Model.name.expression, cut)
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
    for sort in model_list.SORTS:
        assert sorted(names(ModelFilter(), sort, True)) == list(SIZES)


@pytest.mark.parametrize("key", [(1, 2), ("x", "a"), (1, 3.5)])
def test_a_key_of_another_kind_is_as_if_not_said(filled: Engine, key: Any) -> None:
    query, sort = select(Model.name), Model.weight_bytes.expression
    with reading(filled) as session:
        for cut in (Cut(after=key), Cut(before=key)):
            page = listed(session, query, sort, Model.name.expression, cut)
            assert len(page.rows) == len(SIZES)
            assert page.previous is page.next is None
