"""Hosted names over instances: models of one pack are one, and are told of one by one."""

import pytest

from engine.errors import RequestRefused
from engine.models.catalog import Catalog
from engine.protocol import ModelSpec, ModelStatus, SwapRecord


def gone(instance_id: str) -> bool:
    return False


def stays(instance_id: str) -> bool:
    return True


def row(instance_id: str, state: str = "resident", reason: str = "") -> ModelStatus:
    return ModelStatus(instance_id, state, 100, 10, 9, 9, 0.5, reason)  # type: ignore[arg-type]


def test_models_of_one_pack_are_one_instance() -> None:
    catalog = Catalog()
    instances = catalog.update(
        [
            ModelSpec("a", "/packs/x", pinned=False, weight=1.0),
            ModelSpec("b", "/packs/x/", pinned=True, weight=3.0),
            ModelSpec("c", "/packs/y"),
        ],
        gone,
    )
    assert instances == [
        ModelSpec("x", "/packs/x", pinned=True, weight=3.0),
        ModelSpec("y", "/packs/y"),
    ]
    assert catalog.instance_of("a") == catalog.instance_of("b") == "x"
    assert catalog.names("x") == ("a", "b")
    with pytest.raises(RequestRefused):
        catalog.instance_of("d")
    catalog.check_integrity()


def test_folders_of_one_name_are_different_models_and_keep_their_ids() -> None:
    catalog = Catalog()
    catalog.update([ModelSpec("a", "/one/x"), ModelSpec("b", "/two/x")], gone)
    first, second = catalog.instance_of("a"), catalog.instance_of("b")
    assert first != second
    catalog.update([ModelSpec("b", "/two/x"), ModelSpec("c", "/three/x")], stays)
    assert catalog.instance_of("b") == second
    assert catalog.instance_of("c") not in (first, second)  # the first one's pages are not back yet
    catalog.update([ModelSpec("b", "/two/x")], gone)
    catalog.update([ModelSpec("b", "/two/x"), ModelSpec("d", "/four/x")], gone)
    assert catalog.instance_of("d") == first
    catalog.check_integrity()


def test_a_name_that_gets_another_pack_leaves_the_others_where_they_are() -> None:
    catalog = Catalog()
    catalog.update([ModelSpec("a", "/p/x"), ModelSpec("b", "/p/x")], gone)
    catalog.update([ModelSpec("a", "/p/y"), ModelSpec("b", "/p/x")], stays)
    assert (catalog.instance_of("a"), catalog.instance_of("b")) == ("y", "x")
    assert catalog.names("x") == ("b",)
    assert [r.model_id for r in catalog.status_rows([row("x"), row("y")], {})] == ["b", "a"]


def test_rows_of_all_names_and_of_those_on_their_way_out() -> None:
    catalog = Catalog()
    catalog.update([ModelSpec("a", "/p/x"), ModelSpec("b", "/p/x")], gone)
    rows = catalog.status_rows([row("x")], {"a": (1, 2, 1)})
    told = [(r.model_id, r.num_running, r.num_waiting, r.num_batch) for r in rows]
    assert told == [("a", 1, 2, 1), ("b", 0, 0, 0)]
    catalog.update([ModelSpec("b", "/p/y")], stays)
    rows = catalog.status_rows([row("x", "draining"), row("y", "cold")], {})
    assert [(r.model_id, r.state) for r in rows] == [("a", "draining"), ("b", "cold")]


def test_what_belongs_to_a_model_stands_under_its_first_name() -> None:
    catalog = Catalog()
    catalog.update([ModelSpec("a", "/p/x"), ModelSpec("b", "/p/x"), ModelSpec("c", "/p/y")], gone)
    told = catalog.pages({("x", "weights"): 5, ("x", "kv"): 2, ("y", "kv"): 1})
    assert told == {"a/weights": 5, "a/kv": 2, "c/kv": 1}
    swap = catalog.swap(SwapRecord("x", "evict", "none", 1, 2.0, "room for y"))
    assert (swap.model_id, swap.reason) == ("a", "room for c")
    failed = catalog.status_rows([row("y", "failed", "its pack is damaged: register it")], {})
    assert failed[0].reason == "its pack is damaged: register it"


def test_an_unload_leaves_what_another_name_needs() -> None:
    catalog = Catalog()
    models = [ModelSpec("a", "/p/x"), ModelSpec("b", "/p/x"), ModelSpec("c", "/p/x", pinned=True)]
    catalog.update(models[:2], gone)
    assert catalog.may_unload("a", lambda name: False)
    assert catalog.may_unload("a", lambda name: name == "a")
    assert not catalog.may_unload("a", lambda name: name == "b")
    catalog.update(models, stays)
    assert not catalog.may_unload("a", lambda name: False)
    assert catalog.may_unload("c", lambda name: False)  # its own pin is its own business


def test_what_is_told_late_of_a_model_that_is_gone_still_has_a_name() -> None:
    """Swaps and rows may be told after one more catalog, or two, without the model."""
    catalog = Catalog()
    catalog.update([ModelSpec("a", "/p/x"), ModelSpec("b", "/p/y")], gone)
    evicted = SwapRecord("x", "evict", "none", 1, 2.0, "room for y")
    catalog.update([ModelSpec("b", "/p/y")], stays)
    assert catalog.swap(evicted).model_id == "a"
    assert [r.model_id for r in catalog.status_rows([row("x"), row("y")], {})] == ["a", "b"]
    catalog.update([], gone)
    assert catalog.swap(evicted).model_id == "x"
    assert catalog.swap(evicted).reason == "room for y"
    assert catalog.pages({("x", "weights"): 1}) == {"x/weights": 1}
    catalog.check_integrity()
