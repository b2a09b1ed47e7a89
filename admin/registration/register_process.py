"""The registering subprocess, as the gateway sees it: its command line, its lines, its end.

`python -m engine.registration.main` needs torch, so it is a process of its own that prints one
JSON object a line. It ends when its parent is gone, cleans up on SIGTERM, and holds packs.lock
(shared) by a descriptor it inherits. What its lines mean for the catalog is `registrar.py`'s.
"""

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec

from admin.context.registration_files import DOWNLOADS_FOLDER, LOGS_FOLDER, is_hub
from gateway.settings.config import hub_environment, worker_environment
from gateway.settings.settings import PACKS_FOLDER, Settings
from registry.models.catalog import ModelRecord, ModelTask

REGISTER_COMMAND = (sys.executable, "-m", "engine.registration.main")
DEFAULT_REVISION = "main"
INTERNAL_ERROR = "internal_error"
_FETCHING = frozenset({"--hub", "--search"})
LOG_FILE = "register.log"
MAX_LOG_BYTES = 1 << 20
# Beyond it the process is killed, and somebody else clears up (registration_files.py).
STOP_TIMEOUT_S = 0.7


class HostingOption(msgspec.Struct, frozen=True):
    """What a dtype takes, and how much rounding to it adds (HostingChoice of the engine).

    `kv_bytes`: of a sequence of 1,000 tokens. `fits`: None where the arena's size is not known.
    """

    dtype: str
    weight_bytes: int
    added_error: float
    kv_bytes: int = 0
    fits: bool | None = None


class HubModel(msgspec.Struct, frozen=True):
    """What a hub says of a model (engine/registration/hub_models.py); empty where it does not."""

    id: str = ""
    license: str = ""
    gated: str = ""
    downloads: int = 0
    likes: int = 0
    task: str = ""
    base_model: str = ""
    model_type: str = ""
    architectures: list[str] = []
    num_parameters: int = 0
    format: str = ""
    method: str = ""


class RegisterEvent(msgspec.Struct, frozen=True):
    """One line of the subprocess. Unknown fields are passed over.

    progress, resolved (a hub id's commit, and what the hub says), described (what its config.json
    calls it), preflight (what it is and will take), checked, ready, refused; of a search: found.
    """

    event: str
    source: str
    phase: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    commit: str = ""
    hub: HubModel | None = None
    model_type: str = ""
    text_type: str = ""
    architecture: str = ""
    wrapper: str = ""
    hosted_as: str = ""
    num_parameters: int = 0
    download_bytes: int = 0
    pack_bytes: int = 0
    free_bytes: int = 0
    used_bytes: int = 0
    source_format: str = ""
    choices: list[HostingOption] = []
    pack_dir: str = ""
    revision: str = ""
    family: str = ""
    dtype: str = ""
    max_context: int = 0
    vocab_size: int = 0
    weight_bytes: int = 0
    task: ModelTask = "generate"
    dim: int = 0
    labels: list[str] = []
    multi_label: bool = False
    parity_error: float | None = None
    verdict: str = ""
    reason: str = ""
    code: str = ""
    message: str = ""


def source_name(model: ModelRecord) -> str:
    """How the subprocess calls it: the folder, or REPO@REVISION. A commit once known stays."""
    if not is_hub(model.source):
        return model.source
    return f"{model.source}@{model.source_commit or model.requested_revision or DEFAULT_REVISION}"


def arguments(
    settings: Settings, data: Path, dtype: str, models: Iterable[ModelRecord]
) -> list[str]:
    """What follows the command for these rows. `data`: the data folder."""
    given = options(settings, data, dtype)
    for name, hub in dict.fromkeys((source_name(m), is_hub(m.source)) for m in models):
        given += ["--hub" if hub else "--source", name]
    return given


def options(settings: Settings, data: Path, dtype: str) -> list[str]:
    """What holds whatever is registered."""
    given = ["--dest", str(data / PACKS_FOLDER), "--downloads", str(data / DOWNLOADS_FOLDER)]
    given += ["--dtype", dtype, "--quota-bytes", str(settings.packs_quota_bytes)]
    given += ["--arena-bytes", str(settings.device_budget_bytes)]
    given += ["--timeout-s", str(settings.hub_timeout_s), "--parent-pid", str(os.getpid())]
    return given


def environment(settings: Settings, command: Sequence[str]) -> dict[str, str]:
    """A worker's; where the command fetches, with the hub's address and token, which are on no
    command line."""
    variables = worker_environment(settings.num_threads)
    if _FETCHING.isdisjoint(word.partition("=")[0] for word in command):
        return variables
    variables |= hub_environment()
    for name, value in (("HF_ENDPOINT", settings.hub_endpoint), ("HF_TOKEN", settings.hub_token)):
        if value:
            variables[name] = value
    return variables


@contextmanager
def started(
    command: Sequence[str], settings: Settings, errors: IO[bytes], lock: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The subprocess, surely ended when the block is left. `lock`: of what it writes to."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        pass_fds=() if lock is None else (lock,),
        env=environment(settings, command),
    ) as process:
        try:
            yield process
            process.wait()
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Let it clean up, or kill it."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def read_events(
    process: subprocess.Popen[bytes],
) -> tuple[queue.SimpleQueue[RegisterEvent | None], threading.Thread]:
    """Its events from a thread, None at the end. A line that is no event is passed over."""
    events: queue.SimpleQueue[RegisterEvent | None] = queue.SimpleQueue()
    stream = process.stdout
    assert stream is not None

    def read() -> None:
        decoder = msgspec.json.Decoder(RegisterEvent)
        for line in stream:
            try:
                events.put(decoder.decode(line))
            except msgspec.DecodeError:
                continue
        events.put(None)

    reader = threading.Thread(target=read, name="register-events", daemon=True)
    reader.start()
    return events, reader


def keep_log(errors: IO[bytes], data: Path) -> None:
    """Standard error of a subprocess that met a bug or died, for whoever reports it: the latest."""
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - MAX_LOG_BYTES))
    folder = data / LOGS_FOLDER
    with suppress(OSError):  # the disk may be why; the catalog has the reason in a line
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOG_FILE).write_bytes(errors.read())


def last_words(errors: IO[bytes]) -> str:
    """The last line it wrote to standard error."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
