"""Rows of gateways that live."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from registry.servers import gateway_leases as leases
from registry.session import make_engine


@pytest.fixture
def engine(postgres_url: str) -> Iterator[Engine]:
    made = make_engine(postgres_url)
    yield made
    made.dispose()


def test_rows_are_renewed_counted_and_deleted_as_they_were_seen(engine: Engine) -> None:
    assert leases.renew(engine, "a/gateway-0") == {}
    assert set(leases.renew(engine, "b/gateway-0")) == {"a/gateway-0"}
    seen = leases.renew(engine, "b/gateway-0")
    assert set(seen) == {"a/gateway-0", "b/gateway-0"}
    assert leases.num_live(engine, 60.0) == 2
    assert leases.num_live(engine, -1.0) == 0
    leases.renew(engine, "a/gateway-0")
    leases.forget(engine, "a/gateway-0", seen["a/gateway-0"])  # It has renewed since.
    assert leases.num_live(engine, 60.0) == 2
    now = leases.renew(engine, "b/gateway-0")
    leases.forget(engine, "a/gateway-0", now["a/gateway-0"])
    assert set(leases.renew(engine, "b/gateway-0")) == {"b/gateway-0"}
    leases.forget(engine, "b/gateway-0")
    assert leases.num_live(engine, 60.0) == 0
