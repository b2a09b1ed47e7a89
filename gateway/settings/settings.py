"""All settings of a server, and the reference that lists them.

Each subsystem has a class of its own, which nothing else inherits from; `Settings` is all of them
in one flat object. A reader that needs one subsystem's settings asks for that class. config.py
reads the values. Every field has its description, default and bounds; docs/ is tested against
`settings_reference()`. Sizes are bytes and times seconds, as the names say.
"""

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec

from gateway.settings.base_settings import ExportSettings, setting
from gateway.settings.cache_settings import CacheSettings
from gateway.settings.cluster_settings import ClusterSettings
from gateway.settings.http_settings import HttpSettings, PageSettings
from gateway.settings.ledger_settings import InvoiceSettings, LedgerSettings
from gateway.settings.oidc_settings import OidcSettings
from gateway.settings.state_settings import FileSettings, StateSettings
from gateway.settings.worker_settings import RegistrationSettings, WorkerSettings

ENV_PREFIX = "POLYHOST_"
PACKS_FOLDER = "packs"
"""Inside the data folder: a folder for each pack."""
JOURNAL_FOLDER = "journal"
"""Inside the data folder: a folder for each gateway's journal."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Addresses, the data folder, processes."""

    host: str = setting(
        "127.0.0.1", "Address to listen on. The default accepts connections from this machine only."
    )
    port: int = setting(
        8000,
        "TCP port to listen on. 0: the system chooses a free port; the startup banner prints it.",
        ge=0,
        le=65535,
    )
    data_dir: str = setting(
        "data", "Folder for the database, the packs, the sockets and the lock file."
    )
    database_url: str = setting(
        "",
        "SQLAlchemy URL of the registry database, needed when several gateways share one: "
        "postgresql+psycopg://USER:PASSWORD@HOST/NAME. Empty: SQLite in the data folder.",
    )
    demo: bool = setting(
        False, "Register the three demo models and a tenant `demo` with an API key."
    )
    demo_api_key: str = setting(
        "", "API key of the demo tenant. Empty: a key is generated and printed once."
    )
    admin_password: str = setting(
        "",
        "Password of the user `admin`, an owner, which the server creates at startup if it does "
        "not exist. Empty: if there are no users at all, a password is generated and printed "
        "once.",
    )
    shutdown_timeout_s: float = setting(
        20.0,
        "How long running requests may continue after SIGTERM before they are aborted.",
        gt=0.0,
    )
    shutdown_notice_s: float = setting(
        0.5,
        "How long /health/ready returns 503 before the server stops accepting connections.",
        ge=0,
    )
    key_cache_poll_s: float = setting(
        0.5, "How often the server checks for changes to keys, models, limits and prices.", gt=0.0
    )
    gateway_processes: int = setting(
        1,
        "Number of processes that serve HTTP. With more than 1, the fair queue runs in its own "
        "process, and a standby process takes over if that one dies.",
        ge=1,
        le=32,
    )
    dispatcher_timeout_s: float = setting(
        10.0,
        "A process of this server that has sent nothing to the others for this long counts as "
        "hung.",
        gt=0.0,
    )

    @property
    def data_path(self) -> Path:
        """The data folder, absolute."""
        return Path(self.data_dir).expanduser().resolve()

    @property
    def registry_url(self) -> str:
        """`database_url`, or the data folder's own. May hold a password: not for logs."""
        return self.database_url or f"sqlite:///{self.data_path / 'polyhost.db'}"


@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    """Limits that several gateways share, and budgets."""

    redis_url: str = setting(
        "",
        "Redis server through which gateways on several machines share limit counts: "
        "redis://:PASSWORD@HOST:PORT/DB, rediss:// for TLS, unix://PATH for a socket. Empty: "
        "counts stay in this server.",
    )
    redis_timeout_s: float = setting(
        0.05,
        "How long a request waits for Redis. After that, this gateway enforces only its own "
        "share of the limits.",
        gt=0.0,
    )
    redis_prefix: str = setting(
        "polyhost",
        "Prefix of all Redis keys. Gateways that share limits must use the same prefix.",
        pattern=r"\A[A-Za-z0-9._-]{1,64}\Z",
    )
    limit_fallback_gateways: int = setting(
        1,
        "Number of gateways assumed to share the limits until Redis reports the actual number.",
        ge=1,
    )
    budgets_fail_open: bool = setting(
        False,
        "Serve requests that have a budget even when the remaining budget is unknown. If false, "
        "they get 503 then.",
    )
    alert_interval_s: float = setting(10.0, "How often budget thresholds are checked.", gt=0.0)


@dataclass(frozen=True, kw_only=True)
class QueueSettings:
    """The fair queue, and loads for those who wait in it."""

    max_queue_per_tenant: int = setting(
        256,
        "Maximum number of one tenant's requests that wait for a worker. Further requests get "
        "429 queue_full.",
        ge=1,
    )
    max_queue_total: int = setting(
        1024,
        "Maximum number of requests, of all tenants, that wait for a worker, for each worker that "
        "is connected. Further requests get 429 queue_full.",
        ge=1,
    )
    queue_timeout_s: float = setting(
        60.0, "How long a request may wait for a worker. After that it gets 503.", gt=0.0
    )
    request_timeout_s: float = setting(
        600.0,
        "How long a request may take, from entering the queue to its last token. After that it "
        "gets 504, or an error event if tokens were already sent.",
        gt=0.0,
    )
    fair_share_max_lead_s: float = setting(
        30.0,
        "When an idle tenant sends requests again, it is charged for at most this many seconds "
        "of earlier service beyond what waiting tenants have had.",
        gt=0.0,
    )
    max_load_share: float = setting(
        0.2,
        "Maximum share of each worker's time for model loads that evict a model in demand.",
        gt=0.0,
        le=1.0,
    )
    gather_wait_s: float = setting(
        2.0,
        "How long requests may wait for others of the same model before a load that evicts a "
        "model in demand starts. 0: the load starts without waiting.",
        ge=0,
    )

    def check_queue(self) -> None:
        """Raises ValueError where fields contradict one another."""
        if self.max_queue_per_tenant > self.max_queue_total:
            raise ValueError("max_queue_per_tenant must not be above max_queue_total: lower it")


# Python lists the fields of the last base first: read from the bottom.
@dataclass(frozen=True, kw_only=True)
class Settings(
    LedgerSettings,
    InvoiceSettings,
    WorkerSettings,
    RegistrationSettings,
    QueueSettings,
    LimitSettings,
    ClusterSettings,
    ServerSettings,
    PageSettings,
    HttpSettings,
    OidcSettings,
    CacheSettings,
    FileSettings,
    StateSettings,
    ExportSettings,
):
    """How this server runs. Read once at start."""

    def __post_init__(self) -> None:
        """Raises ValueError where fields contradict one another."""
        self.check_http()
        self.check_oidc()
        self.check_worker()
        self.check_queue()
        self.check_cluster(self.registry_url, self.workers)


class SettingRow(NamedTuple):
    """One line of the settings' reference."""

    name: str
    env: str
    type: str
    default: object
    description: str
    group: str
    """Its subsystem's name."""


def settings_reference() -> list[SettingRow]:
    """Every field with its variable, type, default and description, in the order of the docs."""
    groups = {
        name: kind.__name__.removesuffix("Settings")
        for kind in Settings.__bases__
        for name in kind.__annotations__
    }
    return [
        SettingRow(
            field.name,
            ENV_PREFIX + field.name.upper(),
            annotations()[field.name].__origin__.__name__,
            field.default,
            field.metadata["text"],
            groups[field.name],
        )
        for field in fields(Settings)
    ]


@cache
def annotations() -> dict[str, Any]:
    """Every field's type with its bounds."""
    kinds = get_type_hints(Settings)
    return {
        field.name: Annotated[kinds[field.name], msgspec.Meta(**field.metadata["bounds"])]
        for field in fields(Settings)
    }
