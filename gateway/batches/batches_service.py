"""/v1/batches: files of requests that are answered within a day.

Comes in: whose key it is, and a body or query. Goes out: OpenAI's objects as JSON. The file is one
of purpose `batch` (gateway/files/), so whoever makes a batch needs the scope `files` too; what
comes of it is batch_run.py's. Whose a batch is, is the rule of files: the tenant's, and not older
than files are kept. A key bound to models sees batches of these and its own.
"""

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from gateway.api.bodies import decode_body, invalid, unsupported
from gateway.api.wire import small_field
from gateway.auth.directory import Directory
from gateway.batches.batch_input import ENDPOINTS
from gateway.batches.batch_lines import BatchParts
from gateway.batches.batch_output import batch_object
from gateway.batches.batch_runner import BatchRunner
from gateway.batches.batch_store import BatchStore
from gateway.errors import FORBIDDEN, INSUFFICIENT_QUOTA, NOT_FOUND, ApiError
from gateway.files.file_access import FileAccess
from gateway.files.file_fields import BATCH, expires_in, limit_of, list_object
from gateway.files.file_store import QuotaReached
from gateway.files.files_service import FilesService
from gateway.files.uploads_service import ExpiresAfter
from gateway.settings.settings import Settings
from gateway.state.state_threads import StateThreads
from gateway.types import Answer, Call, Principal
from registry.accounts.key_terms import FILES, allows
from registry.state.batches import BatchRecord

ID_PREFIX = "batch_"
WINDOW_S = 86_400.0
USUAL_PAGE, MAX_PAGE = 20, 100
RECOVERY_MARGIN_S = 2.0
_NOTHING = msgspec.Raw(b"null")
_encode = msgspec.json.Encoder().encode


class BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: msgspec.Raw = _NOTHING
    output_expires_after: ExpiresAfter | None = None


_decoder = msgspec.json.Decoder(BatchBody)
_Detail = Annotated[str, msgspec.Meta(max_length=512)]
_details_decoder = msgspec.json.Decoder(
    Annotated[dict[str, _Detail], msgspec.Meta(max_length=16)] | None
)


class BatchesService:
    """One object per gateway process. All that is asked for a `principal` raises ApiError."""

    def __init__(
        self, access: FileAccess, store: BatchStore, runner: BatchRunner, settings: Settings
    ) -> None:
        self._access = access
        self._store = store
        self._runner = runner
        self._max_batches = settings.max_batches
        self._max_ended = settings.max_ended_batches

    def start(self) -> None:
        """Before requests come."""
        self._runner.start()

    async def close(self, timeout_s: float) -> None:
        """When no more requests come: lines that run may end within the time."""
        await self._runner.close(timeout_s)

    async def create(self, principal: Principal, body: bytes) -> bytes:
        """A new batch, which is validated next."""
        access, asked = self._access, decode_body(_decoder, body)
        access.check_keeps(principal)
        if not allows(principal.scopes, FILES):
            message = f"this API key does not have the scope {FILES!r}, which the input file needs"
            raise ApiError(FORBIDDEN, f"{message}: use a key that has it", "input_file_id")
        if asked.endpoint not in ENDPOINTS:
            message = f"endpoint must be one of {', '.join(ENDPOINTS)}"
            raise invalid("endpoint", message)
        details = small_field("metadata", asked.metadata, _details_decoder) or {}
        after, viewer = asked.output_expires_after, access.viewer(principal)
        record = BatchRecord(
            id=ID_PREFIX + secrets.token_hex(16),
            tenant_id=principal.tenant_id,
            key_id=principal.key_id,
            endpoint=asked.endpoint,
            model="",
            input_file_id=asked.input_file_id,
            state="validating",
            details=details,
            created_at=viewer.now_at,
            expires_at=viewer.now_at + WINDOW_S,
            output_expires_s=(
                expires_in(after.anchor, str(after.seconds), "output_expires_after")
                if after
                else None
            ),
        )

        def create() -> bool | None:
            file = access.store.get(viewer, asked.input_file_id)
            if file.purpose != BATCH:
                return None
            try:
                return self._store.create(record, self._max_batches, self._max_ended)
            except QuotaReached as error:
                message = "the tenant's files have reached their quota, which outputs count in"
                raise ApiError(INSUFFICIENT_QUOTA, f"{message}: delete some files") from error

        made = await access.read(principal, "file", asked.input_file_id, create)
        if made is None:
            message = f"the input file must have the purpose {BATCH!r}: send it again with that"
            raise invalid("input_file_id", message)
        if not made:
            most = f"{self._max_batches} batches that have not ended, which is the maximum"
            raise ApiError(INSUFFICIENT_QUOTA, f"the tenant has {most}: wait for one, or cancel it")
        self._runner.call()
        return _encode(batch_object(record))

    async def retrieve(self, principal: Principal, batch_id: str) -> bytes:
        """One batch."""
        viewer = self._access.viewer(principal)
        record = await self._access.read(
            principal, "batch", batch_id, lambda: self._store.get(viewer, batch_id)
        )
        return _encode(batch_object(record))

    async def cancel(self, principal: Principal, batch_id: str) -> bytes:
        """Nothing more of it is begun. What was answered stays, in its output file. One that has
        ended, or whose end is being written, stays as it is."""
        access, viewer = self._access, self._access.viewer(principal)
        record = await access.read(
            principal, "batch", batch_id, lambda: self._store.cancel(viewer, batch_id)
        )
        if record.state not in ("cancelling", "cancelled") and record.ends_as != "cancelled":
            raise invalid("batch_id", f"the batch is {record.state}: it cannot be cancelled")
        self._runner.call()
        return _encode(batch_object(record))

    async def listed(self, principal: Principal, params: Mapping[str, Sequence[str]]) -> bytes:
        """A page of them, the newest first."""
        for name in params.keys() - {"limit", "after"}:
            raise unsupported(name)
        limit = limit_of(params, USUAL_PAGE, MAX_PAGE)
        after, viewer = params.get("after", [""])[-1], self._access.viewer(principal)

        def work() -> bytes:
            found = self._store.listed(viewer, limit, after)
            return _encode(list_object([batch_object(each) for each in found], limit))

        try:
            return await self._access.read(principal, "batch", after, work)
        except ApiError as error:
            if error.kind == NOT_FOUND:
                raise invalid("after", f"after: no batch has the id {after[:80]!r}") from error
            raise


def build_batches(
    settings: Settings,
    files: FilesService,
    directory: Directory,
    run: Callable[[Call], Awaitable[Answer]],
    owner: str,
    now_s: Callable[[], float],
    now_at: Callable[[], float],
) -> BatchesService:
    """Of one gateway process, which `owner` names in all its lives."""
    access = files.access
    store = BatchStore(access.store)
    parts = BatchParts(
        store,
        access.threads,
        StateThreads(1, 1, "batches"),
        run,
        directory,
        settings.max_body_bytes,
        settings.batch_lines,
        access.expires_at,
        now_s,
        now_at,
    )
    first_look_s = settings.ledger_recovery_wait_s + RECOVERY_MARGIN_S
    runner = BatchRunner(parts, owner, settings.max_batches_running, first_look_s)
    return BatchesService(access, store, runner, settings)
