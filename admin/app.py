"""The operator's pages: mounted at /admin by gateway/http/app.py, in each gateway process.

    the headers that every answer carries, and compression
    -> a request's body, read and bounded
    -> a thread: where a form came from, the session, the CSRF token, the page

Pages are in pages/, what they are given in web/request.py. The event loop does no more than read,
hand over and send; the running server's figures are taken there, because the dispatcher belongs to
it. No page decides who may do what: the operations of admin/operations/ do.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeAlias, TypeVar

from starlette.exceptions import HTTPException
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import Receive, Scope, Send

from admin.context.operator_context import OperatorContext
from admin.live.fleet_watch import FleetWatch, LiveState
from admin.live.overview_board import Board
from admin.live.troubles import TroubleWatch
from admin.oidc.provider import Provider
from admin.operations import models, sessions
from admin.pages import PAGES, STREAMS
from admin.rendering.model_colours import ModelColours
from admin.rendering.templating import Templates
from admin.web import errors, session, single_sign_on
from admin.web.headers import PREFIX, SecurityHeaders, VersionedFiles
from admin.web.navigation import NAVIGATION
from admin.web.request import AppContext, PageRequest, PageRoute, StreamRoute
from admin.web.streams import Download, NoNews, StreamedResponse, Streams, TooMany, events
from gateway.errors import ClientGone
from gateway.pipeline.edge import Edge
from registry.errors import Forbidden, NotFound, RegistryAway, RegistryError
from registry.session import make_engine, report_away

logger = logging.getLogger(__name__)

MAX_DOWNLOADS = 4
"""Each holds a connection to the database for as long as it is taken."""
MIN_COMPRESSED_BYTES = 1000
COMPRESSION_LEVEL = 5
MIN_COMPRESSED_IN_THREAD_BYTES = 8192
"""From here on not on the event loop, which streams tenants' tokens too."""
NOT_COMPRESSED: Final = (
    *DEFAULT_EXCLUDED_CONTENT_TYPES,
    "text/csv",
    "application/x-ndjson",
    "application/vnd.apache.parquet",
)
"""Downloads keep their length."""
NUM_SIGN_IN_THREADS = 2
"""A password's digest takes 64 MiB while it is looked at."""

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
P = ParamSpec("P")
T = TypeVar("T")


class TooBusy(Exception):
    """As many wait for a thread as may."""


class Threads:
    """`num_threads` work, `max_waiting` more may wait."""

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=f"admin-{name}")
        self._max = num_threads + max_waiting
        self._num = 0
        self._lock = threading.Lock()

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the work returns or raises. Raises TooBusy at once."""
        with self._lock:
            if self._num >= self._max:
                raise TooBusy
            self._num += 1
        future = self._executor.submit(work, *args, **kwargs)
        future.add_done_callback(lambda _: self._leave())  # also where nobody awaits it any more
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """What runs ends, what waits is given up."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _leave(self) -> None:
        with self._lock:
            self._num -= 1


class AdminApp:
    """ASGI, for paths from PREFIX on."""

    def __init__(self, edge: Edge, clock: Callable[[], float] = time.time) -> None:
        services = edge.services
        settings = services.settings
        self._services = services
        self._clock = clock
        self._engine = make_engine(settings.registry_url)
        context = OperatorContext(self._engine, settings.data_path, "server", clock, settings)
        templates = Templates(ModelColours(lambda: models.served_names(context)))
        fleet = FleetWatch(settings.data_path)
        self.context = AppContext(
            settings,
            context,
            templates,
            VersionedFiles(),
            NAVIGATION,
            edge,
            fleet,
            Board(context, templates, fleet, edge),
            TroubleWatch(context, fleet),
            Provider(settings, clock) if settings.oidc_issuer else None,
        )
        waiting = settings.max_admin_waiting
        self._pools = {
            "pages": Threads("page", settings.admin_threads, waiting),
            "sign_in": Threads("sign-in", NUM_SIGN_IN_THREADS, waiting),
            "checks": Threads("check", NUM_SIGN_IN_THREADS, NUM_SIGN_IN_THREADS),
            "provider": Threads("provider", NUM_SIGN_IN_THREADS, waiting),  # may never answer
        }
        self._streams = Streams(
            settings.max_admin_streams, settings.max_admin_streams_per_user, self._ended
        )
        self._num_downloads = 0
        pages = (*session.ROUTES, *single_sign_on.ROUTES, *PAGES)
        routes: list[BaseRoute] = [Mount("/static", self.context.static)]
        routes += [Route(each.path, self._page(each), methods=[each.method]) for each in pages]
        routes += [Route(each.path, self._stream(each), methods=["GET"]) for each in STREAMS]
        routes.append(Route("/{path:path}", self._page(errors.NOT_HERE), methods=["GET"]))
        self._router = Router(routes, redirect_slashes=False)
        self._entry = SecurityHeaders(
            GZipMiddleware(
                self._serve,
                minimum_size=MIN_COMPRESSED_BYTES,
                compresslevel=COMPRESSION_LEVEL,
                thread_minimum_size=MIN_COMPRESSED_IN_THREAD_BYTES,
                exclude_content_types=NOT_COMPRESSED,
            )
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await self._entry(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == PREFIX:
            await RedirectResponse(PREFIX + "/", 308)(scope, receive, send)
            return
        inner = {**scope, "root_path": scope.get("root_path", "") + PREFIX}
        try:
            await self._router(inner, receive, send)
        except HTTPException as error:  # the router's own, before anything is sent
            refused = PlainTextResponse(error.detail, error.status_code, error.headers)
            await refused(scope, receive, send)

    def close(self) -> None:
        """When no more requests come. Blocks until what runs in threads has ended."""
        for pool in self._pools.values():
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

    def _request(self, request: Request) -> PageRequest:
        return PageRequest(request.scope, request.receive, self.context, self._clock())

    def _page(self, page: PageRoute) -> Endpoint:
        async def endpoint(asked: Request) -> Response:
            request = self._request(asked)
            try:
                async with asyncio.timeout(self.context.settings.receive_timeout_s):
                    if page.method == "POST" and not await errors.read_form(request):
                        return PlainTextResponse("the request is too large", 413)
            except TimeoutError:
                headers = {"connection": "close"}
                return PlainTextResponse("the request took too long", 408, headers)
            except ClientDisconnect as error:
                raise ClientGone from error
            request.live_state = self._look()
            try:
                response = await self._pools[page.pool].run(self._run, page, request)
            except TooBusy:
                return _busy("the server is busy; try again in a moment", 1)
            if page.method == "POST":
                self._streams.look_now()
            if isinstance(response, StreamedResponse):
                return self._held(response, request)
            return response

        return endpoint

    def _held(self, response: StreamedResponse, request: PageRequest) -> Response:
        """An answer that takes a while, if there is a place for it."""
        download = response if isinstance(response, Download) else None
        if download is not None and self._num_downloads >= MAX_DOWNLOADS:
            return _busy("the maximum number of downloads is already running; try again later", 10)
        user_id = request.signed_in.user.id if request.signed_in else ""
        token = request.cookies.get(session.COOKIE, "")
        try:
            place = self._streams.take(token, user_id, is_counted=download is None)
        except TooMany as error:
            return _busy(str(error), 10)
        self._num_downloads += download is not None

        def over() -> None:
            self._streams.give_back(place)
            if download is not None:
                # Who leaves half-way leaves a query behind: not for the event loop to wait for.
                closing = asyncio.get_running_loop().run_in_executor(None, download.made.close)
                closing.add_done_callback(self._download_over)

        response.body_iterator = self._streams.guarded(place, response.body_iterator)
        response.on_end = over
        return response

    def _download_over(self, _: asyncio.Future[None]) -> None:
        self._num_downloads -= 1

    def _run(self, page: PageRoute, request: PageRequest) -> Response:
        """In a thread. The named boundary of the pages: nothing raised gets further."""
        try:
            is_form = request.method == "POST"
            if is_form:
                errors.check_origin(request)
            errors.check_path(request)
            self._identify(request, page.is_use)
            if request.signed_in is None and not page.open:
                return errors.signed_out(request)
            if is_form:
                request.field_lists = errors.form_of(request)
                if request.signed_in is not None and not page.open:
                    errors.check_token(request)
            with report_away():
                return page.run(request)
        except (RegistryError, errors.Refused) as error:
            if isinstance(error, RegistryAway):
                why = getattr(error.__cause__, "orig", error.__cause__)
                logger.error("request %s %s: %s", request.http_id, request.path, why)
            return errors.refused(request, error)
        except Exception:
            logger.exception("request %s %s failed", request.http_id, request.path)
            return errors.failed(request)

    def _identify(self, request: PageRequest, is_use: bool = True) -> None:
        """Whose session it is, and the server's figures from the process that has them."""
        token = request.cookies.get(session.COOKIE, "")
        with report_away():
            found = sessions.who(self.context.operator, token, is_use=is_use) if token else None
        request.signed_in, request.token = found, token if found else ""
        state = request.live_state
        if state is not None and self.context.settings.gateway_processes > 1:
            request.live_state = self.context.fleet.complete(state)

    def _stream(self, stream: StreamRoute) -> Endpoint:
        async def endpoint(asked: Request) -> Response:
            token = asked.cookies.get(session.COOKIE, "")

            async def look() -> Mapping[str, str] | None:
                request = self._request(asked)
                request.live_state = self._look()
                try:
                    return await self._pools["pages"].run(self._parts, stream, request)
                except (TooBusy, RegistryAway) as error:
                    raise NoNews from error

            try:
                user_id = await self._pools["pages"].run(self._user_id, token)
                place = self._streams.take(token, user_id) if user_id else None
            except TooMany as error:
                return _busy(str(error), 10)
            except (TooBusy, RegistryAway):
                return _busy("the server is busy; try again in a moment", 1)
            if place is None:
                return PlainTextResponse("sign in first", 401)

            def over() -> None:
                self._streams.give_back(place)

            try:
                first = await look()
            except NoNews:
                over()
                return _busy("the server is busy; try again in a moment", 1)
            except BaseException:
                over()
                raise
            if first is None:
                over()
                return PlainTextResponse("sign in first", 401)
            parts = events(look, stream.every_s, self._is_stopping, place.over)
            response = StreamedResponse(parts, "text/event-stream")
            response.on_end = over
            return response

        return endpoint

    def _user_id(self, token: str) -> str:
        """In a thread. "": nobody's."""
        with report_away():
            found = sessions.who(self.context.operator, token, is_use=False) if token else None
        return found.user.id if found else ""

    async def _ended(self, tokens: frozenset[str]) -> frozenset[str]:
        try:
            return await self._pools["pages"].run(self._ended_now, tokens)
        except TooBusy as error:
            raise RegistryAway from error

    def _ended_now(self, tokens: frozenset[str]) -> frozenset[str]:
        """In a thread."""
        with report_away():
            return sessions.ended(self.context.operator, tokens)

    def _parts(self, stream: StreamRoute, request: PageRequest) -> Mapping[str, str] | None:
        if "\0" in request.path:
            return None
        self._identify(request, is_use=False)
        if request.signed_in is None:
            return None
        try:
            with report_away():
                banner = request.fragment("parts.html", "banner", request.banner())
                return {**stream.run(request), "banner": banner}
        except (NotFound, Forbidden):  # gone, or no longer this user's to see
            return None

    def _is_stopping(self) -> bool:
        return self._services.dispatcher.stopping


def _busy(said: str, after_s: int) -> Response:
    """503, and when to try again."""
    return PlainTextResponse(said, 503, {"retry-after": str(after_s)})
