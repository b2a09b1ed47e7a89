"""Floors of tenants' models in the registry."""

import pytest
from sqlalchemy import Engine

from registry import audit
from registry.accounts import tenants
from registry.errors import InvalidValue, NotFound
from registry.models import catalog, floors
from registry.models.catalog import PackFacts
from registry.session import reading, writing

NOW = 1000.0


@pytest.fixture
def hosted(engine: Engine) -> tuple[str, str]:
    """The tenants' ids; the ready models a and b."""
    with writing(engine, "test") as session:
        ids = [tenants.create_tenant(session, name, now_at=NOW).id for name in ("acme", "other")]
        for name in "ab":
            model = catalog.add_model(session, name, "folder", now_at=NOW)
            facts = PackFacts(f"rev-{name}", f"rev-{name}", "llama", "float32", 1, 2, 3)
            catalog.finish(session, model.registration, facts, now_at=NOW)
    return ids[0], ids[1]


def test_a_floor_is_set_replaced_and_taken_away(engine: Engine, hosted: tuple[str, str]) -> None:
    acme, other = hosted
    with writing(engine, "test") as session:
        floors.set_floor(session, "acme", 100, ["b", "a", "b"], now_at=NOW)
        floors.set_floor(session, other, 30, ["b"], now_at=NOW)
    both = {"a": ((acme, 100),), "b": tuple(sorted([(acme, 100), (other, 30)]))}
    with reading(engine) as session:
        assert floors.by_model(session) == both
        assert [floor.models for floor in floors.list_floors(session) if floor.tenant_id == acme]
    with writing(engine, "test") as session:
        floors.set_floor(session, "acme", 50, ["a"], now_at=NOW)
        assert floors.by_model(session) == {"a": ((acme, 50),), "b": ((other, 30),)}
        floors.set_floor(session, "acme", 0, [], now_at=NOW)
        floors.set_floor(session, "acme", 0, [], now_at=NOW)
        assert floors.by_model(session) == {"b": ((other, 30),)}
        told = [entry for entry in audit.latest(session) if entry.action == "tenant.floor"]
    assert [(entry.before, entry.after) for entry in reversed(told) if entry.target == acme] == [
        (None, {"size_bytes": 100, "models": ["a", "b"]}),
        ({"size_bytes": 100, "models": ["a", "b"]}, {"size_bytes": 50, "models": ["a"]}),
        ({"size_bytes": 50, "models": ["a"]}, None),
        (None, None),
    ]


def test_who_is_shut_out_keeps_nothing_meanwhile(engine: Engine, hosted: tuple[str, str]) -> None:
    acme, _ = hosted
    with writing(engine, "test") as session:
        floors.set_floor(session, "acme", 100, ["a"], now_at=NOW)
        tenants.update_tenant(session, "acme", disabled=True, now_at=NOW)
        assert floors.by_model(session) == {}
        tenants.update_tenant(session, "acme", disabled=False, now_at=NOW)
        assert floors.by_model(session) == {"a": ((acme, 100),)}


def test_a_floor_outlives_its_model_by_name(engine: Engine, hosted: tuple[str, str]) -> None:
    with writing(engine, "test") as session:
        floors.set_floor(session, "acme", 100, ["a"], now_at=NOW)
        catalog.remove(session, "a", now_at=NOW)
        assert list(floors.by_model(session)) == ["a"], "a name that is not hosted keeps nothing"
        with pytest.raises(NotFound):
            floors.set_floor(session, "acme", 100, ["a"], now_at=NOW)
        floors.set_floor(session, "acme", 0, ["a"], now_at=NOW)


@pytest.mark.parametrize(
    ("size_bytes", "models"),
    [(-1, ["a"]), (1 << 51, ["a"]), (1, []), (1, [f"m{number}" for number in range(65)])],
)
def test_what_is_no_floor_changes_nothing(
    engine: Engine, hosted: tuple[str, str], size_bytes: int, models: list[str]
) -> None:
    del hosted
    with pytest.raises(InvalidValue), writing(engine, "test") as session:
        floors.set_floor(session, "acme", size_bytes, models, now_at=NOW)
    with pytest.raises(NotFound), writing(engine, "test") as session:
        floors.set_floor(session, "acme", 1, ["a", "nobody"], now_at=NOW)
    with pytest.raises(NotFound), writing(engine, "test") as session:
        floors.set_floor(session, "nobody", 1, ["a"], now_at=NOW)
    with reading(engine) as session:
        assert floors.list_floors(session) == []
