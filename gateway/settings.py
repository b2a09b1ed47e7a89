"""Every setting of a server: names, types, bounds, defaults, and what each does.

Those of HTTP are in settings_http.py; where the values come from is config.py's. Every field
carries its description and unit; `settings_reference()` lists them, and docs/ is tested against it.
Sizes are bytes and times seconds, as the names say.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec

from gateway.settings_http import HttpSettings
from gateway.settings_kinds import MIB, Count, CountOrZero, Seconds, doc

ENV_PREFIX = "POLYHOST_"


class Settings(HttpSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How this server runs. Read once at start."""

    # The server.
    host: Annotated[str, doc("Address to listen on; the default answers this machine only.")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int,
        msgspec.Meta(ge=0, le=65535),
        doc("TCP port; 0 lets the system choose one, which the start block prints."),
    ] = 8000
    data_dir: Annotated[
        str, doc("Folder of the database, the packs, the sockets and the lock file.")
    ] = "data"
    database_url: Annotated[
        str,
        doc(
            "SQLAlchemy's URL of the registry: postgresql+psycopg://USER:PASSWORD@HOST/NAME, where "
            "several gateways share one; empty: SQLite in the data folder."
        ),
    ] = ""
    demo: Annotated[
        bool, doc("Register the three demo models and the tenant `demo` with a key.")
    ] = False
    demo_api_key: Annotated[
        str, doc("The demo tenant's key; empty: one is generated once and printed.")
    ] = ""
    admin_password: Annotated[
        str,
        doc(
            "Password of the user `admin`, an owner, who is made at the start where there is none; "
            "empty: one is made up and printed once, where there is no user at all."
        ),
    ] = ""
    shutdown_timeout_s: Annotated[
        float, Seconds, doc("How long running requests may go on after SIGTERM.")
    ] = 20.0
    shutdown_notice_s: Annotated[
        float,
        CountOrZero,
        doc("How long /health/ready says 503 before the server takes no more connections."),
    ] = 0.5
    key_cache_poll_s: Annotated[
        float,
        Seconds,
        doc("How often changes of keys, models, limits and prices are read."),
    ] = 0.5

    gateway_processes: Annotated[
        int,
        msgspec.Meta(ge=1, le=32),
        doc(
            "Processes that serve HTTP; above 1 the fair queue is a process of its own, with "
            "another one in waiting."
        ),
    ] = 1
    dispatcher_timeout_s: Annotated[
        float,
        Seconds,
        doc("Silence between the processes of one server after which one counts as hanging."),
    ] = 10.0

    # Limits that several gateways share.
    redis_url: Annotated[
        str,
        doc(
            "Where gateways on several machines keep counts of limits together: "
            "redis://:PASSWORD@HOST:PORT/DB, rediss:// with TLS, unix://PATH. Empty: in this "
            "server."
        ),
    ] = ""
    redis_timeout_s: Annotated[
        float,
        Seconds,
        doc("How long a request waits for Redis; beyond it this gateway counts its own share."),
    ] = 0.05
    redis_prefix: Annotated[
        str,
        msgspec.Meta(pattern="^[A-Za-z0-9._-]{1,64}$"),
        doc("What the names of all keys in Redis begin with: one for all that share limits."),
    ] = "polyhost"
    limit_fallback_gateways: Annotated[
        int,
        Count,
        doc("How many gateways share limits, for the time until Redis has said so."),
    ] = 1
    budgets_fail_open: Annotated[
        bool,
        doc(
            "Requests of who has a budget are served where nobody can tell what is left of it; "
            "otherwise they get 503."
        ),
    ] = False

    alert_interval_s: Annotated[
        float, Seconds, doc("How often it is looked whether spending has reached a threshold.")
    ] = 10.0

    # The queue.
    max_queue_per_tenant: Annotated[
        int, Count, doc("Requests of one tenant waiting for a worker; beyond it 429 queue_full.")
    ] = 256
    max_queue_total: Annotated[
        int, Count, doc("Requests of all tenants waiting for a worker; beyond it 429 queue_full.")
    ] = 1024
    queue_timeout_s: Annotated[
        float, Seconds, doc("How long a request may wait for a worker; beyond it 503.")
    ] = 60.0
    request_timeout_s: Annotated[
        float,
        Seconds,
        doc(
            "How long a request may take from its arrival in the queue to its last token; beyond "
            "it 504, or an error event after the first token."
        ),
    ] = 600.0
    fair_share_max_lead_s: Annotated[
        float,
        Seconds,
        doc("Service that a tenant may be ahead of the others when it comes back, at most."),
    ] = 30.0
    max_load_share: Annotated[
        float,
        msgspec.Meta(gt=0.0, le=1.0),
        doc("Share of time that loads which push out a model in demand may take, per worker."),
    ] = 0.2
    gather_wait_s: Annotated[
        float,
        CountOrZero,
        doc(
            "How long requests may gather for a model whose load would push out one in demand, "
            "before the load begins; 0: they do not."
        ),
    ] = 2.0

    # Registration.
    hub_endpoint: Annotated[str, doc("Model hub; empty: HF_ENDPOINT, or huggingface.co.")] = ""
    hub_token: Annotated[str, doc("Its token; empty: HF_TOKEN, or of `hf auth login`.")] = ""
    hub_timeout_s: Annotated[float, Seconds, doc("How long the hub may send nothing.")] = 30.0
    packs_quota_bytes: Annotated[
        int, CountOrZero, doc("Disk that packs and downloads may take together; 0: no bound.")
    ] = 0
    download_keep_s: Annotated[
        float, CountOrZero, doc("How long an interrupted download waits to be retried.")
    ] = 86400.0
    model_revisions_kept: Annotated[
        int, Count, doc("Revisions of a model to roll back to, the current one included.")
    ] = 3

    # The worker.
    device: Annotated[
        str,
        msgspec.Meta(pattern="^(auto|cpu|[a-z]+:[0-9]+)$"),
        doc(
            "What runs the models: `cpu`; a GPU by torch's name and its number; "
            "`auto`: the first GPU where there is one. No GPU has run this build yet."
        ),
    ] = "cpu"
    device_budget_bytes: Annotated[
        int,
        CountOrZero,
        doc(
            "Arena for the weights and the KV of all models; 0: a quarter of the memory free at "
            "start; with `demo` and no other models, just enough for two of the three. On a GPU 0 "
            "is all that it has free but for the reserve and recorded steps."
        ),
    ] = 0
    page_bytes: Annotated[
        int, CountOrZero, doc("Unit of ownership in the arena, a power of two; 0: chosen.")
    ] = 0
    device_reserve_bytes: Annotated[
        int,
        msgspec.Meta(ge=-1),
        doc(
            "Memory beside the arena for activations and logits: a model whose steps could need "
            "more is not loaded. 0: not checked; -1: half of what arena and host tier leave free. "
            "On a GPU both are a sixteenth of what it has free."
        ),
    ] = -1
    host_tier_bytes: Annotated[
        int,
        msgspec.Meta(ge=-1),
        doc(
            "Shared memory that keeps packs warm; 0: none; -1: an eighth of the free memory, and "
            "at most half of what /dev/shm has; with `device` cpu only where several packs take "
            "more than half of the arena."
        ),
    ] = -1
    num_threads: Annotated[int, CountOrZero, doc("CPU threads of one operator; 0: chosen.")] = 0
    native_kernels: Annotated[bool, doc("C++ kernels on the CPU for models they cover.")] = True
    load_threads: Annotated[int, Count, doc("Threads that read one pack.")] = 2
    max_num_seqs: Annotated[int, Count, doc("Rows of one engine step at most.")] = 64
    max_batch_tokens: Annotated[
        int, Count, doc("Token budget of one engine step, prefill and decode together.")
    ] = 1024
    prefix_cache: Annotated[
        bool, doc("Keep the KV of ended requests for those of the same tenant that begin alike.")
    ] = True
    tenant_kv_share: Annotated[
        float,
        msgspec.Meta(gt=0.0, le=1.0),
        doc(
            "Share of a worker's KV memory that one tenant's requests may take while another "
            "tenant has work there; one request always may run. 1: no bound."
        ),
    ] = 0.75
    verify_packs: Annotated[
        bool, doc("Check every chunk's checksum whenever a model is loaded.")
    ] = True
    status_interval_s: Annotated[
        float, Seconds, doc("Heartbeat of a worker; its leases live twenty times as long.")
    ] = 0.1
    worker_heartbeat_timeout_s: Annotated[
        float, Seconds, doc("Silence after which a worker counts as lost.")
    ] = 15.0
    worker_restart_backoff_s: Annotated[
        float, Seconds, doc("First pause before a dead worker is restarted; doubles up to 30 s.")
    ] = 0.2

    # Bills.
    currency: Annotated[
        str,
        msgspec.Meta(pattern="^[A-Z]{3}$"),
        doc("What a unit of money is, as ISO 4217 spells it."),
    ] = "USD"
    currency_decimals: Annotated[
        int,
        msgspec.Meta(ge=0, le=9),
        doc("Places behind the point of what an invoice asks for: 2 for cents."),
    ] = 2
    invoice_issuer: Annotated[
        str,
        msgspec.Meta(pattern=r"\A[^\x00-\x1f\x7f]+\Z"),
        doc("Who bills: on invoices and in FOCUS exports. One line."),
    ] = "Polyhost"
    invoice_details: Annotated[
        str, doc("More about who bills, on invoices: address, bank, tax number; lines.")
    ] = ""
    invoice_prefix: Annotated[
        str,
        msgspec.Meta(pattern="^[A-Za-z0-9._-]{0,16}$"),
        doc("What stands before an invoice's number."),
    ] = "INV-"
    invoice_font: Annotated[
        str,
        doc("A TrueType font's file for PDF invoices whose names have signs beyond Latin ones."),
    ] = ""
    invoice_tax_name: Annotated[
        str, doc("Name of a tax that invoices add to the net amount; empty: none.")
    ] = ""
    invoice_tax_bp: Annotated[
        int, msgspec.Meta(ge=0, le=10_000), doc("Its rate in basis points: 1900 is 19 per cent.")
    ] = 0

    # The ledger.
    ledger_flush_interval_s: Annotated[
        float,
        CountOrZero,
        doc("Shortest time between two syncs of the journal: in a crowd one is for many."),
    ] = 0.002
    ledger_sync_interval_s: Annotated[
        float,
        CountOrZero,
        doc(
            "How long at most what has ended is only written, which survives a kill, and not "
            "synced, which survives a power cut."
        ),
    ] = 0.05
    ledger_max_pending: Annotated[
        int, Count, doc("Records not yet durable; beyond it new requests are refused with 503.")
    ] = 10_000
    ledger_open_timeout_s: Annotated[
        float, Seconds, doc("How long a request may wait for its open record; beyond it 503.")
    ] = 10.0
    ledger_checkpoint_tokens: Annotated[
        int,
        Count,
        doc(
            "Tokens of a stream between two checkpoints: what is billed too little at most where "
            "gateway and worker are both killed."
        ),
    ] = 64
    ledger_recovery_wait_s: Annotated[
        float,
        CountOrZero,
        doc("How long a start waits for workers to tell what an earlier server's requests used."),
    ] = 3.0
    ledger_max_batch: Annotated[
        int, Count, doc("Records of one database transaction, about, at most.")
    ] = 1000
    ledger_write_interval_s: Annotated[
        float, CountOrZero, doc("Pause between two such transactions where little has come.")
    ] = 0.2
    ledger_rollup_interval_s: Annotated[
        float, CountOrZero, doc("How often postings are added to the roll-ups; 0: never.")
    ] = 5.0
    journal_segment_bytes: Annotated[
        int,
        msgspec.Meta(ge=65_536),
        doc(
            "Size of the journal's files, of which two are allocated ahead. An open request takes "
            "1280 bytes of one, so it bounds open requests too; beyond it 503."
        ),
    ] = 8 * MIB
    journal_max_bytes: Annotated[
        int,
        Count,
        doc(
            "Journal that the database has not taken yet; beyond it new requests are refused with "
            "503. A request takes about a kilobyte."
        ),
    ] = 1024 * MIB
    journal_min_free_bytes: Annotated[
        int,
        CountOrZero,
        doc("Free space that is left on the journal's disk; below it new requests get 503."),
    ] = 64 * MIB

    def __post_init__(self) -> None:
        """Raises ValueError where fields contradict one another."""
        self.check_http()
        self.check_oidc()
        page = self.page_bytes
        if page and (page < 4096 or page & (page - 1)):
            raise ValueError("page_bytes must be 0 or a power of two of at least 4096")
        if self.max_batch_tokens < self.max_num_seqs:
            raise ValueError("max_batch_tokens must not be below max_num_seqs: raise or lower one")
        if self.max_queue_per_tenant > self.max_queue_total:
            raise ValueError("max_queue_per_tenant must not be above max_queue_total")
        if self.worker_heartbeat_timeout_s <= self.lease_ttl_s:
            raise ValueError("worker_heartbeat_timeout_s must be above 20 x status_interval_s")

    @property
    def data_path(self) -> Path:
        """The data folder, absolute."""
        return Path(self.data_dir).expanduser().resolve()

    @property
    def registry_url(self) -> str:
        """`database_url`, or the data folder's own. May hold a password: not for logs."""
        return self.database_url or f"sqlite:///{self.data_path / 'polyhost.db'}"

    @property
    def lease_ttl_s(self) -> float:
        """How long a worker's offer of capacity holds without news from it."""
        return 20 * self.status_interval_s


class SettingRow(NamedTuple):
    """One line of the settings' reference."""

    name: str
    env: str
    type: str
    default: object
    description: str


def annotations() -> dict[str, Any]:
    """Every field's type with its bounds and description."""
    return get_type_hints(Settings, include_extras=True)


def settings_reference() -> list[SettingRow]:
    """Every field with its variable, type, default and description, in the order above."""
    return list(_reference())


def _reference() -> Iterator[SettingRow]:
    kinds = annotations()
    for field in msgspec.structs.fields(Settings):
        annotation = kinds[field.name]
        description = next(
            meta.description for meta in annotation.__metadata__ if meta.description is not None
        )
        env = ENV_PREFIX + field.name.upper()
        yield SettingRow(
            field.name, env, annotation.__origin__.__name__, field.default, description
        )
