"""The operator's pages: mounted at /admin by gateway/app.py, in each gateway process.

    a request's body, read and bounded
    -> a thread: where a form came from, the session, the CSRF token, the page, its compression
    -> the headers that every answer carries

Pages are in pages/, what they are given in ask.py. The event loop does no more than read, hand over
and send; the running server's figures are taken there, because the dispatcher belongs to it. No
page decides who may do what: the verbs of gateway/service/ do.
"""

import asyncio
import gzip
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias
from urllib.parse import parse_qsl

from starlette.concurrency import iterate_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route, Router
from starlette.types import Receive, Scope, Send

from admin import csrf, errors, live, session
from admin.ask import PREFIX, Ask, Desk, Incoming, LiveState, PageRoute, Reply, StreamRoute
from admin.headers import COMMON, FOR_EVER, FOR_PAGES, HeaderRows
from admin.navigation import NAVIGATION
from admin.pages import PAGES, STREAMS
from admin.static_files import StaticFiles
from admin.templating import Templates
from admin.threads import Threads, TooBusy
from gateway.edge import Edge
from gateway.errors import ClientGone
from gateway.service import sessions
from gateway.service.control import Control
from registry.errors import Forbidden, NotFound, RegistryAway, RegistryError
from registry.session import away_is_told, make_engine

logger = logging.getLogger(__name__)

MAX_DOWNLOADS = 4
"""Each holds a connection to the database for as long as it is taken."""
MAX_FIELDS = 500
MAX_FORM_BYTES = 1 << 20
MIN_COMPRESSED_BYTES = 1000
NUM_SIGN_IN_THREADS = 2
"""A password's digest takes 64 MiB while it is looked at."""

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class _Pools:
    pages: Threads
    sign_in: Threads
    checks: Threads

    def of(self, name: str) -> Threads:
        found: Threads = getattr(self, name)
        return found


class AdminApp:
    """ASGI, for paths from PREFIX on."""

    def __init__(self, edge: Edge, clock: Callable[[], float] = time.time) -> None:
        services = edge.services
        settings = services.settings
        self._services = services
        self._clock = clock
        self._engine = make_engine(settings.registry_url)
        control = Control(self._engine, settings.data_path, "server", clock, settings)
        self.desk = Desk(settings, control, Templates(), StaticFiles(), NAVIGATION, edge)
        waiting = settings.max_admin_waiting
        self._pools = _Pools(
            Threads("page", settings.admin_threads, waiting),
            Threads("sign-in", NUM_SIGN_IN_THREADS, waiting),
            Threads("check", NUM_SIGN_IN_THREADS, NUM_SIGN_IN_THREADS),
        )
        self._num_streams = 0
        self._num_downloads = 0
        routes: list[BaseRoute] = [Route("/static/{version}/{name}", self._static, methods=["GET"])]
        routes += [
            Route(page.path, self._page(page), methods=[page.method])
            for page in (*session.ROUTES, *PAGES)
        ]
        routes += [Route(each.path, self._stream(each), methods=["GET"]) for each in STREAMS]
        routes.append(Route("/{path:path}", self._page(errors.NOT_HERE), methods=["GET"]))
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["path"] == PREFIX:
            there = Reply(b"", 308, headers=[("location", PREFIX + "/")])
            await _response(there, FOR_PAGES)(scope, receive, send)
            return
        inner = {**scope, "root_path": scope.get("root_path", "") + PREFIX}
        try:
            await self._router(inner, receive, send)
        except HTTPException as error:  # the router's own: another method, before anything is sent
            told = list((error.headers or {}).items())
            reply = Reply(b"not done that way", error.status_code, "text/plain", told)
            await _response(reply, FOR_PAGES)(scope, receive, send)

    def close(self) -> None:
        """When no more requests come. Blocks until what runs in threads has ended."""
        for pool in (self._pools.pages, self._pools.sign_in, self._pools.checks):
            pool.close()
        self._engine.dispose()

    def _look(self) -> LiveState:
        services = self._services
        return LiveState(
            services.dispatcher.worker_statuses(),
            services.dispatcher.snapshot(),
            services.ledger.snapshot(),
            services.dispatcher.ready,
            services.limit_store.is_degraded,
        )

    def _page(self, page: PageRoute) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            try:
                async with asyncio.timeout(self.desk.settings.receive_timeout_s):
                    incoming = await _incoming(request, page.method == "POST")
            except TimeoutError:
                late = Reply(b"the form did not come in time", 408, "text/plain")
                late.headers.append(("connection", "close"))
                return _response(late, FOR_PAGES)
            except ClientDisconnect as error:
                raise ClientGone from error
            if incoming is None:
                return _response(Reply(b"too large", 413, "text/plain"), FOR_PAGES)
            state = self._look() if page.live else None
            try:
                reply = await self._pools.of(page.pool).run(self._run, page, incoming, state)
            except TooBusy:
                reply = Reply(b"busy: try again in a moment", 503, "text/plain")
                reply.headers.append(("retry-after", "1"))
            chunks = reply.chunks
            if isinstance(chunks, Iterator):
                if self._num_downloads >= MAX_DOWNLOADS:
                    reply = Reply(b"as many downloads run as may", 503, "text/plain")
                    reply.headers.append(("retry-after", "10"))
                else:
                    reply = replace(reply, chunks=self._download(chunks))
            return _response(reply, FOR_PAGES)

        return endpoint

    async def _download(self, chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
        self._num_downloads += 1
        try:
            async for data in iterate_in_threadpool(chunks):
                yield data
        finally:  # who leaves half-way leaves a query behind: not for the event loop to wait for
            closing = asyncio.get_running_loop().run_in_executor(None, _close, chunks)
            closing.add_done_callback(self._download_over)

    def _download_over(self, _: asyncio.Future[None]) -> None:
        self._num_downloads -= 1

    def _run(self, page: PageRoute, incoming: Incoming, state: LiveState | None) -> Reply:
        """In a thread. The named boundary of the pages: nothing raised gets further."""
        ask = self._ask(incoming, state)
        try:
            if incoming.method == "POST":
                errors.check_origin(incoming)
            errors.check_path(incoming)
            token = incoming.cookies.get(session.COOKIE, "")
            with away_is_told():
                found = sessions.who(self.desk.control, token) if token else None
            ask = replace(ask, signed_in=found, token=token if found else "")
            if found is None and not page.open:
                return errors.signed_out(ask)
            if incoming.method == "POST":
                form = _form(incoming)
                if found is not None and not page.open:
                    errors.check_token(form.get(csrf.FIELD, [""])[-1], token)
                last = {name: values[-1] for name, values in form.items() if name != csrf.FIELD}
                ask = replace(ask, form=last, form_lists=form)
            with away_is_told():
                reply = page.run(ask)
        except (RegistryError, errors.Refused) as error:
            if isinstance(error, RegistryAway):
                why = getattr(error.__cause__, "orig", error.__cause__)
                logger.error("request %s %s: %s", incoming.http_id, incoming.path, why)
            reply = errors.refused(ask, error)
        except Exception:
            logger.exception("request %s %s failed", incoming.http_id, incoming.path)
            reply = errors.failed(ask)
        return _compressed(reply, incoming)

    def _ask(self, incoming: Incoming, state: LiveState | None) -> Ask:
        pairs = parse_qsl(incoming.query_string[:8192], max_num_fields=None)[:MAX_FIELDS]
        query = {name: value for name, value in pairs if "\0" not in value}
        return Ask(self.desk, incoming, query, {}, None, "", self._clock(), state)

    def _stream(self, stream: StreamRoute) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            incoming = await _incoming(request, False)
            assert incoming is not None
            if self._num_streams >= self.desk.settings.max_admin_streams:
                busy = Reply(b"as many live pages are open as may", 503, "text/plain")
                return _response(busy, FOR_PAGES)

            async def look() -> Mapping[str, str] | None:
                try:
                    return await self._pools.pages.run(self._parts, stream, incoming, self._look())
                except (TooBusy, RegistryAway) as error:
                    raise live.NoNews from error

            async def counted() -> AsyncIterator[bytes]:
                self._num_streams += 1
                try:
                    async for data in live.events(look, stream.every_s, self._is_stopping):
                        yield data
                finally:
                    self._num_streams -= 1

            try:
                if await look() is None:
                    return _response(Reply(b"sign in first", 401, "text/plain"), FOR_PAGES)
            except live.NoNews:
                return _response(Reply(b"try again in a moment", 503, "text/plain"), FOR_PAGES)
            response = StreamingResponse(counted(), media_type="text/event-stream")
            return _with(response, FOR_PAGES)

        return endpoint

    def _parts(
        self, stream: StreamRoute, incoming: Incoming, state: LiveState
    ) -> Mapping[str, str] | None:
        token = incoming.cookies.get(session.COOKIE, "")
        if "\0" in incoming.path:
            return None
        with away_is_told():
            found = sessions.who(self.desk.control, token, is_use=False) if token else None
            if found is None:
                return None
            ask = replace(self._ask(incoming, state), signed_in=found, token=token)
            try:
                return stream.run(ask)
            except (NotFound, Forbidden):  # gone, or no longer this user's to see
                return None

    def _is_stopping(self) -> bool:
        return self._services.dispatcher.stopping

    async def _static(self, request: Request) -> Response:
        found = self.desk.static.find(**request.path_params)
        if found is None:
            return _response(Reply(b"not here", 404, "text/plain"), FOR_PAGES)
        packed = "gzip" in request.headers.get("accept-encoding", "")
        reply = Reply(found.compressed if packed else found.plain, 200, found.media)
        if packed:
            reply.headers.append(("content-encoding", "gzip"))
        return _response(reply, FOR_EVER)


def _close(chunks: Iterator[bytes]) -> None:
    """What it holds of the database is given back."""
    if isinstance(chunks, Generator):
        chunks.close()


async def _incoming(request: Request, with_body: bool) -> Incoming | None:
    """None where the body is larger than any form."""
    body = b""
    if with_body:
        async for part in request.stream():
            body += part
            if len(body) > MAX_FORM_BYTES:
                return None
    return Incoming(
        method=request.method,
        path=request.scope["path"],
        query_string=request.scope["query_string"].decode("latin-1"),
        headers=dict(request.headers.items()),
        cookies=request.cookies,
        address=request.client.host if request.client else "",
        is_https=request.scope["scheme"] == "https",
        http_id=request.scope.get("state", {}).get("http_id", ""),
        params=request.path_params,
        loop=asyncio.get_running_loop(),
        body=body,
    )


def _form(incoming: Incoming) -> dict[str, list[str]]:
    """All values of each field, of an ordinary form. Raises Refused."""
    media = incoming.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/x-www-form-urlencoded":
        raise errors.Refused(415, "This is no form", "Send it as an ordinary form does.")
    found: dict[str, list[str]] = {}
    try:
        text = incoming.body.decode()
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict")
        if any("\0" in value for _, value in pairs):
            raise ValueError("NUL is no text")
    except ValueError as error:  # not UTF-8, too many fields, or not to be stored
        raise errors.Refused(400, "This is no form", "It cannot be read.") from error
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found


def _compressed(reply: Reply, incoming: Incoming) -> Reply:
    """As the browser can take it."""
    takes = "gzip" in incoming.headers.get("accept-encoding", "")
    if not takes or len(reply.body) < MIN_COMPRESSED_BYTES or reply.chunks is not None:
        return reply
    headers = [*reply.headers, ("content-encoding", "gzip"), ("vary", "accept-encoding")]
    return replace(reply, body=gzip.compress(reply.body, 5, mtime=0), headers=headers)


def _response(reply: Reply, headers: HeaderRows) -> Response:
    """Ready to be sent."""
    if reply.chunks is not None:
        made: Response = StreamingResponse(reply.chunks, reply.status, media_type=reply.media)
    else:
        made = Response(reply.body, reply.status, media_type=reply.media)
    for name, value in reply.headers:
        made.raw_headers.append((name.encode(), value.encode("latin-1", "replace")))
    return _with(made, headers)


def _with(response: Response, headers: HeaderRows) -> Response:
    response.raw_headers.extend((name.encode(), value.encode()) for name, value in COMMON)
    response.raw_headers.extend((name.encode(), value.encode()) for name, value in headers)
    return response
