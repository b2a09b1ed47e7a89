"""How many connections are open, in all and from one address, how fast one address gets new ones,
and why others were ended.

Comes in: addresses as connections begin and end, and the time. Goes out: a `Place` with the time at
which it is served, or an ApiError for one too many, which acceptor.py answers before anything is
read. One object per gateway process; figures for /metrics are read from it.

One address of IPv6 is one network of 64 bits: whoever has one address of it has them all.
"""

import ipaddress
import socket
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from gateway.errors import RATE_LIMITED, UNAVAILABLE, ApiError
from gateway.settings import Settings
from registry.networks import Network, within

_RETRY_S = 1.0
_MAPPED = b"\0" * 10 + b"\xff\xff"
_NETWORK_BYTES = 8


@dataclass(slots=True)
class Connections:
    """`max_total`, `max_per_address`, `rate_per_address` (a second): 0 for no bound. Addresses of
    `proxies` have none of the last two."""

    max_total: int = 0
    max_per_address: int = 0
    proxies: tuple[Network, ...] = ()
    rate_per_address: float = 0.0
    ended: Counter[str] = field(default_factory=Counter)
    """Connections that this side ended, by why."""
    num_open: int = 0
    num_delayed: int = 0
    """Connections that had to wait until they were served, so far."""
    _by_party: Counter[bytes] = field(default_factory=Counter)
    _due_s: OrderedDict[bytes, float] = field(default_factory=OrderedDict)

    def enter(self, address: str, now_s: float = 0.0) -> "Place":
        """One more. Raises ApiError where it is one too many; then it is not counted."""
        party = _party_of(address)
        if self.max_total and self.num_open >= self.max_total:
            self.ended["too many"] += 1
            message = "the server has as many connections as it takes: try again in a moment"
            raise ApiError(UNAVAILABLE, message, retry_after_s=_RETRY_S)
        if (
            self.max_per_address
            and self._by_party[party] >= self.max_per_address
            and not within(address, self.proxies)
        ):
            self.ended["too many of one address"] += 1
            message = (
                f"{self.max_per_address} connections of your address are open already: "
                "use those again, or close some"
            )
            raise ApiError(RATE_LIMITED, message, retry_after_s=_RETRY_S)
        self._by_party[party] += 1
        self.num_open += 1
        return Place(self, party, self._wait_s(address, party, now_s))

    def leave(self, party: bytes) -> None:
        """One less."""
        self.num_open -= 1
        self._by_party[party] -= 1
        if not self._by_party[party]:
            del self._by_party[party]

    def _wait_s(self, address: str, party: bytes, now_s: float) -> float:
        """A second's worth at once, then one after the other (GCRA). Times that are over are
        forgotten as others come, two a call, so that all come round."""
        if not self.rate_per_address:
            return 0.0
        due_s = max(self._due_s.get(party, 0.0), now_s)
        wait_s = max(0.0, due_s - now_s - 1.0)
        if wait_s and within(address, self.proxies):
            return 0.0
        self._due_s[party] = due_s + 1.0 / self.rate_per_address
        self._due_s.move_to_end(party)
        for _ in range(2):
            first = next(iter(self._due_s))
            if self._due_s[first] > now_s:
                break
            del self._due_s[first]
        self.num_delayed += wait_s > 0.0
        return wait_s


@dataclass(slots=True, eq=False)
class Place:
    """Of one connection, from before its handshake to its end. `wait_s`: until it is served."""

    connections: Connections
    party: bytes
    wait_s: float = 0.0
    _is_left: bool = False

    def leave(self) -> None:
        """Once; again it changes nothing."""
        if not self._is_left:
            self._is_left = True
            self.connections.leave(self.party)


def connections_of(settings: Settings) -> Connections:
    """Bounded as the settings say."""
    named = [proxy.strip() for proxy in settings.trusted_proxies.split(",") if proxy.strip()]
    everybody = ("0.0.0.0/0", "::/0") if "*" in named else ()
    proxies = tuple(ipaddress.ip_network(name) for name in everybody or named)
    return Connections(
        settings.max_connections,
        settings.max_connections_per_address,
        proxies,
        settings.connection_rate_per_address,
    )


def _party_of(address: str) -> bytes:
    """Whose address it is: of IPv6 its /64, but for an IPv4 address in IPv6's dress."""
    if ":" not in address:
        return address.encode()
    try:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    except OSError:
        return address.encode()
    if packed.startswith(_MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[len(_MAPPED) :]).encode()
    return packed[:_NETWORK_BYTES]
