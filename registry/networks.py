"""Networks that a key may be used from: CIDR blocks of IPv4 and IPv6, and single addresses.

An IPv4 address that arrives in IPv6's dress (`::ffff:192.0.2.7`, as on a socket that listens to
both) is that IPv4 address.
"""

import ipaddress
from collections.abc import Iterable
from functools import lru_cache
from typing import TypeAlias

from registry.errors import InvalidValue

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_NETWORKS = 256
"""Of one key: every request of it looks at each."""


def parse_networks(cidrs: Iterable[str]) -> tuple[Network, ...]:
    """Each once, in their order. Raises InvalidValue that names what is no network."""
    networks = tuple(dict.fromkeys(_network(text.strip()) for text in cidrs))
    if not networks:
        raise InvalidValue("name at least one network, or `any`")
    if len(networks) > MAX_NETWORKS:
        raise InvalidValue(f"a key may have {MAX_NETWORKS} networks at most, not {len(networks)}")
    return networks


def within(client: str, networks: Iterable[Network]) -> bool:
    """Is the address in one of them? False for what is no IP address (a Unix socket's client)."""
    try:
        address = ipaddress.ip_address(client.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return any(address in network for network in networks)


@lru_cache(4096)
def _network(text: str) -> Network:
    """Kept: a poll reads the networks of all keys again, and many keys share them."""
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        raise InvalidValue(
            f"{text!r} is no network: write it as 192.0.2.0/24, 2001:db8::/32 or an address "
            f"({error})"
        ) from error
    first = network.network_address
    if isinstance(first, ipaddress.IPv6Address) and first.ipv4_mapped is not None:
        if network.prefixlen < 96:
            raise InvalidValue(f"{text!r}: write networks of IPv4 as such")
        return ipaddress.IPv4Network((first.ipv4_mapped, network.prefixlen - 96))
    return network
