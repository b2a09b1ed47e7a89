"""Fairness and queues: who is given what, who waits for what and why, what was sent away.

Shares and waiting times come from the newest postings, of all gateway processes; the queue from
the dispatcher; refusals from this gateway process's counters, since it began.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from starlette.responses import Response

from admin.live.rates import counts
from admin.operations.server import ShareLine, Shares, fair_shares
from admin.rendering import svg
from admin.web.headers import PREFIX
from admin.web.request import PageRequest, PageRoute, StreamRoute
from admin.web.tables import Column, TableSpec, table_state
from gateway.ipc.control_socket import ask as ask_server
from registry.errors import RegistryError

MAX_WAITING_ROWS = 50
LIMITS = "polyhost_limit_rejections_total"
ERRORS = "polyhost_request_errors_total"
COUNTERS = {LIMITS: "dimension", ERRORS: "code"}
PAGE_ROWS = 20
TABLE = TableSpec(
    columns=(
        Column("Tenant", "name"),
        Column("Received and fair share"),
        Column("Received", "got", "number", "down"),
        Column("Fair share", "due", "number", "down"),
        Column("Service time", "service", "number", "down"),
        Column("Weight", "weight", "number", "down"),
        Column("Waiting", "waiting", "number", "down"),
        Column("Wait p50", "p50", "number", "down"),
        Column("Wait p99", "p99", "number", "down"),
        Column("Status", "status"),
    ),
    default_sort="-service",
)
NEED = ("under", "even", "over", "asks for less")
"""In the order in which an operator wants to see them."""
VALUES: Mapping[str, Callable[[ShareLine], str | float]] = {
    "name": lambda line: line.name,
    "got": lambda line: line.got,
    "due": lambda line: line.due,
    "service": lambda line: line.service_s,
    "weight": lambda line: line.weight,
    "waiting": lambda line: line.num_waiting,
    "p50": lambda line: -1.0 if line.wait_p50_s is None else line.wait_p50_s,
    "p99": lambda line: -1.0 if line.wait_p99_s is None else line.wait_p99_s,
    "status": lambda line: NEED.index(line.standing),
}
BAR_WIDTH, BAR_HEIGHT = 240, 20


@dataclass(frozen=True, slots=True)
class QueueLine:
    """A model: who waits for it, who runs on it, when it is expected where it is not there."""

    model: str
    num_waiting: int
    num_running: int
    eta_s: float | None


def show_fairness(request: PageRequest) -> Response:
    """The page."""
    return request.page("fairness.html", found=_figures(request), stream=request.query_string)


def live_fairness(request: PageRequest) -> Mapping[str, str]:
    """All of it."""
    found = _figures(request)
    parts = ("figures", "shares", "queues", "waiting", "refusals")
    return {each: request.fragment("fairness_parts.html", each, found) for each in parts}


def bullet(line: ShareLine, scale: float) -> Markup:
    """What it got as a bar, what it is due as a mark, over a common scale."""
    title = f"{line.name}: received {line.got:.1%} of the service, fair share {line.due:.1%}"
    got, due = (BAR_WIDTH * min(1.0, share / scale) for share in (line.got, line.due))
    mark = min(BAR_WIDTH - 2, max(0.0, due - 1))
    return svg.picture(
        f"bullet {line.standing.partition(' ')[0]}",
        *(title, BAR_WIDTH, BAR_HEIGHT, svg.element("title", title)),
        svg.element("rect", class_="bullet-ground", width=BAR_WIDTH, height=BAR_HEIGHT, rx=3),
        svg.element("rect", class_="bullet-got", y=5, width=got, height=10),
        svg.element("rect", class_="bullet-due", x=mark, y=1, width=2, height=18),
    )


def _figures(request: PageRequest) -> dict[str, Any]:
    dispatcher = request.live.dispatcher
    waiting = _reasons(request) if dispatcher.num_waiting else []
    waited_s: dict[str, float] = {}
    for row in waiting:
        waited_s[row["tenant_id"]] = max(row["waited_s"], waited_s.get(row["tenant_id"], 0.0))
    table = table_state(TABLE, f"{PREFIX}/fairness", request.query, PAGE_ROWS)
    found = fair_shares(request.operator, dispatcher.waiting_by_tenant, waited_s)
    page = table.cut_rows(found.lines, VALUES, lambda line: line.tenant_id)
    scale = max((max(line.got, line.due) for line in found.lines), default=0.0) or 1.0
    names = {line.tenant_id: line.name for line in found.lines}
    models = {*dispatcher.waiting_by_model, *dispatcher.running_by_model}
    queues = [
        QueueLine(
            model,
            dispatcher.waiting_by_model.get(model, 0),
            dispatcher.running_by_model.get(model, 0),
            dispatcher.load_eta_s.get(model),
        )
        for model in models
    ]
    preempted = sum(w.counters.get("num_preemptions", 0.0) for w in request.live.workers)
    return {
        "shares": found,
        "table": table,
        "page": page,
        "rows": [(line, bullet(line, scale)) for line in page.rows],
        "names": names,
        "queues": sorted(queues, key=lambda q: (-q.num_waiting, -q.num_running, q.model)),
        "waiting": waiting,
        "refusals": _refusals(request),
        "dispatcher": dispatcher,
        "num_preemptions": int(preempted),
        "waits": _spread(found),
        "now_at": request.now_at,
    }


def _spread(found: Shares) -> tuple[float | None, float | None]:
    """The best and the worst p99 of a tenant."""
    waits = [line.wait_p99_s for line in found.lines if line.wait_p99_s is not None]
    return (min(waits), max(waits)) if waits else (None, None)


def _reasons(request: PageRequest) -> list[dict[str, Any]]:
    """What waits and why, in the order of turns; nothing where the server cannot be asked."""
    try:
        answer = ask_server(
            request.context.operator.settings.data_path, ask="why", limit=MAX_WAITING_ROWS
        )
    except RegistryError:
        return []
    rows: list[dict[str, Any]] = answer["waiting"]
    return rows


def _refusals(request: PageRequest) -> list[tuple[str, int]]:
    """Why requests were not served -> how many; only what has happened."""
    dispatcher, counted = request.live.dispatcher, counts(request.context.edge, COUNTERS)
    found = [
        ("the queue was full", dispatcher.num_queue_rejections),
        ("waited too long for a worker", dispatcher.num_queue_timeouts),
        ("the model could not be loaded in time", dispatcher.num_load_refusals),
        ("the client read the answer too slowly", dispatcher.num_clients_too_slow),
    ]
    found += [(f"limit: {name.replace('_', ' ')}", n) for name, n in counted[LIMITS].items()]
    found += [(f"answered with {name}", n) for name, n in counted[ERRORS].items()]
    return sorted(((why, n) for why, n in found if n), key=lambda row: (-row[1], row[0]))


ROUTES = (PageRoute("GET", "/fairness", show_fairness),)
STREAMS = (StreamRoute("/live/fairness", live_fairness, every_s=3.0),)
