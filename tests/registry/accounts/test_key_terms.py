"""Which texts are networks, and who is in them."""

import pytest

from registry.accounts.key_terms import MAX_NETWORKS, parse_networks, within
from registry.errors import InvalidValue


@pytest.mark.parametrize(
    ("cidr", "inside", "outside"),
    [
        ("10.0.0.0/8", "10.255.0.1", "11.0.0.1"),
        ("192.0.2.7", "192.0.2.7", "192.0.2.8"),
        (" 192.0.2.0/31 ", "192.0.2.1", "192.0.2.2"),
        ("0.0.0.0/0", "255.255.255.255", "::1"),
        ("::/0", "fe80::1%eth0", "10.0.0.1"),
        ("2001:db8::/32", "2001:db8:ffff::1", "2001:db9::"),
        ("::ffff:10.0.0.0/104", "10.1.1.1", "::a01:101"),
        ("10.0.0.0/8", "::ffff:10.1.1.1", "::ffff:11.1.1.1"),
    ],
)
def test_inside_and_outside(cidr: str, inside: str, outside: str) -> None:
    networks = parse_networks([cidr])
    assert within(inside, networks)
    assert not within(outside, networks)


@pytest.mark.parametrize("client", ["", "localhost", "10.0.0.1, 10.0.0.2", "10.0.0.1:80", "1"])
def test_what_is_no_address_is_nowhere(client: str) -> None:
    assert not within(client, parse_networks(["0.0.0.0/0", "::/0"]))


@pytest.mark.parametrize(
    "cidr", ["", "10.0.0.1/8", "10.0.0.0/33", "example.org", "10.0.0", "::ffff:0:0/95"]
)
def test_what_is_no_network_is_named(cidr: str) -> None:
    with pytest.raises(InvalidValue, match=repr(cidr.strip())):
        parse_networks(["10.0.0.0/8", cidr])


def test_bounds_of_the_list() -> None:
    assert len(parse_networks(["10.0.0.1", "10.0.0.1/32"])) == 1
    with pytest.raises(InvalidValue, match="at least one"):
        parse_networks([])
    with pytest.raises(InvalidValue, match=str(MAX_NETWORKS)):
        parse_networks(f"10.0.{i // 256}.{i % 256}" for i in range(MAX_NETWORKS + 1))
