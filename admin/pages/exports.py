"""Exports: asking for one, all of them with their progress, their files.

    POST /export/ask             from the usage page's address: format and filters
    GET  /exports                the newest first; /live/exports follows them
    POST /export/{do}/{id}       cancel, retry, remove
    GET  /exports/{id}/file      the file of one that is done

A form makes one export: its mark becomes the job's id (with the session's token, so that nobody
else can name it), and sent again it leads to that job.
"""

import hashlib
import hmac
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from starlette.responses import Response

from admin.context.operator_context import OperatorContext
from admin.operations import export_jobs as verbs
from admin.operations import usage
from admin.operations.export_jobs import ExportList
from admin.web.errors import Refused
from admin.web.forms import midnight
from admin.web.request import PageRequest, PageRoute, StreamRoute
from admin.web.streams import Download
from admin.web.tables import Column, TableSpec, TableState, table_state
from registry.base import base32
from registry.errors import AlreadyExists, Forbidden, IllegalTransition, NotFound, RegistryError
from registry.money.export_jobs import ExportJob
from registry.paging import Listed

DAY_S = 86_400
ID_BYTES = 10
MEDIA: Final = {
    "csv": "text/csv; charset=utf-8",
    "jsonl": "application/x-ndjson",
    "parquet": "application/vnd.apache.parquet",
    "focus": "text/csv; charset=utf-8",
    "invoices": "application/zip",
}
LABELS: Final = {
    "csv": "CSV",
    "jsonl": "JSONL",
    "parquet": "Parquet",
    "focus": "FOCUS",
    "invoices": "Invoices",
}
TABLE: Final = TableSpec(
    columns=(
        Column("File", "file"),
        Column("Tenant", "tenant"),
        Column("State", "state"),
        Column("Requested", "requested", first="down"),
        Column("Kept until", "expires"),
        Column("Actions", kind="action"),
    ),
    default_sort="-requested",
)
VALUES: Final[Mapping[str, Callable[[ExportJob], str | float]]] = {
    "file": lambda job: job.file_name,
    "tenant": lambda job: job.tenant_name or "",
    "state": lambda job: job.state,
    "requested": lambda job: job.created_at,
    "expires": lambda job: job.expires_at or 0.0,
}
PAGE_ROWS: Final = 20
DONE: Final[Mapping[str, tuple[Callable[[OperatorContext, str], ExportJob], str]]] = {
    "cancel": (verbs.cancel_export, "The export was cancelled."),
    "retry": (verbs.retry_export, "The export was restarted."),
    "remove": (verbs.remove_export, "The export was removed."),
}
_READ_BYTES = 1 << 16


def show(request: PageRequest) -> Response:
    """The page."""
    found = verbs.list_exports(request.operator)
    return request.page(
        "exports.html",
        found=found,
        table=(table := _table(request)),
        page=_cut(table, found),
        stream=request.query_string,
        labels=LABELS,
        shape=_shape(found),
        asked_by=lambda job: verbs.asked_by(request.operator, job),
        may_change=lambda job: verbs.may_change(request.operator, job),
    )


def live(request: PageRequest) -> Mapping[str, str]:
    """How far each is; where another button would be right the page loads anew."""
    found = verbs.list_exports(request.operator)
    parts = {
        f"job:{job.id}": request.fragment(
            "exports_parts.html", "state", job, request.context.settings.currency
        )
        for job in _cut(_table(request), found).rows
    }
    shape = _shape(found)
    if request.query.get("shape", shape) != shape:
        parts["@reload"] = shape
    return parts


def add(request: PageRequest) -> Response:
    """Ask for one, and go to where its progress is."""
    form = request.fields
    first, last = (midnight(form.get(name, "")) for name in ("from", "to"))
    if first is None or last is None:
        raise Refused(422, "No days selected", "Select the days on the usage page.")
    who = (form.get(name, "")[:128] or None for name in ("tenant", "key", "model"))
    try:
        scope = usage.scope_of(request.operator, first, last + DAY_S, *who)
        job = verbs.ask_export(request.operator, form.get("format", ""), scope, _job_id(request))
    except AlreadyExists:
        return request.redirect(
            "/exports", "This form was sent already; its export is listed below."
        )
    except (Forbidden, NotFound):
        raise
    except RegistryError as error:
        raise Refused(422, "Export not possible", str(error)) from error
    return request.redirect("/exports", f"{job.file_name} was requested.")


def act(request: PageRequest) -> Response:
    """Cancel, retry or remove one."""
    found = DONE.get(request.path_params["do"])
    if found is None:
        raise NotFound("unknown export action")
    run, note = found
    try:
        run(request.operator, request.path_params["id"])
    except IllegalTransition as error:  # somebody else was quicker: the list says what is so
        note = str(error)
    return request.redirect("/exports", note[:1].upper() + note[1:])


def download(request: PageRequest) -> Response:
    """The file, made before: it is sent as it lies there."""
    try:
        job, path = verbs.open_export(request.operator, request.path_params["id"])
    except (Forbidden, NotFound):
        raise
    except RegistryError as error:
        raise Refused(409, "The file is not available", str(error)) from error
    headers = {"content-length": str(path.stat().st_size)}
    return Download(_chunks(path), job.file_name, MEDIA[job.format], headers)


def _table(request: PageRequest) -> TableState:
    return table_state(TABLE, request.path, request.query, PAGE_ROWS)


def _cut(table: TableState, found: ExportList) -> Listed[ExportJob]:
    return table.cut_rows(found.jobs, VALUES, lambda job: job.id)


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while data := stream.read(_READ_BYTES):
            yield data


def _shape(found: ExportList) -> str:
    """What the page's buttons depend on."""
    states = " ".join(f"{job.id}:{job.state}" for job in found.jobs)
    return hashlib.sha256(states.encode()).hexdigest()[:16]


def _job_id(request: PageRequest) -> str:
    """Of this session's form alone."""
    once = request.fields.get("once", "") + request.fields.get("format", "")
    digest = hmac.digest(request.token.encode(), b"polyhost export" + once.encode(), hashlib.sha256)
    return "exp_" + base32(digest[:ID_BYTES])


ROUTES = (
    PageRoute("GET", "/exports", show),
    PageRoute("POST", "/export/ask", add),
    PageRoute("POST", "/export/{do}/{id}", act),
    PageRoute("GET", "/exports/{id}/file", download),
)
STREAMS = (StreamRoute("/live/exports", live),)
