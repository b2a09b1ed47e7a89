"""The audit log, read: filters and pages."""

import pytest
from sqlalchemy import Engine

from registry import audit
from registry.accounts import tenants
from registry.audit import AuditFilter
from registry.session import reading, writing

NOW = 1_000_000.0


@pytest.fixture
def log(engine: Engine) -> Engine:
    """Six changes by two actors, one a second."""
    for number, (actor, name) in enumerate([("cli:ann", "a"), ("cli:bob", "b"), ("cli:ann", "c")]):
        with writing(engine, actor) as session:
            tenants.create_tenant(session, name, now_at=NOW + number)
    for number, actor in enumerate(["cli:bob", "cli:ann", "cli:bob"], 3):
        with writing(engine, actor) as session:
            tenants.update_tenant(session, "b", weight=number, now_at=NOW + number)
    return engine


def ids(engine: Engine, wanted: AuditFilter, **bounds: int) -> list[int]:
    with reading(engine) as session:
        return [entry.id for entry in audit.page(session, wanted, **bounds)]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (AuditFilter(), [6, 5, 4, 3, 2, 1]),
        (AuditFilter(actor="cli:ann"), [5, 3, 1]),
        (AuditFilter(action="tenant"), [6, 5, 4, 3, 2, 1]),
        (AuditFilter(action="tenant.create"), [3, 2, 1]),
        (AuditFilter(action="ten"), []),
        (AuditFilter(action="tenan_"), []),
        (AuditFilter(target="b"), [6, 5, 4, 2]),
        (AuditFilter(from_at=NOW + 1, to_at=NOW + 4), [4, 3, 2]),
        (AuditFilter(actor="cli:bob", target="b", from_at=NOW + 2), [6, 4]),
        (AuditFilter(target="none"), []),
    ],
)
def test_filters(log: Engine, wanted: AuditFilter, found: list[int]) -> None:
    assert ids(log, wanted) == found


def test_pages_neither_repeat_nor_miss(log: Engine) -> None:
    first = ids(log, AuditFilter(), limit=4)
    with writing(log, "cli:ann") as session:
        tenants.create_tenant(session, "later", now_at=NOW)
    second = ids(log, AuditFilter(), limit=4, before_id=first[-1])
    assert first + second == [6, 5, 4, 3, 2, 1]
    assert ids(log, AuditFilter(), limit=4, before_id=second[-1]) == []


def test_a_target_is_found_by_its_id_and_by_its_name(log: Engine) -> None:
    with reading(log) as session:
        tenant = tenants.get_tenant(session, "b")
    assert ids(log, AuditFilter(target=tenant.id)) == ids(log, AuditFilter(target="b"))
