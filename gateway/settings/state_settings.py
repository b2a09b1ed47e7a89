"""Settings of what the API keeps for tenants: stored responses, files, what callers keep sealed."""

from dataclasses import dataclass
from pathlib import Path

from gateway.settings.base_settings import MIB, setting

OBJECTS_FOLDER = "objects"
"""Inside the data folder."""
SEAL_KEYS_FILE = "seal-keys.json"
DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class StateSettings:
    """Stored responses."""

    response_retention_days: int = setting(
        30,
        "How long responses are stored, in days, and conversations after their last change. A "
        "tenant may have less of its own. 0: nothing is stored, and what is stored is hidden and "
        "deleted.",
        ge=0,
        le=3650,
    )
    max_stored_responses: int = setting(
        100_000,
        "Maximum number of stored responses and conversations per tenant. Beyond it, answers are "
        "given and not stored; background responses and new conversations get 429 "
        "insufficient_quota.",
        ge=1,
    )
    objects_dir: str = setting(
        "",
        "Folder for stored responses, conversations and files. Servers that share a database need "
        "one folder that all of them see. Empty: `objects` in the data folder.",
    )
    state_threads: int = setting(
        4,
        "Threads of each gateway process that read stored responses; as many others write them.",
        ge=1,
    )
    max_state_waiting: int = setting(
        256,
        "Maximum number of requests for stored responses that wait for such a thread. Further "
        "requests get 429 queue_full.",
        ge=1,
    )
    state_sweep_interval_s: float = setting(
        600.0, "How often expired responses and files are deleted.", gt=0.0
    )

    seal_keys_file: str = setting(
        "",
        "File with the keys that seal reasoning (`encrypted_content`) and sign thinking. Servers "
        "with the same tenants need the same file. Empty: `seal-keys.json` in the data folder, "
        "made at the first start.",
    )

    def seal_keys_path(self, data_path: Path) -> Path:
        """The file of master keys, absolute."""
        given = self.seal_keys_file
        return Path(given).expanduser().resolve() if given else data_path / SEAL_KEYS_FILE

    def objects_path(self, data_path: Path) -> Path:
        """The folder for objects, absolute."""
        given = self.objects_dir
        return Path(given).expanduser().resolve() if given else data_path / OBJECTS_FOLDER


@dataclass(frozen=True, kw_only=True)
class FileSettings:
    """Files, uploads and batches of tenants."""

    file_retention_days: int = setting(
        30,
        "How long files are kept at most, in days; a file may expire earlier (`expires_after`). 0: "
        "no files are taken, and those that there are are hidden and deleted.",
        ge=0,
        le=3650,
    )
    max_file_bytes: int = setting(
        512 * MIB, "Maximum size of a file that is sent in one request. Larger files get 413.", ge=1
    )
    max_upload_bytes: int = setting(
        8192 * MIB, "Maximum size of a file that is uploaded in parts.", ge=1
    )
    files_quota_bytes: int = setting(
        10_240 * MIB,
        "Maximum size of all files of a tenant together, including those that are being sent. "
        "Further files get 429 insufficient_quota.",
        ge=0,
    )
    max_files: int = setting(
        10_000,
        "Maximum number of files of a tenant, including those that are being sent, and of the "
        "uploads that it makes in a day. Further files and uploads get 429 insufficient_quota.",
        ge=0,
    )
    max_file_bodies: int = setting(
        32,
        "Maximum number of files and parts that are sent to one gateway process at the same time, "
        "a quarter of it from one tenant. Further ones get 429 queue_full.",
        ge=1,
    )
    file_body_timeout_s: float = setting(
        3600.0,
        "How long sending a file or a part may take. After that it gets 408, as it does when "
        "nothing arrives for receive_timeout_s.",
        gt=0.0,
    )
    file_threads: int = setting(
        4,
        "Threads of each gateway process that read files; as many others write them.",
        ge=1,
    )
    max_batches: int = setting(
        100,
        "Maximum number of a tenant's batches that have not ended. Further ones get 429 "
        "insufficient_quota.",
        ge=0,
    )
    max_ended_batches: int = setting(
        1000,
        "Maximum number of a tenant's batches that have ended and are remembered. A new one makes "
        "the oldest beyond it forgotten; output files stay.",
        ge=1,
    )
    max_batches_running: int = setting(
        4,
        "Maximum number of batches that each gateway process runs at the same time, a quarter of "
        "it of one tenant. 0: none; they wait.",
        ge=0,
    )
    batch_lines: int = setting(
        8, "Maximum number of requests of one batch that run at the same time.", ge=1
    )
