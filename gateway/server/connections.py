"""How many connections are open, in all and from one address, and why others were ended.

Comes in: addresses as connections begin and end. Goes out: an ApiError for one too many, which
http_protocol.py answers before anything is read. One object per gateway process; figures for
/metrics are read from it.
"""

import ipaddress
from collections import Counter
from dataclasses import dataclass, field

from gateway.errors import RATE_LIMITED, UNAVAILABLE, ApiError
from gateway.settings import Settings
from registry.networks import Network, within

_RETRY_S = 1.0


@dataclass(slots=True)
class Connections:
    """`max_total`, `max_per_address`: 0 for no bound. Addresses of `proxies` have none."""

    max_total: int = 0
    max_per_address: int = 0
    proxies: tuple[Network, ...] = ()
    ended: Counter[str] = field(default_factory=Counter)
    """Connections that this side ended, by why."""
    num_open: int = 0
    _by_address: Counter[str] = field(default_factory=Counter)

    def enter(self, address: str) -> None:
        """One more. Raises ApiError where it is one too many; it is counted all the same."""
        self._by_address[address] += 1
        self.num_open += 1
        if self.max_total and self.num_open > self.max_total:
            self.ended["too many"] += 1
            message = "the server has as many connections as it takes: try again in a moment"
            raise ApiError(UNAVAILABLE, message, retry_after_s=_RETRY_S)
        if not self.max_per_address or self._by_address[address] <= self.max_per_address:
            return
        if not within(address, self.proxies):
            self.ended["too many of one address"] += 1
            message = (
                f"{self.max_per_address} connections of your address are open already: "
                "use those again, or close some"
            )
            raise ApiError(RATE_LIMITED, message, retry_after_s=_RETRY_S)

    def leave(self, address: str) -> None:
        """One less."""
        self.num_open -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


def connections_of(settings: Settings) -> Connections:
    """Bounded as the settings say."""
    named = [proxy.strip() for proxy in settings.trusted_proxies.split(",") if proxy.strip()]
    everybody = ("0.0.0.0/0", "::/0") if "*" in named else ()
    proxies = tuple(ipaddress.ip_network(name) for name in everybody or named)
    return Connections(settings.max_connections, settings.max_connections_per_address, proxies)
