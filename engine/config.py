"""What a worker is started with: two frozen structs, read as JSON.

The supervisor writes them (`python -m engine.worker.main --config '<json WorkerConfig>'`, or `-`
and a line on standard input where the worker starts first), the engine and the worker read them;
nothing here looks at the environment, the device or a file. Every bound of the worker has its name
here. Unknown fields and impossible values are refused at decoding (msgspec.ValidationError), so
that a typo in a setting stops the start and not a request.

Sizes are bytes and times seconds unless the name says otherwise.
"""

import msgspec

_KIB = 1 << 10
_MIB = 1 << 20
MIN_PAGE_BYTES = 64 * _KIB
MAX_PAGE_BYTES = 2 * _MIB
MIN_PAGES = 1024


def auto_page_bytes(arena_bytes: int) -> int:
    """The largest power of two <= 2 MiB that cuts the arena into >= 1024 pages, at least 64 KiB."""
    page_bytes = MAX_PAGE_BYTES
    while page_bytes > MIN_PAGE_BYTES and arena_bytes // page_bytes < MIN_PAGES:
        page_bytes //= 2
    return page_bytes


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory and the batch of one engine."""

    arena_bytes: int
    """The device buffer for the weights and the KV of all models; cut down to whole pages."""
    page_bytes: int = 0
    """Unit of ownership in the arena, a power of two; 0: `auto_page_bytes`."""
    host_tier_bytes: int = 0
    """Room for packs in shared memory; 0: no host tier, loads read the disk."""
    host_tier_when_crowded: bool = False
    """Loads leave a copy there only where several packs are in the catalog and take more than half
    of the arena. Of fewer none has to leave, and where the arena is host memory itself a copy is
    the weights once more, for nothing."""
    shm_dir: str = "/dev/shm"
    """Where the host tier's files lie."""
    shm_prefix: str
    """First part of their names; workers that share packs share the prefix."""
    block_tokens: int = 16
    """Positions of one KV block."""
    max_num_seqs: int = 64
    """Rows of one step at most."""
    max_batch_tokens: int = 1024
    """Token budget of one step, prefill chunks and decodes together; not below `max_num_seqs`."""
    max_waiting: int = 256
    """Requests taken in but not yet running; beyond it Submit is refused as `overloaded`."""
    num_threads: int = 0
    """Threads of one operator; 0: `worker_process.auto_num_threads`."""
    native_kernels: bool = True
    """C++ kernels for bfloat16 models on the CPU, where the installation compiled them."""
    min_run_steps: int = 4
    """Steps a model runs before another may take the device."""
    steps_ahead: int = 0
    """1: the next step is prepared and handed to the device before the last one's tokens are
    known here; 0: after. On the CPU 1 runs the steps in a thread of their own."""
    request_timeout_s: float = 600.0
    """A request that has not ended so long after its Submit ends with reason `timeout`; 0: never.
    A Submit's own `timeout_s` may only be shorter."""
    prefix_cache: bool = True
    """Keep the KV of ended requests for later ones of the same tenant that begin alike."""
    kv_low_watermark: float = 0.02
    """Share of the pages: with fewer free, cached KV is evicted ahead of need."""
    kv_high_watermark: float = 0.05
    """Share of the pages that such an eviction leaves free."""
    tenant_kv_share: float = 0.75
    """Share of the KV memory up to which one tenant's requests start while another tenant has
    unfinished work; one of them always may. What runs may grow beyond it while memory is free, and
    goes first when it is not. 1: no bound."""
    reserve_bytes: int = 0
    """Device memory outside the arena for activations and logits: a model whose steps need more
    is not loaded. 0: not checked."""
    attention_in_place: bool = False
    """Attention reads K and V where they lie, so steps need no memory for copies of them."""
    load_threads: int = 2
    """Threads that read one pack."""
    verify_packs: bool = True
    """Check every chunk's checksum while loading."""
    drain_timeout_s: float = 10.0
    """How long the running requests of a draining model may go on before they are preempted."""
    starvation_s: float = 2.0
    """A load that has waited so long wins over the eviction policy's margin and residence."""
    load_kv_tokens: int = 256
    """Positions of KV that must fit beside a model's weights, or it is not loaded."""

    def __post_init__(self) -> None:
        """Raises ValueError (msgspec.ValidationError when decoding) on impossible values."""
        page = self.page_bytes
        if page and (page < 4 * _KIB or page & (page - 1)):
            raise ValueError("page_bytes must be 0 or a power of two of at least 4096")
        if self.num_pages < 1:
            raise ValueError("arena_bytes must hold at least one page")
        if min(self.host_tier_bytes, self.num_threads, self.drain_timeout_s) < 0:
            raise ValueError("host_tier_bytes, num_threads, drain_timeout_s must not be negative")
        if min(self.starvation_s, self.request_timeout_s, self.reserve_bytes) < 0:
            raise ValueError("starvation_s, request_timeout_s, reserve_bytes: not below 0")
        if not 0 <= self.kv_low_watermark <= self.kv_high_watermark < 1:
            raise ValueError("0 <= kv_low_watermark <= kv_high_watermark < 1 must hold")
        if not 0 < self.tenant_kv_share <= 1:
            raise ValueError("tenant_kv_share must be above 0 and at most 1")
        if self.steps_ahead not in (0, 1):
            raise ValueError("steps_ahead must be 0 or 1")
        if not self.shm_prefix or "/" in self.shm_prefix:
            raise ValueError("shm_prefix must be a file name's first part")
        counts = (
            self.block_tokens,
            self.max_num_seqs,
            self.max_batch_tokens,
            self.max_waiting,
            self.min_run_steps,
            self.load_threads,
            self.load_kv_tokens,
        )
        if min(counts) < 1:
            raise ValueError(
                "block_tokens, max_num_seqs, max_batch_tokens, max_waiting, min_run_steps, "
                "load_threads and load_kv_tokens must be at least 1"
            )
        if self.max_batch_tokens < self.max_num_seqs:
            # Decodes come first: with more of them than the budget has tokens, no prompt would
            # ever be computed.
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must not be below max_num_seqs "
                f"({self.max_num_seqs}), or decodes leave nothing for prompts: raise the one or "
                "lower the other"
            )

    @property
    def resolved_page_bytes(self) -> int:
        """`page_bytes`, or what 0 stands for."""
        return self.page_bytes or auto_page_bytes(self.arena_bytes)

    @property
    def num_pages(self) -> int:
        """Whole pages of the arena."""
        return self.arena_bytes // self.resolved_page_bytes


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker process: its name, its socket, its bounds, its engine."""

    worker_id: str
    endpoint: str
    """`ipc://` path the ROUTER socket binds. (tcp waits for CURVE keys: refused until then.)"""
    engine: EngineConfig
    device: str = "cpu"
    """"cpu"; a GPU by torch's name and its number; or "auto": the first GPU where there is one."""
    device_arena_bytes: int = 0
    """`engine.arena_bytes` where the device is a GPU; 0: what it has free but for the reserve."""
    device_reserve_bytes: int = -1
    """Memory of a GPU outside the arena, for steps; 0 or less: a sixteenth of what is free."""
    graph_bytes: int = -1
    """Memory of a GPU for recorded decode steps, beside both; -1: a part of what is free."""
    parent_pid: int = 0
    """The supervisor; the worker exits when it is gone. 0: started by hand."""
    status_interval_s: float = 0.1
    """WorkerStatus goes to every peer at least this often."""
    lease_ttl_s: float = 2.0
    """How long a dispatcher may act on a lease without hearing from the worker."""
    shutdown_timeout_s: float = 10.0
    """After SIGTERM: how long running requests may go on before they are aborted."""
    integrity_interval_s: float = 10.0
    """An idle worker runs check_integrity() at most this often; 0: never."""
    max_peers: int = 64
    """Gateways connected at once; a Hello beyond it is dropped (`worker_peers_refused`)."""
    max_messages_per_tick: int = 256
    """Messages taken in between two steps, so that a flood cannot stop the steps."""
    max_frame_bytes: int = 16 * _MIB
    """A larger message ends its sender's connection."""
    receive_high_water: int = 4096
    """Messages of one peer waiting for the worker; beyond it the peer's own queue fills."""
    send_high_water: int = 4096
    """Messages waiting for one peer; a peer that lets it fill is given up (`worker_peers_lost`)."""
    max_unacked_finishes: int = 16384
    """Finishes kept for AckUsage; the oldest falls out beyond it (`usage_outbox_dropped`)."""

    def __post_init__(self) -> None:
        """Raises ValueError (msgspec.ValidationError when decoding) on impossible values."""
        if not self.worker_id:
            raise ValueError("worker_id must not be empty")
        if not self.endpoint.startswith("ipc://"):
            raise ValueError("endpoint must be ipc://<path>")
        if not 0 < self.status_interval_s < self.lease_ttl_s:
            raise ValueError("status_interval_s must be positive and below lease_ttl_s")
        if min(self.parent_pid, self.shutdown_timeout_s, self.integrity_interval_s) < 0:
            raise ValueError(
                "parent_pid, shutdown_timeout_s, integrity_interval_s must not be negative"
            )
        bounds = (
            self.max_peers,
            self.max_messages_per_tick,
            self.max_frame_bytes,
            self.receive_high_water,
            self.send_high_water,
            self.max_unacked_finishes,
        )
        if min(bounds) < 1:
            raise ValueError("every bound of the worker must be at least 1")


def decode_worker_config(text: str) -> WorkerConfig:
    """Raises msgspec.ValidationError / DecodeError with the field that is wrong."""
    return msgspec.json.decode(text, type=WorkerConfig)
