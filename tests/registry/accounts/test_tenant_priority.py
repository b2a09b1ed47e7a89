"""Priority classes and reserved shares of tenants, and the migration that brought them."""

import pytest
from sqlalchemy import Engine, inspect, text

from registry.accounts import api_keys, tenants
from registry.errors import InvalidValue
from registry.schema import downgrade, upgrade
from registry.session import make_engine, reading, writing

NOW = 1000.0


def test_a_class_multiplies_the_weight(engine: Engine) -> None:
    with writing(engine, "test") as session:
        tenant = tenants.create_tenant(session, "a", 2.0, now_at=NOW)
        key, _ = api_keys.create_key(session, tenant.id, "k", now_at=NOW)
        assert key.tenant_weight == 2.0
        for priority, factor in tenants.PRIORITY_FACTORS.items():
            changed = tenants.update_tenant(session, "a", priority=priority, now_at=NOW)
            found = api_keys.get_key(session, key.id)
            assert (changed.priority, found.tenant_weight) == (priority, 2.0 * factor)
            # Of class batch its requests have that factor alone, never both.
            assert (found.tenant_class, found.batch_weight) == (priority, 2.0 * 0.05)
        with pytest.raises(InvalidValue, match="interactive, standard, batch"):
            tenants.update_tenant(session, "a", priority="urgent", now_at=NOW)


def test_reserved_shares_are_bounded_together(engine: Engine) -> None:
    with writing(engine, "test") as session:
        ids = [tenants.create_tenant(session, name, now_at=NOW).id for name in "abc"]
        for share in (-0.1, 0.51, float("nan"), float("inf")):
            with pytest.raises(InvalidValue):
                tenants.update_tenant(session, "a", reserved_share=share, now_at=NOW)
        tenants.update_tenant(session, "a", reserved_share=0.3, now_at=NOW)
        tenants.update_tenant(session, "b", reserved_share=0.2, now_at=NOW)
        with pytest.raises(InvalidValue, match="all tenants together"):
            tenants.update_tenant(session, "c", reserved_share=0.1, now_at=NOW)
    with writing(engine, "test") as session:
        tenants.update_tenant(session, "c", reserved_share=0.0, now_at=NOW)
        tenants.update_tenant(session, "a", disabled=True, now_at=NOW)
        assert tenants.reserved_shares(session) == {ids[1]: 0.2}
        tenants.update_tenant(session, "c", reserved_share=0.3, now_at=NOW)
        with pytest.raises(InvalidValue, match="all tenants together"):
            tenants.update_tenant(session, "a", disabled=False, now_at=NOW)


def test_the_migration_up_and_down_with_data_in_place(url: str) -> None:
    upgrade(url, "0003")
    engine = make_engine(url)
    with writing(engine, "test") as session:
        values = "'ten_1', 'old', 2, FALSE, 0"
        session.execute(
            text(f"INSERT INTO tenants (id, name, weight, disabled, created_at) VALUES ({values})")
        )
    upgrade(url)
    with writing(engine, "test") as session:
        old = tenants.get_tenant(session, "old")
        assert (old.weight, old.priority, old.reserved_share) == (2.0, "standard", 0.0)
        tenants.update_tenant(session, "old", priority="batch", reserved_share=0.1, now_at=NOW)
    engine.dispose()
    downgrade(url, "0003")
    names = {column["name"] for column in inspect(engine).get_columns("tenants")}
    assert names == {"id", "name", "weight", "disabled", "created_at"}
    with reading(engine) as session:
        assert session.execute(text("SELECT name, weight FROM tenants")).all() == [("old", 2.0)]
    upgrade(url)
    with reading(engine) as session:
        assert tenants.get_tenant(session, "old").priority == "standard"
    engine.dispose()
