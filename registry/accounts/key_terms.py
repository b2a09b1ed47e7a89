"""What an API key says: what it is good for, from which networks, with which cached answers.

Scopes deny by default; what a key does not name it may not do:

    inference   to ask models; what is stored of their answers is part of it
    responses   to read, change and delete stored responses and conversations, without asking models
    usage       to read its own tenant's usage and costs
    files       to send, list, read and delete its own tenant's files

Networks are CIDR blocks of IPv4 and IPv6, and single addresses. An IPv4 address in IPv6's notation
(`::ffff:192.0.2.7`, as on a socket that listens to both) is that IPv4 address. What the rules for
cached answers mean is in gateway/cache/policy/cache_rule.py.
"""

import ipaddress
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from functools import lru_cache
from typing import Final, TypeAlias

from registry.base import JsonObject
from registry.errors import InvalidValue

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_NETWORKS = 256
"""Of one key: every request of it looks at each."""


def parse_networks(cidrs: Iterable[str]) -> tuple[Network, ...]:
    """Each once, in their order. Raises InvalidValue that names what is no network."""
    networks = tuple(dict.fromkeys(_network(text.strip()) for text in cidrs))
    if not networks:
        raise InvalidValue("give at least one network, or `any`")
    if len(networks) > MAX_NETWORKS:
        raise InvalidValue(f"a key may have at most {MAX_NETWORKS} networks, got {len(networks)}")
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
            f"{text!r} is not a network: write it as 192.0.2.0/24, 2001:db8::/32 or an address "
            f"({error})"
        ) from error
    first = network.network_address
    if isinstance(first, ipaddress.IPv6Address) and first.ipv4_mapped is not None:
        if network.prefixlen < 96:
            raise InvalidValue(f"{text!r}: write IPv4 networks in IPv4 notation")
        return ipaddress.IPv4Network((first.ipv4_mapped, network.prefixlen - 96))
    return network


CACHE_MODES = ("off", "exact", "semantic", "shadow")


@dataclass(frozen=True, slots=True)
class KeyCache:
    """`max_age_s`, `false_hit_budget` None: the server's own. `sampled`: also answers that are
    drawn without a seed."""

    mode: str = "off"
    max_age_s: float | None = None
    false_hit_budget: float | None = None
    sampled: bool = False

    def check(self) -> None:
        """Raises InvalidValue."""
        if self.mode not in CACHE_MODES:
            raise InvalidValue(f"cache mode must be one of {', '.join(CACHE_MODES)}")
        if self.max_age_s is not None and not 0 <= self.max_age_s < math.inf:
            raise InvalidValue("the maximum age of cached answers must be 0 seconds or more")
        if self.false_hit_budget is not None and not 0 <= self.false_hit_budget < 1:
            raise InvalidValue(
                "a false-hit budget must be a share of hits, at least 0 and less than 1 (0.01: one "
                "in a hundred)"
            )

    def public(self) -> JsonObject:
        """As the audit log and `--json` show it."""
        return {f"cache_{name}": value for name, value in asdict(self).items()}


class Unchanged(Enum):
    """What `KeyChanges` does not touch; None there means: no bound."""

    UNCHANGED = "unchanged"


UNCHANGED: Final = Unchanged.UNCHANGED


@dataclass(frozen=True, slots=True)
class KeyChanges:
    """As in `create_key`."""

    expires_at: float | Unchanged | None = UNCHANGED
    allowed_models: Sequence[str] | Unchanged | None = UNCHANGED
    allowed_cidrs: Sequence[str] | Unchanged | None = UNCHANGED
    cache: KeyCache | Unchanged = UNCHANGED


INFERENCE = "inference"
USAGE = "usage"
FILES = "files"
RESPONSES = "responses"
SCOPES = frozenset({INFERENCE, RESPONSES, USAGE, FILES})


def allows(scopes: frozenset[str], scope: str) -> bool:
    """Whether a key with these may do what needs this one."""
    return scope in scopes or (scope == RESPONSES and INFERENCE in scopes)


def checked_scopes(names: Iterable[str]) -> list[str]:
    """In their order by name. Raises InvalidValue where one is none, or there is none."""
    found = sorted(set(names))
    unknown = [name for name in found if name not in SCOPES]
    if unknown or not found:
        raise InvalidValue(f"unknown scope: a key needs one or more of {', '.join(sorted(SCOPES))}")
    return found
