"""The server itself: the overview (how it does, what lies in its memory, who waits and why), the
health of what it needs, its settings, read-only and without secrets, and a search over models,
tenants, keys and pages.

The overview is worked out once for everybody who looks (overview_board.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from admin.context.policy.permissions import INSTALLATION, Verb
from admin.live import workers
from admin.live.host import host_facts
from admin.operations import server as verbs
from admin.rendering.templating import may_any, path
from admin.web.headers import PREFIX
from admin.web.request import PageRequest, PageRoute, StreamRoute
from registry.errors import NotFound
from registry.models.worker_orders import WorkerAction

MAX_SEARCH_LEN = 128
WHERE: Mapping[str, str] = {
    "model": "/models/",
    "tenant": "/tenants/",
    "key": "/keys/",
    "user": "/users/",
    "invoice": "/invoices?q=",
    "setting": "/settings?q=",
}
ACTIONS: Sequence[tuple[str, str, Verb]] = (
    ("Register a model", "/register", "models.write"),
    ("New key", "/key/add", "keys.write"),
    ("Add a tenant", "/tenant/add", "tenants.write"),
    ("Add a user", "/user/add", "users.write"),
    ("New alert", "/alerts#add", "limits.write"),
    ("New plan", "/plans", "prices.write"),
    ("Issue invoices", "/invoices", "usage.write"),
    ("Correct a request", "/corrections", "usage.write"),
)
THEME = "#theme"
"""Where the palette's script switches the theme instead of going."""


def home(request: PageRequest) -> Response:
    """Sends everybody to where there is something to see; users of one tenant to that tenant."""
    grants = request.operator.grants
    if INSTALLATION not in grants and len(grants) == 1:
        return request.redirect(f"/tenants/{path(next(iter(grants)))}")
    items = [item for group in request.context.navigation for item in group.items]
    seen = [item for item in items if item.verb is None or may_any(request.me, item.verb)]
    return request.redirect(seen[0].path if seen else "/account")


def show_overview(request: PageRequest) -> Response:
    """The page."""
    verbs.may_watch(request.operator)
    board, loop = request.context.board, request.loop
    return request.page("overview.html", found=board.look(loop), parts_html=board.parts(loop))


def live_overview(request: PageRequest) -> Mapping[str, str]:
    """All of it."""
    verbs.may_watch(request.operator)
    return request.context.board.parts(request.loop)


def show_health(request: PageRequest) -> Response:
    """The page."""
    return request.page("health.html", found=_figures(request))


def live_health(request: PageRequest) -> Mapping[str, str]:
    """All of it."""
    found = _figures(request)
    return {
        "parts": request.fragment("health_parts.html", "parts_table", found),
        "workers": request.fragment("health_parts.html", "workers_table", found),
        "host": request.fragment("health_parts.html", "host_facts", found["host"]),
    }


def show_settings(request: PageRequest) -> Response:
    """Those that were set first; `q` in the address: a part of a name or of what it does."""
    text = request.query.get("q", "")[:MAX_SEARCH_LEN]
    found = verbs.settings_view(request.operator, text)
    num_set = sum(one.is_set for one in found)
    return request.page("settings.html", found=found, num_set=num_set, text=text)


class OrderText(msgspec.Struct, frozen=True):
    """What a page can ask of a worker; `text`: what happens then."""

    label: str
    done: str
    text: str


WORKER_ORDERS: Mapping[WorkerAction, OrderText] = {
    "drain": OrderText(
        "Drain",
        "{name} is being drained.",
        "It gets no more requests. Models in demand that only it has are loaded on other workers "
        "first; what still runs after that continues on another worker. It stays drained, also "
        "after a restart of the server, until it is resumed.",
    ),
    "resume": OrderText("Resume", "{name} gets requests again.", "It gets requests again."),
    "restart": OrderText(
        "Restart",
        "{name} is drained and then restarted.",
        "It is drained first; running requests continue on another worker. Several restarts "
        "happen one after another.",
    ),
}


def confirm_worker(request: PageRequest) -> Response:
    """What will happen, and a button."""
    action, name = request.path_params["action"], request.path_params["name"]
    order = _order(action)
    return request.page(
        "confirm.html",
        title=f"{order.label} {name}?",
        text=order.text,
        button=order.label,
        danger=False,
        action=f"/worker/do/{action}/{path(name)}",
        fields={},
        back="/health",
    )


def order_worker(request: PageRequest) -> Response:
    """Do it."""
    action, name = request.path_params["action"], request.path_params["name"]
    order = _order(action)
    workers.order_workers(request.operator, [name], action)
    return request.redirect("/health", order.done.format(name=name))


def _order(action: str) -> OrderText:
    for known, order in WORKER_ORDERS.items():
        if known == action:
            return order
    raise NotFound("unknown worker action")


def _figures(request: PageRequest) -> dict[str, Any]:
    fleet = request.context.fleet.look()
    return {
        "database": verbs.database_health(request.operator),
        "live": request.live,
        "has_redis": bool(request.context.settings.redis_url),
        "workers": workers.list_workers(request.operator, fleet)
        if fleet is not None
        else [workers.connected(status) for status in request.live.workers],
        "may_order": may_any(request.me, "models.write"),
        "states": workers.STATES,
        "host": host_facts(request.context.settings.data_path),
    }


class Row(msgspec.Struct, frozen=True):
    """One line of what was found."""

    kind: str
    title: str
    hint: str
    url: str


def as_json(request: PageRequest) -> Response:
    """What the palette asks at each key."""
    rows = _rows(request)
    if request.query.get("q", "").strip().lower() in "switch theme light dark":
        rows.append(Row("Action", "Switch theme", "light or dark", THEME))
    body = msgspec.json.encode(rows)
    return Response(body, media_type="application/json")


def as_page(request: PageRequest) -> Response:
    """The same without scripts."""
    text = request.query.get("q", "")
    return request.page("search.html", text=text, found=_rows(request) if text.strip() else [])


def _rows(request: PageRequest) -> list[Row]:
    text = request.query.get("q", "").strip()
    found = [
        Row("Page", item.label, group.label, PREFIX + item.path)
        for group in request.context.navigation
        for item in group.items
        if (item.verb is None or may_any(request.me, item.verb))
        and text.lower() in item.label.lower()
    ]
    found += [
        Row("Action", title, "", PREFIX + at)
        for title, at, verb in ACTIONS
        if may_any(request.me, verb) and text.lower() in title.lower()
    ]
    found += [
        Row(thing.kind.capitalize(), thing.name, thing.hint, _url(thing))
        for thing in verbs.search(request.operator, text)
    ]
    return found


def _url(thing: verbs.Found) -> str:
    return f"{PREFIX}{WHERE[thing.kind]}{path(thing.ref)}"


def status(request: PageRequest) -> Response:
    """The banner, for pages without a stream of their own: they ask now and then."""
    return Response(
        request.fragment("parts.html", "banner", request.banner()), media_type="text/html"
    )


ROUTES = (
    PageRoute("GET", "/status", status, is_use=False),
    PageRoute("GET", "/", home),
    PageRoute("GET", "/overview", show_overview),
    PageRoute("GET", "/health", show_health),
    PageRoute("GET", "/worker/confirm/{action}/{name}", confirm_worker),
    PageRoute("POST", "/worker/do/{action}/{name}", order_worker),
    PageRoute("GET", "/settings", show_settings),
    PageRoute("GET", "/search", as_page),
    PageRoute("GET", "/search.json", as_json),
)
STREAMS = (
    StreamRoute("/live/overview", live_overview, every_s=1.0),
    StreamRoute("/live/health", live_health, every_s=2.0),
)
