"""Every setting of a server: names, types, bounds, defaults, and what each does.

Where the values come from is config.py's. Every field carries its description and unit;
`settings_reference()` lists them, and docs/ is tested against it. Sizes are bytes and times
seconds, as the names say.
"""

import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

ENV_PREFIX = "POLYHOST_"
_MIB = 1 << 20

_Count = msgspec.Meta(ge=1)
_CountOrZero = msgspec.Meta(ge=0)
_Seconds = msgspec.Meta(gt=0.0)


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


def _check_proxy(text: str) -> None:
    """Raises ValueError: a name would be compared with addresses, and never be one."""
    if text == "*":
        return
    try:
        ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f"trusted_proxies: {error}") from error


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How this server runs. Read once at start."""

    # The server.
    host: Annotated[str, _doc("Address to listen on; the default answers this machine only.")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int,
        msgspec.Meta(ge=0, le=65535),
        _doc("TCP port; 0 lets the system choose one, which the start block prints."),
    ] = 8000
    data_dir: Annotated[
        str, _doc("Folder of the database, the packs, the sockets and the lock file.")
    ] = "data"
    demo: Annotated[
        bool, _doc("Register the three demo models and the tenant `demo` with a key.")
    ] = False
    demo_api_key: Annotated[
        str, _doc("The demo tenant's key; empty: one is generated once and printed.")
    ] = ""
    shutdown_timeout_s: Annotated[
        float, _Seconds, _doc("How long running requests may go on after SIGTERM.")
    ] = 20.0
    shutdown_notice_s: Annotated[
        float,
        _CountOrZero,
        _doc("How long /health/ready says 503 before the server takes no more connections."),
    ] = 0.5
    trusted_proxies: Annotated[
        str,
        _doc(
            "Addresses and networks of proxies in front, with commas: X-Forwarded-For of these is "
            "believed. `*`: anybody's. Empty: nobody's."
        ),
    ] = ""
    max_body_bytes: Annotated[int, _Count, _doc("Largest request body; beyond it 413.")] = 8 * _MIB
    max_head_bytes: Annotated[
        int, _Count, _doc("Largest head of a request: its address and headers; beyond it 431.")
    ] = 65_536
    receive_timeout_s: Annotated[
        float,
        _Seconds,
        _doc(
            "How long a request's head may take to come, beyond it the connection is closed; "
            "and its body, beyond it 408."
        ),
    ] = 60.0
    default_max_tokens: Annotated[
        int, _Count, _doc("Tokens generated at most where a request names no bound.")
    ] = 256
    max_encode_inputs: Annotated[
        int,
        _Count,
        _doc("Inputs of one request to embed or classify, or documents to rerank, at most."),
    ] = 2048
    max_encode_tokens: Annotated[
        int, _Count, _doc("Tokens of all inputs of such a request together at most.")
    ] = 300_000
    max_encode_answer_bytes: Annotated[
        int,
        _Count,
        _doc(
            "Answers to one tenant's such requests, from the first row until the client has read "
            "all of it; beyond it 429 queue_full. One request always may."
        ),
    ] = 256 * _MIB
    encode_piece_tokens: Annotated[
        int,
        msgspec.Meta(ge=1, le=262_144),
        _doc(
            "Tokens of such a request that go to a worker at one time: whole inputs, two pieces "
            "queued at once, between which other requests get their turn."
        ),
    ] = 4096
    max_choices: Annotated[
        int, _Count, _doc("Answers that one request may ask for (`n`) at most.")
    ] = 16
    max_stream_buffer_tokens: Annotated[
        int,
        _Count,
        _doc("Tokens waiting for a client that does not read; beyond it the request is aborted."),
    ] = 2048
    stream_write_timeout_s: Annotated[
        float,
        _Seconds,
        _doc("How long one event may take to send; beyond it the client is cut off."),
    ] = 30.0
    prepare_threads: Annotated[
        int, _Count, _doc("Threads that render chat templates and tokenize.")
    ] = 2
    max_prepare_pending: Annotated[
        int, _Count, _doc("Requests being prepared or waiting for it; beyond it 429 queue_full.")
    ] = 256
    max_tokenizers: Annotated[
        int, _Count, _doc("Models whose tokenizer and template are kept in memory.")
    ] = 32
    cache_max_bytes: Annotated[
        int, _CountOrZero, _doc("Answers kept for keys and requests that turn the cache on.")
    ] = 64 * _MIB
    cache_ttl_s: Annotated[
        float, _Seconds, _doc("How long an answer is kept, however often it is asked for again.")
    ] = 3600.0
    key_cache_poll_s: Annotated[
        float,
        _Seconds,
        _doc("How often changes of keys, models, limits and prices are read."),
    ] = 0.5

    # The queue.
    max_queue_per_tenant: Annotated[
        int, _Count, _doc("Requests of one tenant waiting for a worker; beyond it 429 queue_full.")
    ] = 256
    max_queue_total: Annotated[
        int, _Count, _doc("Requests of all tenants waiting for a worker; beyond it 429 queue_full.")
    ] = 1024
    queue_timeout_s: Annotated[
        float, _Seconds, _doc("How long a request may wait for a worker; beyond it 503.")
    ] = 60.0
    request_timeout_s: Annotated[
        float,
        _Seconds,
        _doc(
            "How long a request may take from its arrival in the queue to its last token; beyond "
            "it 504, or an error event after the first token."
        ),
    ] = 600.0
    fair_share_max_lead_s: Annotated[
        float,
        _Seconds,
        _doc("Service that a tenant may be ahead of the others when it comes back, at most."),
    ] = 30.0
    max_load_share: Annotated[
        float,
        msgspec.Meta(gt=0.0, le=1.0),
        _doc("Share of time that loads which push out a model in demand may take, per worker."),
    ] = 0.2
    gather_wait_s: Annotated[
        float,
        _CountOrZero,
        _doc(
            "How long requests may gather for a model whose load would push out one in demand, "
            "before the load begins; 0: they do not."
        ),
    ] = 2.0

    # Registration.
    hub_endpoint: Annotated[str, _doc("Model hub; empty: HF_ENDPOINT, or huggingface.co.")] = ""
    hub_token: Annotated[str, _doc("Its token; empty: HF_TOKEN, or of `hf auth login`.")] = ""
    hub_timeout_s: Annotated[float, _Seconds, _doc("How long the hub may send nothing.")] = 30.0
    packs_quota_bytes: Annotated[
        int, _CountOrZero, _doc("Disk that packs and downloads may take together; 0: no bound.")
    ] = 0
    download_keep_s: Annotated[
        float, _CountOrZero, _doc("How long an interrupted download waits to be retried.")
    ] = 86400.0
    model_revisions_kept: Annotated[
        int, _Count, _doc("Revisions of a model to roll back to, the current one included.")
    ] = 3

    # The worker.
    device_budget_bytes: Annotated[
        int,
        _CountOrZero,
        _doc(
            "Arena for the weights and the KV of all models; 0: a quarter of the memory free at "
            "start; with `demo` and no other models, just enough for two of the three."
        ),
    ] = 0
    page_bytes: Annotated[
        int, _CountOrZero, _doc("Unit of ownership in the arena, a power of two; 0: chosen.")
    ] = 0
    device_reserve_bytes: Annotated[
        int,
        msgspec.Meta(ge=-1),
        _doc(
            "Memory beside the arena for activations and logits: a model whose steps could need "
            "more is not loaded. 0: not checked; -1: half of what arena and host tier leave free."
        ),
    ] = -1
    host_tier_bytes: Annotated[
        int,
        msgspec.Meta(ge=-1),
        _doc(
            "Shared memory that keeps packs warm; 0: none; -1: an eighth of the free memory, and "
            "at most half of what /dev/shm has."
        ),
    ] = -1
    num_threads: Annotated[
        int, _CountOrZero, _doc("Threads of one operator on the CPU; 0: chosen by the worker.")
    ] = 0
    load_threads: Annotated[int, _Count, _doc("Threads that read one pack.")] = 2
    max_num_seqs: Annotated[int, _Count, _doc("Rows of one engine step at most.")] = 64
    max_batch_tokens: Annotated[
        int, _Count, _doc("Token budget of one engine step, prefill and decode together.")
    ] = 1024
    prefix_cache: Annotated[
        bool, _doc("Keep the KV of ended requests for those of the same tenant that begin alike.")
    ] = True
    tenant_kv_share: Annotated[
        float,
        msgspec.Meta(gt=0.0, le=1.0),
        _doc(
            "Share of a worker's KV memory that one tenant's requests may take while another "
            "tenant has work there; one request always may run. 1: no bound."
        ),
    ] = 0.75
    verify_packs: Annotated[
        bool, _doc("Check every chunk's checksum whenever a model is loaded.")
    ] = True
    status_interval_s: Annotated[
        float, _Seconds, _doc("Heartbeat of a worker; its leases live twenty times as long.")
    ] = 0.1
    worker_heartbeat_timeout_s: Annotated[
        float, _Seconds, _doc("Silence after which a worker counts as lost.")
    ] = 15.0
    worker_restart_backoff_s: Annotated[
        float, _Seconds, _doc("First pause before a dead worker is restarted; doubles up to 30 s.")
    ] = 0.2

    # The ledger.
    ledger_flush_interval_s: Annotated[
        float, _CountOrZero, _doc("How long a record waits for company before it is written.")
    ] = 0.003
    ledger_max_batch: Annotated[int, _Count, _doc("Records of one database commit at most.")] = 256
    ledger_max_pending: Annotated[
        int, _Count, _doc("Records not yet durable; beyond it new requests are refused with 503.")
    ] = 10_000
    ledger_open_timeout_s: Annotated[
        float, _Seconds, _doc("How long a request may wait for its open record; beyond it 503.")
    ] = 10.0
    ledger_recovery_wait_s: Annotated[
        float,
        _CountOrZero,
        _doc("How long a start waits for workers to tell what an earlier server's requests used."),
    ] = 3.0

    def __post_init__(self) -> None:
        """Raises ValueError where fields contradict one another."""
        page = self.page_bytes
        if page and (page < 4096 or page & (page - 1)):
            raise ValueError("page_bytes must be 0 or a power of two of at least 4096")
        if self.max_batch_tokens < self.max_num_seqs:
            raise ValueError("max_batch_tokens must not be below max_num_seqs: raise or lower one")
        if self.max_queue_per_tenant > self.max_queue_total:
            raise ValueError("max_queue_per_tenant must not be above max_queue_total")
        if self.worker_heartbeat_timeout_s <= self.lease_ttl_s:
            raise ValueError("worker_heartbeat_timeout_s must be above 20 x status_interval_s")
        for proxy in filter(None, (p.strip() for p in self.trusted_proxies.split(","))):
            _check_proxy(proxy)

    @property
    def data_path(self) -> Path:
        """The data folder, absolute."""
        return Path(self.data_dir).expanduser().resolve()

    @property
    def database_url(self) -> str:
        """SQLAlchemy's URL of the registry."""
        return f"sqlite:///{self.data_path / 'polyhost.db'}"

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


def settings_reference() -> list[SettingRow]:
    """Every field with its variable, type, default and description, in the order above."""
    return list(_reference())


def _reference() -> Iterator[SettingRow]:
    annotations = Settings.__annotations__
    for field in msgspec.structs.fields(Settings):
        annotation = annotations[field.name]
        description = next(
            meta.description for meta in annotation.__metadata__ if meta.description is not None
        )
        env = ENV_PREFIX + field.name.upper()
        yield SettingRow(
            field.name, env, annotation.__origin__.__name__, field.default, description
        )
