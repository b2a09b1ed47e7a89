"""The configuration of a worker: two frozen structs, passed as JSON.

The supervisor writes them (`python -m engine.worker.main --config '<json WorkerConfig>'`, or `-`
and a line on standard input if the worker starts first); the engine and the worker read them.
Nothing here reads the environment, the device or a file. Every limit of the worker is named here.
Decoding refuses unknown fields and impossible values (msgspec.ValidationError), so that a typo in a
setting stops the start and not a request.

Sizes are bytes and times seconds unless the name says otherwise.
"""

from typing import TextIO

import msgspec

_KIB = 1 << 10
_MIB = 1 << 20
MIN_PAGE_BYTES = 64 * _KIB
MAX_PAGE_BYTES = 2 * _MIB
MIN_PAGES = 1024
CURVE_KEY_CHARS = 40
"""Of a key in Z85, as ZeroMQ writes keys."""


def auto_page_bytes(arena_bytes: int) -> int:
    """The largest power of two <= 2 MiB that cuts the arena into >= 1024 pages, at least 64 KiB."""
    page_bytes = MAX_PAGE_BYTES
    while page_bytes > MIN_PAGE_BYTES and arena_bytes // page_bytes < MIN_PAGES:
        page_bytes //= 2
    return page_bytes


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory and the batch of one engine."""

    arena_bytes: int
    """Device memory for the weights and KV cache of all models; rounded down to whole pages."""
    page_bytes: int = 0
    """Size of a memory page in the arena, a power of two of at least 4096. 0: `auto_page_bytes`
    chooses."""
    host_tier_bytes: int = 0
    """Shared memory for copies of packs. 0: none; loads read the disk."""
    host_tier_when_crowded: bool = False
    """Keep copies of packs in the host tier only if there are several packs and they take more than
    half of the arena. With fewer packs nothing has to be evicted, and on a CPU a copy would only
    take the memory twice. The server sets this on a CPU if its `host_tier_bytes` is -1."""
    shm_dir: str = "/dev/shm"
    """Folder for the host tier's files."""
    shm_prefix: str
    """Prefix of their names. Workers that share packs use the same prefix."""
    block_tokens: int = 16
    """Number of token positions in one KV block."""
    max_num_seqs: int = 64
    """Maximum number of sequences in one step. 0: by the device, when it is opened
    (`engine/worker/step_limits.py`)."""
    max_batch_tokens: int = 1024
    """Maximum number of tokens in one step, prefill chunks and decodes together. Must not be below
    `max_num_seqs`. 0: by the device."""
    max_waiting: int = 256
    """Maximum number of accepted requests that are not running yet. Further Submits are refused as
    `overloaded`."""
    num_threads: int = 0
    """CPU threads for one operator. 0: `auto_num_threads` chooses."""
    native_kernels: bool = True
    """Use C++ kernels for bfloat16 models on the CPU, if the installation has compiled them."""
    min_run_steps: int = 4
    """Minimum number of steps a model runs before another may use the device."""
    steps_ahead: int = 0
    """1: the next step is prepared and launched before the tokens of the last one are known. 0:
    only once they are known. On the CPU, 1 runs the steps in their own thread."""
    request_timeout_s: float = 600.0
    """A request still unfinished this long after its Submit ends with reason `timeout`. 0: never. A
    Submit's own `timeout_s` can only be shorter."""
    prefix_cache: bool = True
    """Keep the KV cache of finished requests and reuse it for the same tenant's requests that begin
    with the same tokens."""
    kv_low_watermark: float = 0.02
    """If the share of free pages falls below this, cached KV is evicted in advance."""
    kv_high_watermark: float = 0.05
    """Share of free pages at which such an eviction stops."""
    tenant_kv_share: float = 0.75
    """A tenant's requests start only while they use at most this share of the KV memory, if another
    tenant has unfinished work. One request may always run. Running requests may grow beyond it
    while memory is free, and are preempted first when it is not. 1: unlimited."""
    reserve_bytes: int = 0
    """Device memory outside the arena for activations and logits. A model whose steps need more is
    not loaded. 0: not checked."""
    attention_in_place: bool = False
    """Attention reads K and V in place, so that steps need no memory for copies. A worker sets this
    on a GPU."""
    load_threads: int = 2
    """Threads that read one pack."""
    verify_packs: bool = True
    """Verify the checksum of every chunk while loading."""
    drain_timeout_s: float = 10.0
    """How long running requests of a draining model may continue before they are preempted."""
    starvation_s: float = 2.0
    """After waiting this long, a load may evict models regardless of the eviction policy's margin
    and minimum residence."""
    load_kv_tokens: int = 256
    """Number of KV positions that must fit beside a model's weights. Otherwise the model is not
    loaded."""

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
            raise ValueError("starvation_s, request_timeout_s, reserve_bytes must not be negative")
        if not 0 <= self.kv_low_watermark <= self.kv_high_watermark < 1:
            raise ValueError("0 <= kv_low_watermark <= kv_high_watermark < 1 must hold")
        if not 0 < self.tenant_kv_share <= 1:
            raise ValueError("tenant_kv_share must be above 0 and at most 1")
        if self.steps_ahead not in (0, 1):
            raise ValueError("steps_ahead must be 0 or 1")
        if not self.shm_prefix or "/" in self.shm_prefix:
            raise ValueError("shm_prefix must not be empty or contain a slash")
        counts = (
            self.block_tokens,
            self.max_waiting,
            self.min_run_steps,
            self.load_threads,
            self.load_kv_tokens,
        )
        if min(counts) < 1:
            raise ValueError(
                "block_tokens, max_waiting, min_run_steps, load_threads and load_kv_tokens must be "
                "at least 1"
            )
        if min(self.max_num_seqs, self.max_batch_tokens) < 0:
            raise ValueError("max_num_seqs and max_batch_tokens must not be negative")
        if self.max_batch_tokens and self.max_batch_tokens < self.max_num_seqs:
            # Decodes come first: with more of them than the budget has tokens, no prompt would
            # ever be computed.
            raise ValueError(
                f"max_batch_tokens ({self.max_batch_tokens}) must not be below max_num_seqs "
                f"({self.max_num_seqs}), or decodes leave nothing for prompts: raise the first or "
                "lower the second"
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
    """Address of the ROUTER socket: `ipc://` and a path, or `tcp://`, an address of this machine
    and a port, for servers on other machines. tcp needs `secret_key` and `allowed_keys`."""
    secret_key: str = ""
    """Secret half of the worker's CURVE key pair, in Z85. It encrypts every connection by tcp."""
    allowed_keys: list[str] = []
    """Public CURVE keys, in Z85, of the servers that may connect by tcp. Nobody else gets an
    answer."""
    packs_dir: str = ""
    """Folder of this machine that has the packs, by the names of their folders. Empty: they lie
    where the catalog says."""
    engine: EngineConfig
    device: str = "cpu"
    """`cpu`; a GPU by its PyTorch name and number, separated by a colon; or `auto`: the first GPU
    if there is one, else the CPU."""
    device_arena_bytes: int = 0
    """`arena_bytes` on a GPU. 0: all free memory except the reserve and the recorded steps."""
    device_reserve_bytes: int = -1
    """GPU memory outside the arena for steps. 0 or less: a sixteenth of the free memory."""
    graph_bytes: int = -1
    """GPU memory for recorded steps, in addition to both. -1: a thirty-second of the free
    memory."""
    cpus: list[int] = []
    """Logical processors that the worker's threads keep to. Empty: any."""
    num_workers: int = 1
    """Number of workers on this machine, including this one. They share its cores."""
    parent_pid: int = 0
    """Process ID of the supervisor; the worker exits when that process is gone. 0: the worker was
    started by hand."""
    status_interval_s: float = 0.1
    """Maximum time between two WorkerStatus messages to each peer."""
    lease_ttl_s: float = 2.0
    """How long a dispatcher may use a lease without hearing from the worker."""
    shutdown_timeout_s: float = 10.0
    """How long running requests may continue after SIGTERM before they are aborted."""
    integrity_interval_s: float = 10.0
    """Minimum time between two runs of check_integrity() in an idle worker. 0: never."""
    max_peers: int = 64
    """Maximum number of connected gateways. A further Hello is dropped (`worker_peers_refused`)."""
    max_messages_per_tick: int = 256
    """Maximum number of messages handled between two steps, so that a flood of messages cannot stop
    the steps."""
    max_frame_bytes: int = 16 * _MIB
    """Maximum size of a message. The sender of a larger one is disconnected."""
    receive_high_water: int = 4096
    """Maximum number of received messages per peer that wait for the worker. Beyond it, messages
    wait in the peer's own queue."""
    send_high_water: int = 4096
    """Maximum number of messages waiting to be sent to one peer. A peer that reaches it is
    disconnected (`worker_peers_lost`)."""
    max_unacked_finishes: int = 16384
    """Maximum number of Finishes kept until AckUsage. Beyond it, the oldest is dropped
    (`usage_outbox_dropped`)."""

    def __post_init__(self) -> None:
        """Raises ValueError (msgspec.ValidationError when decoding) on impossible values."""
        if not self.worker_id:
            raise ValueError("worker_id must not be empty")
        if not self.endpoint.startswith(("ipc://", "tcp://")):
            raise ValueError("endpoint must be ipc://<path> or tcp://<address>:<port>")
        keys = [self.secret_key, *self.allowed_keys] if self.is_remote else []
        if self.is_remote and (len(keys) < 2 or any(len(key) != CURVE_KEY_CHARS for key in keys)):
            raise ValueError(
                "a tcp endpoint needs secret_key and at least one of allowed_keys, "
                f"each of {CURVE_KEY_CHARS} characters"
            )
        if min(self.cpus, default=0) < 0 or self.num_workers < 1:
            raise ValueError("cpus must not be negative and num_workers at least 1")
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
            raise ValueError(
                "max_peers, max_messages_per_tick, max_frame_bytes, receive_high_water, "
                "send_high_water and max_unacked_finishes must be at least 1"
            )

    @property
    def is_remote(self) -> bool:
        """Servers of other machines may connect."""
        return self.endpoint.startswith("tcp://")


def decode_worker_config(text: str) -> WorkerConfig:
    """Raises msgspec.ValidationError / DecodeError with the field that is wrong."""
    return msgspec.json.decode(text, type=WorkerConfig)


def read_config(argument: str, given: TextIO) -> str:
    """A WorkerConfig as JSON: `argument`, or the first line of `given` where that is "-".

    Empty where the process that was to write the line is gone.
    """
    if argument != "-":
        return argument
    line = given.readline()
    return line if line.endswith("\n") else ""
