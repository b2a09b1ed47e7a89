"""How many connections there may be, how fast they come, and who is told so."""

import ipaddress
import random

import pytest

from gateway.errors import ApiError
from gateway.server.connections import Connections, connections_of
from gateway.settings import Settings


def test_bounds_of_one_address_leave_others_alone() -> None:
    connections = Connections(max_per_address=2)
    places = [connections.enter("192.0.2.1") for _ in range(2)]
    with pytest.raises(ApiError) as refused:
        connections.enter("192.0.2.1")
    assert refused.value.kind.status == 429
    assert refused.value.retry_after_s
    places.append(connections.enter("192.0.2.2"))
    for place in (*places, *places):  # twice: once counts
        place.leave()
    assert connections.num_open == 0
    assert not connections._by_party
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
    settings = Settings(trusted_proxies=trusted, max_connections_per_address=1)
    connections = connections_of(settings)
    connections.enter(address)
    if fine:
        connections.enter(address)
    else:
        with pytest.raises(ApiError):
            connections.enter(address)


def test_no_bound_is_no_bound() -> None:
    connections = Connections()
    assert not any(connections.enter("192.0.2.1").wait_s for _ in range(5000))
    assert connections.num_open == 5000


@pytest.mark.parametrize(
    ("one", "other", "is_one_party"),
    [
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("192.0.2.1", "192.0.2.2", False),
    ],
)
def test_a_network_of_64_bits_is_one_address(one: str, other: str, is_one_party: bool) -> None:
    connections = Connections(max_per_address=1)
    connections.enter(one)
    if is_one_party:
        with pytest.raises(ApiError):
            connections.enter(other)
    else:
        connections.enter(other)


def test_a_quick_address_waits_and_others_do_not() -> None:
    connections = Connections(rate_per_address=10.0)
    waits = [connections.enter("192.0.2.1", 100.0).wait_s for _ in range(20)]
    assert waits == pytest.approx([0.0] * 11 + [n / 10 for n in range(1, 10)])
    assert connections.enter("192.0.2.2", 100.0).wait_s == 0
    # In a second ten are served; those that wait have taken their turn already.
    assert connections.enter("192.0.2.1", 101.0).wait_s == pytest.approx(0.0, abs=1e-6)
    assert connections.enter("192.0.2.1", 101.0).wait_s == pytest.approx(0.1)
    assert connections.enter("192.0.2.1", 200.0).wait_s == 0
    assert connections.num_delayed == 10


def test_an_even_pace_below_the_bound_never_waits() -> None:
    connections = Connections(rate_per_address=10.0)
    assert not any(connections.enter("192.0.2.1", n / 9.9).wait_s for n in range(1000))


def test_proxies_do_not_wait() -> None:
    connections = connections_of(
        Settings(trusted_proxies="192.0.2.1", connection_rate_per_address=1)
    )
    assert not any(connections.enter("192.0.2.1", 5.0).wait_s for _ in range(50))


def test_what_is_remembered_of_addresses_is_forgotten() -> None:
    connections, chance = Connections(rate_per_address=2.0), random.Random(3)
    for n in range(20_000):
        connections.enter(f"10.0.{chance.randrange(256)}.{chance.randrange(256)}", n / 100).leave()
    assert len(connections._due_s) < 200
    assert not connections._by_party
