"""Operations on exports that are made in the background.

Whoever may read a tenant's usage sees its exports and takes their files, whoever asked for them;
whoever asked, or may change usage, cancels, retries and removes them. Every look puts right what
nobody is left to put right: jobs whose process died are failed, expired ones and stray folders go,
and a process is started where something waits and none works.
"""

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from admin.billing import export_folders
from admin.context.operation import operation
from admin.context.operator_context import OperatorContext, process_is_alive, require, visible
from admin.context.policy import permissions
from admin.operations import usage
from registry.accounts import tenants
from registry.errors import Forbidden, NotFound, RegistryError
from registry.money import export_jobs, invoices
from registry.money import usage as usage_sums
from registry.money.export_jobs import ExportJob
from registry.money.exports import Scope
from registry.money.usage import UsageFilter

SUFFIXES: Final = {
    "csv": "csv",
    "jsonl": "jsonl",
    "parquet": "parquet",
    "focus": "focus.csv",
    "invoices": "zip",
}
MAX_SHOWN = 200
MAX_NAME_LEN = 64
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")
NUDGE_S = 10.0


@dataclass(frozen=True, slots=True)
class ExportList:
    """What a page shows: the newest first. `used_bytes`: of all exports on this machine, and
    `quota_bytes` what these may take (0: no bound); for who may not see all, those of the jobs, and
    no bound."""

    jobs: Sequence[ExportJob]
    used_bytes: int
    quota_bytes: int


@operation("usage.read", on="tenant", audit=("export.ask",))
def ask_export(context: OperatorContext, format_name: str, scope: Scope, job_id: str) -> ExportJob:
    """An export of the ledger as it is now; it begins at once, or when others are done. Raises
    AlreadyExists where that id is taken, RegistryError where there is nothing to export or as many
    are kept as may."""
    require(context, "usage.read", scope.tenant_id)
    if format_name not in SUFFIXES:
        raise NotFound("unknown export format")
    settings = context.settings
    if format_name == "invoices":
        asked, total_rows = _invoices(context, scope)
    else:
        order = usage.order_export(context, format_name, scope)  # type: ignore[arg-type]
        asked, total_rows = order.to_json(), 0
        if format_name != "focus":
            total_rows = _num_rows(context, scope)
    tidy(context)
    with context.writing() as session:
        if export_jobs.num_jobs(session) >= settings.max_exports:
            raise RegistryError(f"{settings.max_exports} exports exist, the maximum; remove some")
        mine = export_jobs.num_jobs(session, context.actor)
        if mine >= settings.max_exports_per_user:
            raise RegistryError(f"you have {mine} exports, the maximum for one user; remove some")
        name = tenants.get_tenant(session, scope.tenant_id).name if scope.tenant_id else ""
        job = export_jobs.ask(
            session,
            job_id,
            format_name,
            asked,
            tenant_id=scope.tenant_id,
            tenant_name=name,
            file_name=_file_name(format_name, scope, name),
            asked_by=context.actor,
            total_rows=total_rows,
            now_at=context.clock(),
        )
    export_folders.start_runner(settings)
    return job


@operation("usage.read", on="tenant")
def list_exports(context: OperatorContext) -> ExportList:
    """Those that who asks may see."""
    seen = visible(context, "usage.read")
    tidy(context)
    with context.reading() as session:
        found = export_jobs.jobs(session, tenant_ids=seen, limit=MAX_SHOWN)
    if seen is not None:
        return ExportList(found, sum(job.size_bytes for job in found), 0)
    used_bytes = export_folders.used_bytes(context.data_dir)
    return ExportList(found, used_bytes, context.settings.exports_quota_bytes)


@operation("usage.read", on="tenant")
def get_export(context: OperatorContext, job_id: str) -> ExportJob:
    """One. Raises NotFound; to those who may not see all Forbidden, whether there is one or not."""
    with context.reading() as session:
        try:
            job = export_jobs.get(session, job_id)
        except NotFound:
            require(context, "usage.read")
            raise
    if not permissions.allowed(context.grants, "usage.read", job.tenant_id):
        require(context, "usage.read")
    return job


@operation("usage.read", on="tenant", audit=("export.cancel",))
def cancel_export(context: OperatorContext, job_id: str) -> ExportJob:
    """It ends, wherever it runs: its process lets go within a second."""
    _own(context, job_id)
    with context.writing() as session:
        return export_jobs.cancel(session, job_id, now_at=context.clock())


@operation("usage.read", on="tenant", audit=("export.retry",))
def retry_export(context: OperatorContext, job_id: str) -> ExportJob:
    """A failed one goes on: the same rows of the same state of the ledger."""
    _own(context, job_id)
    with context.writing() as session:
        job = export_jobs.retry(session, job_id, now_at=context.clock())
    export_folders.start_runner(context.settings)
    return job


@operation("usage.read", on="tenant", audit=("export.remove",))
def remove_export(context: OperatorContext, job_id: str) -> ExportJob:
    """The file goes, and the job with it."""
    _own(context, job_id)
    with context.writing() as session:
        job = export_jobs.remove(session, job_id, now_at=context.clock())
    tidy(context)
    return job


@operation("usage.read", on="tenant", audit=("export.download",))
def open_export(context: OperatorContext, job_id: str) -> tuple[ExportJob, Path]:
    """The file of one that is done, for a download. Raises as `get_export`, and RegistryError where
    it is not whole or not here."""
    job = get_export(context, job_id)
    if job.state != "done":
        raise RegistryError(
            f"the export is {job.state}; its file can be downloaded when it is done"
        )
    path = export_folders.file_of(context.data_dir, job)
    if not path.is_file():
        raise NotFound(f"the file is not on this machine: {_where(context, job)}")
    with context.writing() as session:
        export_jobs.note_download(session, job, now_at=context.clock())
    return job, path


def asked_by(context: OperatorContext, job: ExportJob) -> str:
    """Who asked for it; "" for who may not know who the operators are."""
    known = job.asked_by == context.actor or permissions.allowed(context.grants, "audit.read")
    return job.asked_by if known else ""


def may_change(context: OperatorContext, job: ExportJob) -> bool:
    """Whether who asks may cancel, retry and remove it."""
    asked = job.asked_by == context.actor
    return asked or permissions.allowed(context.grants, "usage.write")


def tidy(context: OperatorContext) -> None:
    """What nobody is left to do; nothing is written where nothing is to be done."""
    now_at, settings = context.clock(), context.settings
    with context.reading() as session:
        found = export_jobs.jobs(session)
    lost = any(export_jobs.is_lost(job, process_is_alive, now_at) for job in found)
    over = any(job.expires_at is not None and job.expires_at <= now_at for job in found)
    if lost or over:
        keep_s = settings.exports_keep_s
        with context.writing() as session:
            export_jobs.fail_interrupted(session, process_is_alive, keep_s=keep_s, now_at=now_at)
            export_jobs.remove_expired(session, now_at=now_at)
            found = export_jobs.jobs(session)
    there = export_folders.folders(context.data_dir)
    if there - _kept(found):
        with context.reading() as session:  # behind the folders: a new job's may be among them
            gone = there - _kept(export_jobs.jobs(session))
        export_folders.sweep(context.data_dir, gone)
    host = socket.gethostname()
    here = [job for job in found if job.runner_host in ("", host)]
    if not any(job.state == "running" for job in here):
        _nudge(context, here, host, now_at)


def _where(context: OperatorContext, job: ExportJob) -> str:
    """What to do about a file that is not here. Machines are named to who sees the installation."""
    if job.runner_host == socket.gethostname():
        return "it was deleted; export it again"
    if permissions.allowed(context.grants, "usage.read"):
        return f"it is on {job.runner_host}; download it from a gateway there"
    return "it is on another one; try again, or ask an administrator"


def _kept(jobs: Sequence[ExportJob]) -> frozenset[str]:
    return frozenset(job.id for job in jobs if job.state != "cancelled")


def _nudge(context: OperatorContext, jobs: Sequence[ExportJob], host: str, now_at: float) -> None:
    """A process for what has waited for one too long: those that were to work may be dead."""
    if not any(_is_forgotten(job, now_at) for job in jobs):
        return
    with context.writing() as session:
        if not export_jobs.nudge(session, now_at - NUDGE_S, host, now_at=now_at):
            return  # somebody else does
    export_folders.start_runner(context.settings)


def _is_forgotten(job: ExportJob, now_at: float) -> bool:
    since_at = job.heartbeat_at or job.created_at
    return job.state == "waiting" and now_at - since_at > NUDGE_S


def _own(context: OperatorContext, job_id: str) -> None:
    job = get_export(context, job_id)
    if not may_change(context, job):
        raise Forbidden("only the user who requested an export, or an admin, may change it")


def _invoices(context: OperatorContext, scope: Scope) -> tuple[dict[str, object], int]:
    """Those whose month began in the span."""
    with context.reading() as session:
        found = invoices.list_invoices(session, scope.tenant_id or None)
    numbers = [one.number for one in found if scope.from_at <= one.began_at < scope.to_at]
    if not numbers:
        raise RegistryError("no invoice was issued for a month that begins in this period")
    return {"version": 1, "format": "invoices", "numbers": numbers}, len(numbers)


def _num_rows(context: OperatorContext, scope: Scope) -> int:
    """About how many there will be: the sums' own count, so for whole hours."""
    wanted = UsageFilter(
        int(scope.from_at),
        int(scope.to_at),
        (scope.tenant_id,) if scope.tenant_id else None,
        (scope.key_id,) if scope.key_id else None,
        (scope.model,) if scope.model else None,
    )
    with context.reading() as session:
        return usage_sums.total(session, wanted).num_rows


def _file_name(format_name: str, scope: Scope, tenant: str) -> str:
    """Of what and of whom; a tenant's name as far as it is safe in every file system."""
    first, last = (
        datetime.fromtimestamp(at, UTC).date().isoformat()
        for at in (scope.from_at, scope.to_at - 1)
    )
    what = "invoices" if format_name == "invoices" else "usage"
    whose = "-" + _UNSAFE.sub("_", tenant)[:MAX_NAME_LEN] if tenant else ""
    return f"{what}{whose}-{first}-{last}.{SUFFIXES[format_name]}"
