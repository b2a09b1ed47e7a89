"""The verbs on exports that are made in the background, for the operator's pages (control.py).

Whoever may read a tenant's usage sees its exports and takes their files, whoever asked for them;
whoever asked, or may change usage, cancels, retries and removes them. Every look puts right what
nobody is left to put right: jobs whose process died are failed, expired ones and stray folders go,
and a process is started where something waits and none works.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from gateway.exporting import export_folders
from gateway.policy import permissions
from gateway.service import usage
from gateway.service.control import Control, process_is_alive, require, visible
from registry import export_jobs, invoices, tenants, usage_sums
from registry.errors import Forbidden, NotFound, RegistryError
from registry.export_jobs import ExportJob
from registry.exports import Scope
from registry.usage_sums import UsageFilter

SUFFIXES: Final = {
    "csv": "csv",
    "jsonl": "jsonl",
    "parquet": "parquet",
    "focus": "focus.csv",
    "invoices": "zip",
}
MAX_SHOWN = 200
NUDGE_S = 10.0


@dataclass(frozen=True, slots=True)
class ExportList:
    """What a page shows: the newest first. `used_bytes`: of all exports on this machine, and
    `quota_bytes` what these may take (0: no bound); for who may not see all, those of the jobs, and
    no bound."""

    jobs: Sequence[ExportJob]
    used_bytes: int
    quota_bytes: int


def ask_export(control: Control, format_name: str, scope: Scope, job_id: str) -> ExportJob:
    """An export of the ledger as it is now; it begins at once, or when others are done. Raises
    AlreadyExists where that id is taken, RegistryError where there is nothing to export or as many
    are kept as may."""
    require(control, "usage.read", scope.tenant_id)
    if format_name not in SUFFIXES:
        raise NotFound("there is no such format")
    settings = control.settings
    if format_name == "invoices":
        asked, total_rows = _invoices(control, scope)
    else:
        order = usage.order_export(control, format_name, scope)  # type: ignore[arg-type]
        asked, total_rows = order.to_json(), 0
        if format_name != "focus":
            total_rows = _num_rows(control, scope)
    tidy(control)
    with control.writing() as session:
        if export_jobs.num_jobs(session) >= settings.max_exports:
            raise RegistryError(f"{settings.max_exports} exports are kept already: remove some")
        mine = export_jobs.num_jobs(session, control.actor)
        if mine >= settings.max_exports_per_user:
            raise RegistryError(f"you have {mine} exports already, as many as may be: remove some")
        name = tenants.get_tenant(session, scope.tenant_id).name if scope.tenant_id else ""
        job = export_jobs.ask(
            session,
            job_id,
            format_name,
            asked,
            tenant_id=scope.tenant_id,
            tenant_name=name,
            file_name=_file_name(format_name, scope),
            asked_by=control.actor,
            total_rows=total_rows,
            now_at=control.clock(),
        )
    export_folders.start_runner(settings)
    return job


def list_exports(control: Control) -> ExportList:
    """Those that who asks may see."""
    seen = visible(control, "usage.read")
    tidy(control)
    with control.reading() as session:
        found = export_jobs.jobs(session, tenant_ids=seen, limit=MAX_SHOWN)
    if seen is not None:
        return ExportList(found, sum(job.size_bytes for job in found), 0)
    used_bytes = export_folders.used_bytes(control.data_dir)
    return ExportList(found, used_bytes, control.settings.exports_quota_bytes)


def get_export(control: Control, job_id: str) -> ExportJob:
    """One. Raises NotFound; to those who may not see all Forbidden, whether there is one or not."""
    visible(control, "usage.read")
    with control.reading() as session:
        try:
            job = export_jobs.get(session, job_id)
        except NotFound:
            require(control, "usage.read")
            raise
    if not permissions.allowed(control.grants, "usage.read", job.tenant_id):
        require(control, "usage.read")
    return job


def cancel_export(control: Control, job_id: str) -> ExportJob:
    """It ends, wherever it runs: its process lets go within a second."""
    _own(control, job_id)
    with control.writing() as session:
        return export_jobs.cancel(session, job_id, now_at=control.clock())


def retry_export(control: Control, job_id: str) -> ExportJob:
    """A failed one goes on: the same rows of the same state of the ledger."""
    _own(control, job_id)
    with control.writing() as session:
        job = export_jobs.retry(session, job_id, now_at=control.clock())
    export_folders.start_runner(control.settings)
    return job


def remove_export(control: Control, job_id: str) -> ExportJob:
    """The file goes, and the job with it."""
    _own(control, job_id)
    with control.writing() as session:
        job = export_jobs.remove(session, job_id, now_at=control.clock())
    tidy(control)
    return job


def open_export(control: Control, job_id: str) -> tuple[ExportJob, Path]:
    """The file of one that is done, for a download. Raises as `get_export`, and RegistryError where
    it is not whole or not here."""
    job = get_export(control, job_id)
    if job.state != "done":
        raise RegistryError(f"the export is {job.state}: its file is offered when it is whole")
    path = export_folders.file_of(control.data_dir, job)
    if not path.is_file():
        raise NotFound(f"the file is not on this machine: {_where(control, job)}")
    with control.writing() as session:
        export_jobs.note_download(session, job, now_at=control.clock())
    return job, path


def asked_by(control: Control, job: ExportJob) -> str:
    """Who asked for it; "" for who may not know who the operators are."""
    known = job.asked_by == control.actor or permissions.allowed(control.grants, "audit.read")
    return job.asked_by if known else ""


def may_change(control: Control, job: ExportJob) -> bool:
    """Whether who asks may cancel, retry and remove it."""
    asked = job.asked_by == control.actor
    return asked or permissions.allowed(control.grants, "usage.write")


def tidy(control: Control) -> None:
    """What nobody is left to do; nothing is written where nothing is to be done."""
    now_at, settings = control.clock(), control.settings
    with control.reading() as session:
        found = export_jobs.jobs(session)
    lost = any(export_jobs.is_lost(job, process_is_alive, now_at) for job in found)
    over = any(job.expires_at is not None and job.expires_at <= now_at for job in found)
    if lost or over:
        keep_s = settings.exports_keep_s
        with control.writing() as session:
            export_jobs.fail_interrupted(session, process_is_alive, keep_s=keep_s, now_at=now_at)
            export_jobs.remove_expired(session, now_at=now_at)
            found = export_jobs.jobs(session)
    there = export_folders.folders(control.data_dir)
    if there - _kept(found):
        with control.reading() as session:  # behind the folders: a new job's may be among them
            gone = there - _kept(export_jobs.jobs(session))
        export_folders.sweep(control.data_dir, gone)
    host = socket.gethostname()
    here = [job for job in found if job.runner_host in ("", host)]
    if not any(job.state == "running" for job in here):
        _nudge(control, here, host, now_at)


def _where(control: Control, job: ExportJob) -> str:
    """What to do about a file that is not here. Machines are named to who sees the installation."""
    if job.runner_host == socket.gethostname():
        return "it is gone: export it again"
    if permissions.allowed(control.grants, "usage.read"):
        return f"it lies on {job.runner_host}: ask a gateway there"
    return "it lies on another one: try again, or ask who runs this server"


def _kept(jobs: Sequence[ExportJob]) -> frozenset[str]:
    return frozenset(job.id for job in jobs if job.state != "cancelled")


def _nudge(control: Control, jobs: Sequence[ExportJob], host: str, now_at: float) -> None:
    """A process for what has waited for one too long: those that were to work may be dead."""
    if not any(_is_forgotten(job, now_at) for job in jobs):
        return
    with control.writing() as session:
        if not export_jobs.nudge(session, now_at - NUDGE_S, host, now_at=now_at):
            return  # somebody else does
    export_folders.start_runner(control.settings)


def _is_forgotten(job: ExportJob, now_at: float) -> bool:
    since_at = job.heartbeat_at or job.created_at
    return job.state == "waiting" and now_at - since_at > NUDGE_S


def _own(control: Control, job_id: str) -> None:
    job = get_export(control, job_id)
    if not may_change(control, job):
        raise Forbidden("only who asked for an export, or an admin, may do that to it")


def _invoices(control: Control, scope: Scope) -> tuple[dict[str, object], int]:
    """Those whose month began in the span."""
    with control.reading() as session:
        found = invoices.list_invoices(session, scope.tenant_id or None)
    numbers = [one.number for one in found if scope.from_at <= one.began_at < scope.to_at]
    if not numbers:
        raise RegistryError("no invoice was issued for a month that begins in that span")
    return {"version": 1, "format": "invoices", "numbers": numbers}, len(numbers)


def _num_rows(control: Control, scope: Scope) -> int:
    """About how many there will be: the sums' own count, so for whole hours."""
    wanted = UsageFilter(
        int(scope.from_at),
        int(scope.to_at),
        (scope.tenant_id,) if scope.tenant_id else None,
        (scope.key_id,) if scope.key_id else None,
        (scope.model,) if scope.model else None,
    )
    with control.reading() as session:
        return usage_sums.total(session, wanted).num_rows


def _file_name(format_name: str, scope: Scope) -> str:
    first, last = (
        datetime.fromtimestamp(at, UTC).date().isoformat()
        for at in (scope.from_at, scope.to_at - 1)
    )
    what = "invoices" if format_name == "invoices" else "usage"
    return f"{what}-{first}-{last}.{SUFFIXES[format_name]}"
