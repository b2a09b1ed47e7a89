"""How many connections there may be, and who is told so."""

import ipaddress

import pytest

from gateway.errors import ApiError
from gateway.server.connections import Connections, connections_of
from gateway.settings import Settings


def test_bounds_of_one_address_leave_others_alone() -> None:
    connections = Connections(max_per_address=2)
    for _ in range(2):
        connections.enter("192.0.2.1")
    with pytest.raises(ApiError) as refused:
        connections.enter("192.0.2.1")
    assert refused.value.kind.status == 429
    assert refused.value.retry_after_s
    connections.enter("192.0.2.2")
    for _ in range(3):  # who was refused leaves, too
        connections.leave("192.0.2.1")
    connections.leave("192.0.2.2")
    assert connections.num_open == 0
    assert not connections._by_address
    assert connections.ended == {"too many of one address": 1}


def test_the_bound_of_all_holds_for_proxies_too() -> None:
    network = ipaddress.ip_network("192.0.2.0/24")
    connections = Connections(max_total=3, max_per_address=1, proxies=(network,))
    for _ in range(3):
        connections.enter("192.0.2.1")
    with pytest.raises(ApiError) as refused:
        connections.enter("192.0.2.1")
    assert refused.value.kind.status == 503


@pytest.mark.parametrize(
    ("trusted", "address", "fine"),
    [
        ("", "192.0.2.1", False),
        ("192.0.2.0/24, 10.0.0.1", "192.0.2.1", True),
        ("10.0.0.1", "192.0.2.1", False),
        ("*", "192.0.2.1", True),
        ("*", "2001:db8::1", True),
        ("192.0.2.0/24", "", False),
    ],
)
def test_proxies_are_those_of_the_settings(trusted: str, address: str, fine: bool) -> None:
    connections = connections_of(Settings(trusted_proxies=trusted, max_connections_per_address=1))
    connections.enter(address)
    if fine:
        connections.enter(address)
    else:
        with pytest.raises(ApiError):
            connections.enter(address)


def test_no_bound_is_no_bound() -> None:
    connections = Connections()
    for _ in range(5000):
        connections.enter("192.0.2.1")
    assert connections.num_open == 5000
