"""Settings of workers, and of registering the models that they run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from gateway.settings.base_settings import setting

_NAMED = r"auto|cpu|(?!cpu:)[a-z]+:(?:0|[1-9][0-9]*)"
DEVICE = rf"\A(?:{_NAMED})\Z"
DEVICE_OR_NONE = rf"\A(?:{_NAMED})?\Z"
LABEL = r"\A[ -~]{1,64}\Z"
MAX_LABELS = 16
MAX_WORKERS = 64
MAX_PORT = 65535
NAME_OR_NONE = r"\A(?:(?!cache-)[a-z0-9][a-z0-9._-]{0,30})?\Z"
OTHERS_NAMES = frozenset({"dispatcher", "embedder-0", "hub", "operator"})
"""Sockets beside the workers' have these."""
TCP_OR_NONE = r"\A(?:tcp://[^\s/]+:[0-9]{1,5})?\Z"
CURVE_KEY = r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}"
CURVE_KEY_OR_NONE = rf"\A(?:{CURVE_KEY})?\Z"


class WorkerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table `[[workers]]` of polyhost.toml. Empty and 0: as the settings say for every worker.

    device        as the setting `device`
    memory_bytes  of its arena, as `device_budget_bytes`
    threads       as `num_threads`
    labels        words of the operator's that `polyhost workers list` shows
    name          what commands, pages and metrics call it; without one, worker-N by its place
    endpoint      of a worker that runs on another machine (`polyhost workers serve`); device,
                  memory and threads are set there
    public_key    of that machine
    """

    device: Annotated[str, msgspec.Meta(pattern=DEVICE_OR_NONE)] = ""
    memory_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    labels: Annotated[
        tuple[Annotated[str, msgspec.Meta(pattern=LABEL)], ...], msgspec.Meta(max_length=MAX_LABELS)
    ] = ()
    name: Annotated[str, msgspec.Meta(pattern=NAME_OR_NONE)] = ""
    endpoint: Annotated[str, msgspec.Meta(pattern=TCP_OR_NONE)] = ""
    public_key: Annotated[str, msgspec.Meta(pattern=CURVE_KEY_OR_NONE)] = ""

    def __post_init__(self) -> None:
        """Raises ValueError where one of the two is missing, or what is set is another machine's to
        say."""
        if bool(self.endpoint) != bool(self.public_key):
            raise ValueError(
                "endpoint and public_key belong together: set both as `polyhost workers serve` "
                "on the other machine prints them"
            )
        if self.endpoint and not 0 < int(self.endpoint.rpartition(":")[2]) <= MAX_PORT:
            raise ValueError(f"the port of {self.endpoint} must be between 1 and {MAX_PORT}")
        if self.endpoint and (self.device or self.memory_bytes or self.threads):
            raise ValueError(
                "device, memory_bytes and threads of a worker with an endpoint are set on its "
                "machine: remove them"
            )


def worker_names(specs: Sequence[WorkerSpec]) -> list[str]:
    """Of the workers that are listed like this. A place is a poor name where tables come and go:
    what was ordered of `worker-1` would then hold for another."""
    return [spec.name or f"worker-{index}" for index, spec in enumerate(specs)]


@dataclass(frozen=True, kw_only=True)
class RegistrationSettings:
    """Where models come from, and what is kept of them."""

    hub_endpoint: str = setting("", "URL of the model hub. Empty: HF_ENDPOINT, or huggingface.co.")
    hub_token: str = setting(
        "",
        "Access token for the model hub. Empty: HF_TOKEN, or the token saved by `hf auth login`.",
    )
    hub_timeout_s: float = setting(
        30.0, "A download fails if the model hub sends nothing for this long.", gt=0.0
    )
    packs_quota_bytes: int = setting(
        0, "Maximum disk space for packs and downloads together. 0: unlimited.", ge=0
    )
    download_keep_s: float = setting(
        86400.0,
        "How long the files of an interrupted download are kept, so that a retry can resume it.",
        ge=0,
    )
    model_revisions_kept: int = setting(
        3,
        "Number of revisions kept per model, including the current one. You can roll back to any "
        "of them.",
        ge=1,
    )


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """The device, its memory, and the process around it."""

    device: str = setting(
        "cpu",
        "Device that runs the models: `cpu`; a GPU by its PyTorch name and number, separated by "
        "a colon; or `auto`: GPUs if there are some, else the CPU.",
        pattern=DEVICE,
    )
    num_workers: int = setting(
        0,
        "Number of worker processes, each with a device and memory of its own. 0: as many as "
        "`workers` lists; without it, with `device` auto one per GPU, with `device` cpu one per "
        "NUMA node. Several workers on the CPU share its cores and the memory chosen for one.",
        ge=0,
        le=MAX_WORKERS,
    )
    workers: tuple[WorkerSpec, ...] = setting(
        (),
        "The workers one by one, as tables `[[workers]]` in polyhost.toml with `device`, "
        "`memory_bytes` (of its arena), `threads`, `labels` and `name`. What a table leaves out "
        "is as the other settings say. A table with `endpoint` and `public_key` is a worker on "
        "another machine.",
        max_length=MAX_WORKERS,
    )
    device_budget_bytes: int = setting(
        0,
        "Memory for the weights and KV cache of all models (the arena), for each worker. 0: a "
        "quarter of the memory free at startup, divided by the workers on the CPU; with `demo` "
        "and no other models, just enough for two of the three; on a GPU, all free memory except "
        "the reserve and the recorded steps.",
        ge=0,
    )
    page_bytes: int = setting(
        0,
        "Size of a memory page in the arena, a power of two of at least 4096. 0: chosen from the "
        "size of the arena.",
        ge=0,
    )
    device_reserve_bytes: int = setting(
        -1,
        "Memory outside the arena for activations and logits. A model whose steps may need more "
        "is not loaded. 0: not checked. -1: half of the memory that the arenas and the host tier "
        "leave free, divided by the workers on the CPU. On a GPU, both mean a sixteenth of its "
        "free memory.",
        ge=-1,
    )
    host_tier_bytes: int = setting(
        -1,
        "Shared memory that keeps copies of packs for fast loading (the host tier), one for all "
        "workers. 0: none. -1: "
        "an eighth of the free memory, but at most half of /dev/shm; with `device` cpu, it is "
        "used only if there are several packs and they take more than half of the arena.",
        ge=-1,
    )
    num_threads: int = setting(
        0, "CPU threads for one operator, in each worker. 0: chosen automatically.", ge=0
    )
    native_kernels: bool = setting(True, "Use C++ kernels on the CPU for the models they support.")
    load_threads: int = setting(2, "Threads that read one pack.", ge=1)
    max_num_seqs: int = setting(
        0,
        "Maximum number of sequences in one engine step. 0: 64 on a CPU, 64 to 256 "
        "on a GPU, by its memory.",
        ge=0,
    )
    max_batch_tokens: int = setting(
        0,
        "Maximum number of tokens in one engine step, prefill and decode together. Must not be "
        "below `max_num_seqs`. 0: 1,024 on a CPU, 1,024 to 8,192 on a GPU, by its memory.",
        ge=0,
    )
    prefix_cache: bool = setting(
        True,
        "Keep the KV cache of finished requests and reuse it for the same tenant's requests that "
        "begin with the same tokens.",
    )
    tenant_kv_share: float = setting(
        0.75,
        "Maximum share of a worker's KV memory for one tenant's requests while another tenant "
        "has work there. One request may always run. 1: unlimited.",
        gt=0.0,
        le=1.0,
    )
    verify_packs: bool = setting(
        True, "Verify the checksum of every chunk whenever a model is loaded."
    )
    status_interval_s: float = setting(
        0.1,
        "How often a worker sends its status. Its leases are valid for twenty times as long.",
        gt=0.0,
    )
    worker_heartbeat_timeout_s: float = setting(
        15.0, "A worker that has sent nothing for this long counts as lost.", gt=0.0
    )
    worker_restart_backoff_s: float = setting(
        0.2,
        "Pause before a dead worker is restarted. It doubles with every further restart, up to "
        "30 s.",
        gt=0.0,
    )

    worker_drain_timeout_s: float = setting(
        30.0,
        "How long running requests may continue on a worker that is drained or restarted by an "
        "operator. After that they continue on another worker.",
        gt=0.0,
    )

    @property
    def lease_ttl_s(self) -> float:
        """How long a worker's offer of capacity holds without news from it."""
        return 20 * self.status_interval_s

    @property
    def worker_labels(self) -> dict[str, tuple[str, ...]]:
        """By worker, of those that have some."""
        named = zip(worker_names(self.workers), self.workers, strict=True)
        return {name: spec.labels for name, spec in named if spec.labels}

    def check_worker(self) -> None:
        """Raises ValueError where fields contradict one another."""
        names = worker_names(self.workers)
        if len(set(names)) < len(names) or not OTHERS_NAMES.isdisjoint(names):
            raise ValueError(
                "workers must have different names, and none of "
                f"{', '.join(sorted(OTHERS_NAMES))}: change `name` in [[workers]]"
            )
        listed = [spec.endpoint for spec in self.workers if spec.endpoint]
        if len(set(listed)) < len(listed):
            raise ValueError(
                "workers must have different endpoints: every worker of a machine has a port of "
                "its own"
            )
        page = self.page_bytes
        if page and (page < 4096 or page & (page - 1)):
            raise ValueError("page_bytes must be 0 or a power of two of at least 4096")
        if self.max_batch_tokens and self.max_batch_tokens < self.max_num_seqs:
            raise ValueError("max_batch_tokens must not be below max_num_seqs: raise it")
        if self.worker_heartbeat_timeout_s <= self.lease_ttl_s:
            raise ValueError(
                "worker_heartbeat_timeout_s must be above 20 x status_interval_s: raise it"
            )
