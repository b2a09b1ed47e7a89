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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias
from urllib.parse import parse_qsl

from starlette.concurrency import iterate_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import Receive, Scope, Send

from admin import csrf, errors, live, session, single_sign_on
from admin.ask import PREFIX, Ask, Desk, Incoming, PageRoute, Reply, StreamRoute
from admin.fleet_watch import FleetWatch
from admin.headers import COMMON, FOR_EVER, FOR_PAGES, HeaderRows
from admin.incoming import MAX_FIELDS, form_of, read
from admin.live_state import LiveState
from admin.navigation import NAVIGATION
from admin.oidc.provider import Provider
from admin.overview_board import Board
from admin.pages import PAGES, STREAMS
from admin.static_files import StaticFiles
from admin.streams import Held, Made, Streams, TooMany
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
MIN_COMPRESSED_BYTES = 1000
NUM_SIGN_IN_THREADS = 2
"""A password's digest takes 64 MiB while it is looked at."""

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class _Pools:
    pages: Threads
    sign_in: Threads
    checks: Threads
    provider: Threads

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
        provider = Provider(settings, clock) if settings.oidc_issuer else None
        templates, fleet = Templates(), FleetWatch(settings.data_path)
        self.desk = Desk(
            settings,
            control,
            templates,
            StaticFiles(),
            NAVIGATION,
            edge,
            fleet,
            Board(control, templates, fleet, edge),
            provider,
        )
        waiting = settings.max_admin_waiting
        self._pools = _Pools(
            Threads("page", settings.admin_threads, waiting),
            Threads("sign-in", NUM_SIGN_IN_THREADS, waiting),
            Threads("check", NUM_SIGN_IN_THREADS, NUM_SIGN_IN_THREADS),
            Threads("provider", NUM_SIGN_IN_THREADS, waiting),  # whose answers may not come
        )
        self._streams = Streams(
            settings.max_admin_streams, settings.max_admin_streams_per_user, self._ended
        )
        self._num_downloads = 0
        routes: list[BaseRoute] = [Route("/static/{version}/{name}", self._static, methods=["GET"])]
        routes += [
            Route(page.path, self._page(page), methods=[page.method])
            for page in (*session.ROUTES, *single_sign_on.ROUTES, *PAGES)
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
        pools = self._pools
        for pool in (pools.pages, pools.sign_in, pools.checks, pools.provider):
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
                    incoming = await read(request, page.method == "POST")
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
                return _busy("busy: try again in a moment", 1)
            if page.method == "POST":
                self._streams.look_now()
            if reply.chunks is not None:
                return self._going_on(reply, reply.chunks, incoming)
            return _response(reply, FOR_PAGES)

        return endpoint

    def _going_on(
        self, reply: Reply, chunks: Iterator[bytes] | AsyncIterator[bytes], incoming: Incoming
    ) -> Response:
        """An answer that takes a while, if there is a place for it."""
        made: Made | None = None
        if isinstance(chunks, AsyncIterator):
            taken = chunks
        else:
            made = Made(chunks)
            taken = iterate_in_threadpool(made)
        is_download = made is not None
        if is_download and self._num_downloads >= MAX_DOWNLOADS:
            return _busy("as many downloads run as may", 10)
        token = incoming.cookies.get(session.COOKIE, "")
        try:
            place = self._streams.take(token, reply.user_id, is_counted=not is_download)
        except TooMany as error:
            return _busy(str(error), 10)
        self._num_downloads += is_download

        def over() -> None:
            self._streams.give_back(place)
            if made is not None:
                # Who leaves half-way leaves a query behind: not for the event loop to wait for.
                closing = asyncio.get_running_loop().run_in_executor(None, made.close)
                closing.add_done_callback(self._download_over)

        held = Held(self._streams.guarded(place, taken), reply.status, reply.media, over)
        for name, value in reply.headers:
            held.raw_headers.append((name.encode(), value.encode("latin-1", "replace")))
        return _with(held, FOR_PAGES)

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
                form = form_of(incoming)
                if found is not None and not page.open:
                    errors.check_token(form.get(csrf.FIELD, [""])[-1], token)
                last = {name: values[-1] for name, values in form.items() if name != csrf.FIELD}
                ask = replace(ask, form=last, form_lists=form)
            with away_is_told():
                reply = page.run(ask)
            if reply.chunks is not None and ask.signed_in is not None:
                reply = replace(reply, user_id=ask.signed_in.user.id)
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
        if state is not None and self.desk.settings.gateway_processes > 1:
            state = self.desk.fleet.complete(state)
        return Ask(self.desk, incoming, query, {}, None, "", self._clock(), state)

    def _stream(self, stream: StreamRoute) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            incoming = await read(request, False)
            assert incoming is not None
            token = incoming.cookies.get(session.COOKIE, "")

            async def look() -> Mapping[str, str] | None:
                try:
                    return await self._pools.pages.run(self._parts, stream, incoming, self._look())
                except (TooBusy, RegistryAway) as error:
                    raise live.NoNews from error

            try:
                user_id = await self._pools.pages.run(self._user_id, token)
                place = self._streams.take(token, user_id) if user_id else None
            except TooMany as error:
                return _busy(str(error), 10)
            except (TooBusy, RegistryAway):
                return _busy("try again in a moment", 1)
            if place is None:
                return _response(Reply(b"sign in first", 401, "text/plain"), FOR_PAGES)

            def over() -> None:
                self._streams.give_back(place)

            try:
                first = await look()
            except live.NoNews:
                over()
                return _busy("try again in a moment", 1)
            except BaseException:
                over()
                raise
            if first is None:
                over()
                return _response(Reply(b"sign in first", 401, "text/plain"), FOR_PAGES)
            events = live.events(look, stream.every_s, self._is_stopping, place.over)
            return _with(Held(events, 200, "text/event-stream", over), FOR_PAGES)

        return endpoint

    def _user_id(self, token: str) -> str:
        """In a thread. "": nobody's."""
        with away_is_told():
            found = sessions.who(self.desk.control, token, is_use=False) if token else None
        return found.user.id if found else ""

    async def _ended(self, tokens: frozenset[str]) -> frozenset[str]:
        try:
            return await self._pools.pages.run(self._ended_now, tokens)
        except TooBusy as error:
            raise RegistryAway from error

    def _ended_now(self, tokens: frozenset[str]) -> frozenset[str]:
        """In a thread."""
        with away_is_told():
            return sessions.ended(self.desk.control, tokens)

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


def _compressed(reply: Reply, incoming: Incoming) -> Reply:
    """As the browser can take it."""
    takes = "gzip" in incoming.headers.get("accept-encoding", "")
    if not takes or len(reply.body) < MIN_COMPRESSED_BYTES or reply.chunks is not None:
        return reply
    headers = [*reply.headers, ("content-encoding", "gzip"), ("vary", "accept-encoding")]
    return replace(reply, body=gzip.compress(reply.body, 5, mtime=0), headers=headers)


def _busy(said: str, after_s: int) -> Response:
    """503, and when to try again."""
    headers = [("retry-after", str(after_s))]
    return _response(Reply(said.encode(), 503, "text/plain", headers), FOR_PAGES)


def _response(reply: Reply, headers: HeaderRows) -> Response:
    """Ready to be sent."""
    made = Response(reply.body, reply.status, media_type=reply.media)
    for name, value in reply.headers:
        made.raw_headers.append((name.encode(), value.encode("latin-1", "replace")))
    return _with(made, headers)


def _with(response: Response, headers: HeaderRows) -> Response:
    response.raw_headers.extend((name.encode(), value.encode()) for name, value in COMMON)
    response.raw_headers.extend((name.encode(), value.encode()) for name, value in headers)
    return response
