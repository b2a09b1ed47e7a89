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

from admin.amounts import midnight
from admin.ask import Ask, PageRoute, Reply, StreamRoute
from admin.errors import Refused
from gateway.service import export_jobs as verbs
from gateway.service import usage
from gateway.service.control import Control
from gateway.service.export_jobs import ExportList
from registry.base import base32
from registry.errors import AlreadyExists, Forbidden, IllegalTransition, NotFound, RegistryError
from registry.export_jobs import ExportJob

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
DONE: Final[Mapping[str, tuple[Callable[[Control, str], ExportJob], str]]] = {
    "cancel": (verbs.cancel_export, "The export is cancelled."),
    "retry": (verbs.retry_export, "The export goes on."),
    "remove": (verbs.remove_export, "The export is removed."),
}
_READ_BYTES = 1 << 16


def show(ask: Ask) -> Reply:
    """The page."""
    found = verbs.list_exports(ask.control)
    return ask.page(
        "exports.html",
        found=found,
        labels=LABELS,
        shape=_shape(found),
        asked_by=lambda job: verbs.asked_by(ask.control, job),
        may_change=lambda job: verbs.may_change(ask.control, job),
    )


def live(ask: Ask) -> Mapping[str, str]:
    """How far each is; where another button would be right the page loads anew."""
    found = verbs.list_exports(ask.control)
    parts = {
        f"job:{job.id}": ask.fragment(
            "exports_parts.html", "state", job, ask.desk.settings.currency
        )
        for job in found.jobs
    }
    shape = _shape(found)
    if ask.query.get("shape", shape) != shape:
        parts["@reload"] = shape
    return parts


def add(ask: Ask) -> Reply:
    """Ask for one, and go to where its progress is."""
    form = ask.form
    first, last = (midnight(form.get(name, "")) for name in ("from", "to"))
    if first is None or last is None:
        raise Refused(422, "Which days?", "Choose them on the usage page.")
    who = (form.get(name, "")[:128] or None for name in ("tenant", "key", "model"))
    try:
        scope = usage.scope_of(ask.control, first, last + DAY_S, *who)
        job = verbs.ask_export(ask.control, form.get("format", ""), scope, _job_id(ask))
    except AlreadyExists:
        return ask.redirect("/exports", "This form has asked for its export already.")
    except (Forbidden, NotFound):
        raise
    except RegistryError as error:
        raise Refused(422, "It cannot be exported", str(error)) from error
    return ask.redirect("/exports", f"{job.file_name} is being made.")


def act(ask: Ask) -> Reply:
    """Cancel, retry or remove one."""
    found = DONE.get(ask.params["do"])
    if found is None:
        raise NotFound("nothing of that kind can be done to an export")
    run, note = found
    try:
        run(ask.control, ask.params["id"])
    except IllegalTransition as error:  # somebody else was quicker: the list says what is so
        note = str(error)
    return ask.redirect("/exports", note[:1].upper() + note[1:])


def download(ask: Ask) -> Reply:
    """The file, made before: it is sent as it lies there."""
    try:
        job, path = verbs.open_export(ask.control, ask.params["id"])
    except (Forbidden, NotFound):
        raise
    except RegistryError as error:
        raise Refused(409, "There is no file yet", str(error)) from error
    headers = [
        ("content-disposition", f'attachment; filename="{job.file_name}"'),
        ("content-length", str(path.stat().st_size)),
    ]
    return Reply(media=MEDIA[job.format], headers=headers, chunks=_chunks(path))


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while data := stream.read(_READ_BYTES):
            yield data


def _shape(found: ExportList) -> str:
    """What the page's buttons depend on."""
    told = " ".join(f"{job.id}:{job.state}" for job in found.jobs)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _job_id(ask: Ask) -> str:
    """Of this session's form alone."""
    once = ask.form.get("once", "") + ask.form.get("format", "")
    digest = hmac.digest(ask.token.encode(), b"polyhost export" + once.encode(), hashlib.sha256)
    return "exp_" + base32(digest[:ID_BYTES])


ROUTES = (
    PageRoute("GET", "/exports", show),
    PageRoute("POST", "/export/ask", add),
    PageRoute("POST", "/export/{do}/{id}", act),
    PageRoute("GET", "/exports/{id}/file", download),
)
STREAMS = (StreamRoute("/live/exports", live),)
