"""Settings of what the API keeps for tenants: stored responses, and what callers keep sealed."""

from dataclasses import dataclass
from pathlib import Path

from gateway.settings.base_settings import setting

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
        "Folder for stored responses and conversations. Servers that share a database need one "
        "folder that all of them see. Empty: `objects` in the data folder.",
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
        600.0, "How often expired responses are deleted.", gt=0.0
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
