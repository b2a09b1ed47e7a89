"""/v1/responses with state: what a request follows, what is kept of it, and the routes of that.

It stands in front of the pipeline. A request becomes a `WireRequest` with the items of earlier
responses before its own, the pipeline answers it as any other, and the answer is stored before its
end is told (saving.py). A stateless request goes through with nothing added, and chats never come
here.

    create        authenticate, decode, idempotency key, what it follows, run, store
    retrieve, follow, remove, input_items, cancel      of a stored response

Whose a response is, is one rule (`_viewer`): the tenant's, of models that the key may use, and not
older than the tenant's retention. All else is missing in the same words.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias, TypeVar

import msgspec

from gateway.api.bodies import invalid
from gateway.api.wire import WireRequest
from gateway.auth.auth import authenticate, find_model
from gateway.auth.directory import Directory
from gateway.dialects import responses_wire
from gateway.dialects.responses_answer import replayed
from gateway.dialects.responses_items import kept_items
from gateway.dialects.responses_wire import AskedResponse
from gateway.errors import (
    IDEMPOTENCY_CONFLICT,
    IDEMPOTENCY_RUNNING,
    INVALID_REQUEST,
    NOT_FOUND,
    PREVIOUS_NOT_FOUND,
    UNSUPPORTED_PARAMETER,
    ApiError,
)
from gateway.metrics.metrics import Metrics
from gateway.sealing.seals import Seals
from gateway.settings.settings import Settings
from gateway.settings.state_settings import DAY_S
from gateway.state import item_references
from gateway.state.background import BackgroundRuns
from gateway.state.conversations_service import ConversationsService
from gateway.state.event_following import Following, SoFar, replay
from gateway.state.item_pages import item_page, page_of
from gateway.state.objects import objects_of
from gateway.state.response_store import (
    ChainBroken,
    ChainTooLong,
    ResponseStore,
    StoredBody,
    is_active,
)
from gateway.state.saving import Saving
from gateway.state.state_threads import RETRY_S, StateThreads
from gateway.types import Answer, AnswerNote, Call, EventAnswer, JsonAnswer, Principal, Sink
from registry.errors import NotFound
from registry.session import make_engine
from registry.state.idempotency import IdempotencyRecord
from registry.state.responses import ResponseRecord, Viewer

Run: TypeAlias = Callable[[Call, WireRequest], Awaitable[Answer]]
"""The pipeline: raises ApiError and ClientGone as it does."""
WhenGone: TypeAlias = Callable[[Callable[[], None]], None]
"""See Call."""

KEY_HEADER = "idempotency-key"
REPLAY_HEADER = "idempotent-replayed"
MAX_KEY_CHARS = 255
CLAIM_MARGIN_S = 60.0
_encode = msgspec.json.Encoder().encode
_T = TypeVar("_T")


class ResponsesService:
    """One object per gateway process."""

    def __init__(
        self,
        settings: Settings,
        directory: Directory,
        store: ResponseStore,
        threads: StateThreads,
        metrics: Metrics,
        background: BackgroundRuns,
        run: Run,
        wall_clock: Callable[[], float],
        seals: Seals,
    ) -> None:
        self._settings = settings
        self._tells_unknown = settings.unknown_fields == "tell"
        self._claim_s = settings.queue_timeout_s + settings.request_timeout_s + CLAIM_MARGIN_S
        self._directory = directory
        self._store = store
        self._threads = threads
        self._metrics = metrics
        self._background = background
        self._run = run
        self._wall_clock = wall_clock
        self._seals = seals
        self.conversations = ConversationsService(
            store.conversations,
            threads,
            self._viewer,
            lambda principal: self._retention_days(principal) > 0,
        )

    async def start(self) -> None:
        """Before requests come."""
        await self._background.recover()

    async def close(self, timeout_s: float) -> None:
        """When no more requests come: what runs in the background may end within the time."""
        await self._background.close(timeout_s)
        await asyncio.to_thread(self._threads.close)
        self._store.close()

    async def create(self, call: Call) -> Answer:
        """POST /v1/responses. Raises ApiError, ClientGone."""
        now_at = self._wall_clock()
        principal = call.principal or authenticate(
            call.headers, self._directory, now_at, call.client
        )
        call.principal = principal
        body = sent = await call.receive_body()
        viewer = self._viewer(principal)
        if item_references.WORD in sent:
            body = await self._with_items(viewer, sent)
        seal = self._seals.of(principal.tenant_id)
        asked = responses_wire.decode_asked(body, self._tells_unknown, seal)
        if asked.is_stateless:
            return await self._run(call, asked.wire)
        if not self._retention_days(principal):
            return await self._run(call, _keeping_nothing(asked).wire)
        if not asked.store:
            asked, _ = await self._following(viewer, asked)
            return await self._run(call, asked.wire)
        find_model(principal, self._directory, asked.wire.model)
        saving = self._saving(call.http_id, principal, asked, now_at)
        key = call.headers.get(KEY_HEADER)
        if key is not None:
            held = await self._claim(saving.record, key, sent)
            if held is not None:
                return await self._again(call, viewer, held, asked.wire.stream)
            saving.has_claim = True
        try:
            asked, depth = await self._following(viewer, asked)
            saving.record = replace(saving.record, depth=depth)
            asked = asked.showing(
                store=True, background=asked.is_background, created_at=int(now_at)
            )
            if asked.is_background:
                response = await self._background.start(call, asked, saving)
                if asked.wire.stream:
                    return self._followed(viewer, saving.record.id, -1, call.when_gone, call.note)
                return JsonAnswer([response])
            answer = await self._run(call, asked.wire)
        except BaseException:
            await saving.give_up()
            raise
        return await saving.answer(answer)

    async def retrieve(self, principal: Principal, response_id: str) -> bytes:
        """The response as it is now. Raises ApiError."""
        record, body = await self._found(principal, response_id)
        return told(record, body)

    async def follow(
        self,
        principal: Principal,
        response_id: str,
        starting_after: int,
        when_gone: WhenGone,
        note: AnswerNote,
    ) -> EventAnswer:
        """The events of a background response behind this number. Raises ApiError."""
        _, body = await self._found(principal, response_id)
        if not _is_background(body):
            message = "only background responses can be streamed later: leave stream out"
            raise ApiError(INVALID_REQUEST, message, "stream")
        viewer = self._viewer(principal)
        return self._followed(viewer, response_id, starting_after, when_gone, note)

    async def remove(self, principal: Principal, response_id: str) -> bytes:
        """Delete it; one that is being made is stopped. Raises ApiError."""
        viewer = self._viewer(principal)
        await self._read(viewer, response_id, lambda: self._store.remove(viewer, response_id))
        self._background.stop(response_id)
        return _encode({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, principal: Principal, response_id: str) -> bytes:
        """A background response stops, if it has not ended. Returns what it is then. Raises
        ApiError."""
        record, body = await self._found(principal, response_id)
        if not _is_background(body):
            message = "only background responses can be cancelled: this one was answered at once"
            raise ApiError(INVALID_REQUEST, message)
        if is_active(record):
            viewer = self._viewer(principal)
            await self._read(viewer, response_id, lambda: self._store.cancel(viewer, response_id))
            self._background.stop(response_id)
        return await self.retrieve(principal, response_id)

    async def input_items(
        self, principal: Principal, response_id: str, params: Mapping[str, Sequence[str]]
    ) -> bytes:
        """A page of what it was made of. Raises ApiError."""
        limit, order, after = page_of(params)
        viewer = self._viewer(principal)

        def work() -> bytes:
            items = self._store.input_items(viewer, response_id)
            return item_page(items, limit, order, after)

        return await self._read(viewer, response_id, work)

    def _followed(
        self,
        viewer: Viewer,
        response_id: str,
        starting_after: int,
        when_gone: WhenGone,
        note: AnswerNote,
    ) -> EventAnswer:
        begun = b""

        async def look() -> SoFar:
            """While it is made its row says so: its object may be megabytes."""
            nonlocal begun
            if begun:
                get = partial(self._store.get, viewer, response_id)
                if is_active(await self._read(viewer, response_id, get)):
                    return SoFar(begun, True)
            read = partial(self._store.read, viewer, response_id)
            record, body = await self._read(viewer, response_id, read)
            begun = told(record, body)
            return SoFar(begun, is_active(record), body.cuts)

        log = self._background.log_of(response_id)
        following = Following(log, look, self._threads.go_on, starting_after, note)
        when_gone(following.stop)
        return EventAnswer(following.run)

    def _saving(
        self, http_id: str, principal: Principal, asked: AskedResponse, now_at: float
    ) -> Saving:
        record = ResponseRecord(
            id=responses_wire.ID_PREFIX + http_id,
            tenant_id=principal.tenant_id,
            parent_id=asked.previous_response_id,
            model=asked.wire.model,
            state="queued",
            depth=0,
            object_name="",
            sha256="",
            items_bytes=0,
            created_at=now_at,
            conversation_id=asked.conversation_id,
        )
        items = kept_items(asked.input, http_id)
        return Saving(self._store, self._threads, self._metrics, record, items)

    async def _with_items(self, viewer: Viewer, body: bytes) -> bytes:
        """Raises ApiError."""

        def work() -> bytes:
            most = self._settings.max_body_bytes
            return item_references.resolved(body, most, partial(self._store.items, viewer))

        return await self._threads.read(viewer.tenant_id, work)

    async def _following(self, viewer: Viewer, asked: AskedResponse) -> tuple[AskedResponse, int]:
        """The request behind what it follows, and how many responses that is. It is put together in
        the thread that reads: 100,000 items take longer than the event loop may. Raises
        ApiError."""
        if asked.conversation_id is not None:
            return await self._in_conversation(viewer, asked, asked.conversation_id), 0
        if asked.previous_response_id is None:
            return asked, 0
        return await self._behind(viewer, asked, asked.previous_response_id)

    async def _found(
        self, principal: Principal, response_id: str
    ) -> tuple[ResponseRecord, StoredBody]:
        viewer = self._viewer(principal)
        return await self._read(viewer, response_id, lambda: self._store.read(viewer, response_id))

    async def _read(self, viewer: Viewer, response_id: str, work: Callable[[], _T]) -> _T:
        try:
            return await self._threads.read(viewer.tenant_id, work)
        except NotFound as error:
            message = f"no response has the id {response_id[:80]!r}: it may have expired"
            raise ApiError(NOT_FOUND, message) from error
        except ChainTooLong as error:
            raise ApiError(INVALID_REQUEST, str(error)) from error

    async def _behind(
        self, viewer: Viewer, asked: AskedResponse, response_id: str
    ) -> tuple[AskedResponse, int]:
        """Raises ApiError."""
        param = "previous_response_id"

        def work() -> tuple[AskedResponse, int]:
            earlier = self._store.earlier(viewer, response_id)
            return asked.after(earlier.items, earlier.num_bytes), earlier.depth

        try:
            return await self._threads.read(viewer.tenant_id, work)
        except NotFound as error:
            message = f"no response has the id {response_id!r}: send the whole input"
            raise ApiError(PREVIOUS_NOT_FOUND, message, param) from error
        except ChainBroken as error:
            message = f"{response_id!r} cannot be continued: {error}. Send the whole input"
            raise ApiError(PREVIOUS_NOT_FOUND, message, param) from error
        except ChainTooLong as error:
            raise invalid(
                param, f"{error}: begin anew with the input that still matters"
            ) from error

    async def _in_conversation(
        self, viewer: Viewer, asked: AskedResponse, conversation_id: str
    ) -> AskedResponse:
        """Raises ApiError."""
        store = self._store.conversations
        try:
            return await self._threads.read(
                viewer.tenant_id, lambda: asked.after(*store.decoded(viewer, conversation_id))
            )
        except NotFound as error:
            message = (
                f"no conversation has the id {conversation_id!r}: create one, or send the input"
            )
            raise ApiError(NOT_FOUND, message, "conversation") from error

    async def _claim(
        self, record: ResponseRecord, key: str, body: bytes
    ) -> IdempotencyRecord | None:
        """What the key stands for already. Raises ApiError."""
        if not 0 < len(key) <= MAX_KEY_CHARS:
            raise ApiError(
                INVALID_REQUEST, f"Idempotency-Key must have 1 to {MAX_KEY_CHARS} characters"
            )

        def claim() -> tuple[IdempotencyRecord | None, str]:
            key_sha256, body_sha256 = (hashlib.sha256(d).hexdigest() for d in (key.encode(), body))
            wanted = IdempotencyRecord(
                record.tenant_id, key_sha256, body_sha256, record.id, False, record.created_at
            )
            return self._store.claim(wanted, self._claim_s), body_sha256

        held, body_sha256 = await self._threads.read(record.tenant_id, claim)
        if held is not None and held.body_sha256 != body_sha256:
            message = "this Idempotency-Key came with another body before: use a new key"
            raise ApiError(IDEMPOTENCY_CONFLICT, message)
        if held is not None and not held.is_kept:
            message = "the first request with this Idempotency-Key is still running: try again"
            raise ApiError(IDEMPOTENCY_RUNNING, message, retry_after_s=RETRY_S)
        return held

    async def _again(
        self, call: Call, viewer: Viewer, held: IdempotencyRecord, streams: bool
    ) -> Answer:
        """The answer that the key's first request had. Raises ApiError."""
        try:
            record, body = await self._threads.read(
                viewer.tenant_id, lambda: self._store.read(viewer, held.response_id)
            )
        except NotFound as error:
            message = "the response of this Idempotency-Key has been deleted: use a new key"
            raise ApiError(IDEMPOTENCY_CONFLICT, message) from error
        call.answer_headers[REPLAY_HEADER] = "true"
        response = told(record, body)
        if not streams:
            return JsonAnswer([response])
        if _is_background(body):
            return self._followed(viewer, record.id, -1, call.when_gone, call.note)

        gone = asyncio.Event()
        call.when_gone(gone.set)

        async def events(sink: Sink) -> None:
            await replay(replayed(response), self._threads.go_on, sink, gone.is_set)

        return EventAnswer(events)

    def _retention_days(self, principal: Principal) -> int:
        own, most = principal.response_retention_days, self._settings.response_retention_days
        return most if own is None else min(own, most)

    def _viewer(self, principal: Principal) -> Viewer:
        days = self._retention_days(principal)
        since_at = self._wall_clock() - days * DAY_S if days else float("inf")
        return Viewer(principal.tenant_id, principal.allowed_models, since_at)


def build_responses(
    settings: Settings,
    directory: Directory,
    metrics: Metrics,
    run: Run,
    owner: str,
    wall_clock: Callable[[], float],
    seals: Seals,
) -> ResponsesService:
    """Of one gateway process, which background responses name as `owner`. Connects to the database
    and makes folders when first asked."""
    engine = make_engine(settings.registry_url)
    store = ResponseStore(
        engine,
        objects_of(engine, settings),
        settings.max_stored_responses,
        settings.max_body_bytes,
        wall_clock,
    )
    threads = StateThreads(settings.state_threads, settings.max_state_waiting)
    background = BackgroundRuns(store, threads, run, owner, wall_clock)
    about = store, threads, metrics, background
    return ResponsesService(settings, directory, *about, run, wall_clock, seals)


class _Background(msgspec.Struct):
    background: bool = False


def _is_background(body: StoredBody) -> bool:
    return msgspec.json.decode(body.response, type=_Background).background


def told(record: ResponseRecord, body: StoredBody) -> bytes:
    """The response with the state that it has now."""
    if record.state in ("completed", "incomplete"):
        return bytes(body.response)
    response = msgspec.json.decode(body.response)
    response["status"] = record.state
    if record.error_code:
        response["error"] = {"code": record.error_code, "message": record.error_message}
    return _encode(response)


def _keeping_nothing(asked: AskedResponse) -> AskedResponse:
    """Of a tenant without retention. Raises ApiError where the request cannot be without."""
    for param, is_given in (
        ("previous_response_id", asked.previous_response_id is not None),
        ("conversation", asked.conversation_id is not None),
        ("background", asked.is_background),
    ):
        if is_given:
            message = f"{param} is not available, no responses are stored for this tenant"
            raise ApiError(UNSUPPORTED_PARAMETER, f"{message}: send the whole input", param)
    return asked.telling("store") if asked.is_store_said else asked
