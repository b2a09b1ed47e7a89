"""Settings of several servers that have one dispatcher, one database and one fleet of workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from gateway.settings.base_settings import setting
from gateway.settings.worker_settings import MAX_PORT, WorkerSpec

CLUSTER_FOLDER = "cluster"
"""Inside the data folder: certificate, key and authority, unless settings name others."""
ADDRESS = r"[^\s/]{1,240}:[0-9]{1,5}"
MAX_PEERS = 16


class TlsFiles(NamedTuple):
    """Of connections between servers, as PEM."""

    cert: Path
    key: Path
    ca: Path


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Who the other servers are, and how they are recognised."""

    dispatcher_address: str = setting(
        "",
        "HOST:PORT of this machine at which the gateways of other servers reach this server's "
        "dispatcher. Setting it makes this server one of several that share one dispatcher, "
        "`database_url` (PostgreSQL) and the workers on other machines. Empty: this server has a "
        "dispatcher of its own.",
        pattern=rf"\A(?:{ADDRESS})?\Z",
    )
    dispatcher_peers: tuple[Annotated[str, msgspec.Meta(pattern=rf"\A{ADDRESS}\Z")], ...] = setting(
        (),
        "`dispatcher_address` of each other server. Gateways look for the dispatcher there while "
        "the database is away.",
        max_length=MAX_PEERS,
    )
    server_lost_after_s: float = setting(
        60.0,
        "A server that has not said in the database for so long that it lives, and is not "
        "connected to the active dispatcher, counts as lost. Another one then closes the requests "
        "that it left open, and bills what their clients had been sent.",
        ge=8.0,
    )
    cluster_cert_file: str = setting(
        "",
        "PEM file with this server's certificate for connections between servers. Empty: "
        "`cluster/cert.pem` in the data folder.",
    )
    cluster_key_file: str = setting(
        "", "PEM file with its private key. Empty: `cluster/key.pem` in the data folder."
    )
    cluster_ca_file: str = setting(
        "",
        "PEM file with the certificate authority of all servers. Empty: `cluster/ca.pem` in the "
        "data folder.",
    )

    @property
    def is_clustered(self) -> bool:
        """Whether other servers share this one's dispatcher."""
        return bool(self.dispatcher_address)

    def tls_files(self, data_path: Path) -> TlsFiles:
        """Absolute paths."""
        folder = data_path / CLUSTER_FOLDER
        given = (self.cluster_cert_file, self.cluster_key_file, self.cluster_ca_file)
        names = ("cert.pem", "key.pem", "ca.pem")
        return TlsFiles(
            *(
                Path(name).expanduser().resolve() if name else folder / default
                for name, default in zip(given, names, strict=True)
            )
        )

    def check_cluster(self, registry_url: str, workers: Sequence[WorkerSpec]) -> None:
        """Raises ValueError where other servers could not reach what they have to share."""
        addresses = [a for a in (self.dispatcher_address, *self.dispatcher_peers) if a]
        for address in addresses:
            _check_host(address)
            if not 0 < int(address.rpartition(":")[2]) <= MAX_PORT:
                raise ValueError(f"the port of {address} must be between 1 and {MAX_PORT}")
        if not self.is_clustered:
            if self.dispatcher_peers:
                raise ValueError("dispatcher_peers needs dispatcher_address: set both")
            return
        if self.dispatcher_address in self.dispatcher_peers:
            raise ValueError(
                f"dispatcher_peers holds {self.dispatcher_address}, this server's own "
                "dispatcher_address: list only the other servers"
            )
        if not registry_url.startswith(("postgres:", "postgresql:", "postgresql+psycopg:")):
            raise ValueError(
                "dispatcher_address needs a PostgreSQL database that all servers share: set "
                "database_url"
            )
        if not workers or not all(worker.endpoint and worker.name for worker in workers):
            raise ValueError(
                "with dispatcher_address every worker is reached by all servers: list each one "
                "as [[workers]] with endpoint, public_key and name, the same in every "
                "polyhost.toml; workers of this machine run by `polyhost workers serve`"
            )


def _check_host(address: str) -> None:
    """Raises ValueError where another server could not connect to it."""
    host = split_address(address)[0]
    if ":" in host and not address.startswith("["):
        raise ValueError(f"{address}: put the IPv6 address in brackets, as [fd00::1]:7500")
    try:
        is_any = ip_address(host).is_unspecified
    except ValueError:  # a name
        is_any = False
    if is_any:
        raise ValueError(
            f"{address} is every address of a machine: name the one at which other servers reach it"
        )


def split_address(address: str) -> tuple[str, int]:
    """Host and port; an IPv6 address stands in brackets."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)
