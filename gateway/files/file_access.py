"""Who may see which files, how long files are kept, and what a failure is told as.

Used by both services. One rule says whose a file or upload is (`viewer`); one place turns what the
store raises into answers.
"""

from collections.abc import Callable
from typing import TypeVar

from gateway.api.bodies import invalid
from gateway.errors import CONFLICT, INSUFFICIENT_QUOTA, NOT_FOUND, UNSUPPORTED_PARAMETER, ApiError
from gateway.files.file_store import FileHeld, FileStore, QuotaReached, UploadOver
from gateway.settings.settings import Settings
from gateway.settings.state_settings import DAY_S
from gateway.state.state_threads import StateThreads
from gateway.types import Principal
from registry.errors import NotFound
from registry.state.files import FileViewer

_T = TypeVar("_T")


class FileAccess:
    """One object per gateway process."""

    def __init__(
        self,
        settings: Settings,
        store: FileStore,
        threads: StateThreads,
        wall_clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.store = store
        self.threads = threads
        self.wall_clock = wall_clock

    def viewer(self, principal: Principal) -> FileViewer:
        """What a key may see now."""
        now_at = self.wall_clock()
        days = self._days(principal)
        since_at = now_at - days * DAY_S if days else float("inf")
        tenant_id, key_id = principal.tenant_id, principal.key_id
        return FileViewer(tenant_id, now_at, since_at, key_id, principal.allowed_models)

    def check_keeps(self, principal: Principal) -> None:
        """Raises ApiError where no files are kept for a tenant."""
        if not self._days(principal):
            message = "no files are kept for this tenant: ask the operator of this server"
            raise ApiError(UNSUPPORTED_PARAMETER, message)

    def expires_at(self, now_at: float, own_s: float | None) -> float:
        """Of a file that is made now and is to be kept for `own_s`."""
        most_s = self.settings.file_retention_days * DAY_S
        return now_at + (most_s if own_s is None else min(own_s, most_s))

    async def read(
        self, principal: Principal, what: str, own_id: str, work: Callable[[], _T]
    ) -> _T:
        """In a thread. `what`: own_id stands for, `file` or `upload`. Raises ApiError."""
        try:
            return await self.threads.read(principal.tenant_id, work)
        except NotFound as error:
            name = what.capitalize()
            message = f"No such {name} object: {own_id[:80]}. It may have expired or been deleted"
            raise ApiError(NOT_FOUND, message, "id") from error
        except FileHeld as error:
            message = "a batch is still to read the file: wait for its end, or cancel it"
            raise ApiError(CONFLICT, message) from error
        except QuotaReached as error:
            raise self._quota() from error
        except UploadOver as error:
            raise invalid("upload_id", f"{error}: create a new one") from error

    def _days(self, principal: Principal) -> int:
        """Zero retention of a tenant is that of its files too; other times are of responses."""
        keeps_nothing = principal.response_retention_days == 0
        return 0 if keeps_nothing else self.settings.file_retention_days

    def _quota(self) -> ApiError:
        settings = self.settings
        message = (
            f"the tenant would exceed {settings.files_quota_bytes} bytes or {settings.max_files} "
            f"files, what is being sent included, or {settings.max_files} uploads in a day: delete "
            "some files, and send a Content-Length"
        )
        return ApiError(INSUFFICIENT_QUOTA, message)
