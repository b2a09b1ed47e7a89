"""Addresses that no webhook is sent to: what answers there answers this host alone.

    link-local, multicast, broadcast, unspecified    nobody's, or anybody's on this host's own link
    metadata services of clouds                      they tell a host its secrets, some by addresses
                                                     that are not link-local (REFUSED)
    any of these inside an IPv6 address              a gateway or tunnel would unwrap it

Private networks (RFC 1918, fc00::/7) are permitted: only who may change the limits of the whole
installation sets URLs, and receivers often are there.
"""

import ipaddress
from collections.abc import Iterator
from typing import Final, TypeAlias

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

REFUSED: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            *("0.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4"),
            "100.100.100.200/32",  # Alibaba
            "168.63.129.16/32",  # Azure
            "192.0.0.0/24",  # of protocols, Oracle's 192.0.0.192 among them
            *("::/128", "fe80::/10", "fec0::/10", "ff00::/8"),
            "fd00:ec2::/32",  # AWS
            "fd20:ce::254/128",  # Google
        ),
    )
)
NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
LOCAL_NAT64: Final = ipaddress.IPv6Network("64:ff9b:1::/48")
TRANSLATED: Final = ipaddress.IPv6Network("::ffff:0:0:0/96")
COMPATIBLE: Final = ipaddress.IPv6Network("::/96")
THIS_NETWORK: Final = ipaddress.IPv4Network("0.0.0.0/8")
ISATAP: Final = (bytes.fromhex("00005efe"), bytes.fromhex("02005efe"))


def is_refused(address: Address) -> bool:
    """Whether nothing may be sent there."""
    return any(each in network for each in (address, *_inside(address)) for network in REFUSED)


def is_loopback(address: Address) -> bool:
    """Whether it is this host, however it is written."""
    return any(each.is_loopback for each in (address, *_inside(address)))


def _inside(address: Address) -> Iterator[ipaddress.IPv4Address]:
    """The IPv4 addresses that an IPv6 address may stand for (RFC 4291, 6052, 3056, 4380, 5214)."""
    if isinstance(address, ipaddress.IPv4Address):
        return
    packed = address.packed
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo
    is_compatible = address in COMPATIBLE and int(address) > 0xFFFF
    if is_compatible or address in NAT64 or address in TRANSLATED or packed[8:12] in ISATAP:
        yield ipaddress.IPv4Address(packed[12:])
    if address in LOCAL_NAT64:
        # Where it stands depends on a length that only the translator knows; the ninth byte is
        # passed over. Places where it does not stand read as 0.0.0.0/8.
        without = packed[:8] + packed[9:]
        places = (without[6:10], without[7:11], without[8:12], packed[12:])
        found = (ipaddress.IPv4Address(place) for place in places)
        yield from (each for each in found if each not in THIS_NETWORK)
