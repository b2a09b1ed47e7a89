"""Exports over the gateway's end: their processes work on without it, and one that dies with it is
told of, offered to nobody, and goes on when somebody says so."""

import csv
import hashlib
import io
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from admin.billing import export_folders
from admin.context.operator_context import OperatorContext, open_context
from admin.web.forms import day_text
from bench.servers import Polyhost
from gateway.settings.settings import Settings
from registry.accounts import api_keys, tenants
from registry.money import export_jobs
from registry.money.export_jobs import ExportJob
from tests.admin.ledger_kit import DAY_S, Owner, post
from tests.admin.site import Visitor
from tests.e2e.conftest import Prepared

pytestmark = pytest.mark.e2e

PASSWORD = "the operator's password"
NUM_ROWS = 40_000
TRIES = 20
PATIENCE_S = 60.0


def fill(context: OperatorContext) -> int:
    """Postings of three days; what they cost together."""
    now_at = context.clock()
    with context.reading() as session:
        tenant = tenants.get_tenant(session, "acme")
        key = api_keys.list_keys(session, tenant.id)[0]
    rows = [
        Owner(tenant, key).posting(
            f"r{n:06}", cost_nanos=1001 + n, posted_at=now_at - (n % 3) * DAY_S
        )
        for n in range(NUM_ROWS)
    ]
    post(context, rows, NUM_ROWS)
    return sum(row.cost_nanos for row in rows)


def job_of(context: OperatorContext, job_id: str) -> ExportJob:
    with context.reading() as session:
        return export_jobs.get(session, job_id)


def part_of(context: OperatorContext, job: ExportJob) -> Path:
    path = export_folders.file_of(context.data_dir, job)
    return path.with_name(path.name + ".part")


@pytest.fixture
def stopped() -> Iterator[list[int]]:
    """Processes that stand still; none is left so, whatever the test came to."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"export_runner" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def stopped_in_the_middle(
    context: OperatorContext, visitor: Visitor, format_name: str, stopped: list[int]
) -> ExportJob:
    """An export that has begun to write, and whose process stands still before it is done."""
    for _ in range(TRIES):  # a machine may be so slow, or so quick, that it is over
        today = context.clock()
        span = {"from": day_text(today - 6 * DAY_S), "to": day_text(today)}
        fields = {**span, "format": format_name, "once": os.urandom(6).hex()}
        assert "was requested" in visitor.post("/export/ask", fields).text
        with context.reading() as session:
            job = export_jobs.jobs(session, limit=1)[0]
        deadline_s = time.monotonic() + PATIENCE_S
        while job.state == "waiting":
            assert time.monotonic() < deadline_s, "nobody takes it up"
            time.sleep(0.005)
            job = job_of(context, job.id)
        part = part_of(context, job)
        while job_of(context, job.id).state == "running":
            if part.exists() and part.stat().st_size > 0:
                stopped.append(job.runner_pid)
                os.kill(job.runner_pid, signal.SIGSTOP)
                if is_in_the_middle(context, job):
                    return job
                os.kill(job.runner_pid, signal.SIGCONT)
            time.sleep(0.001)
    raise AssertionError("it was never caught in the middle")


def is_in_the_middle(context: OperatorContext, job: ExportJob) -> bool:
    return part_of(context, job).exists() and job_of(context, job.id).state == "running"


def test_one_goes_on_without_the_gateway_and_one_that_died_with_it_when_told_to(
    prepared: Prepared, tmp_path: Path, stopped: list[int]
) -> None:
    data_dir = prepared.copy_to(tmp_path)
    house = Polyhost(data_dir, {"admin_password": PASSWORD, "max_exports_per_user": 2 * TRIES + 1})
    server_module = ("bench.gateway_server",)  # no model is asked here
    with open_context(Settings(data_dir=str(data_dir)), "tests") as context:
        nanos = fill(context)
        visitor = Visitor("")
        server = house.serve(module=server_module)
        with server.process:
            visitor.base = server.url
            assert visitor.sign_in("admin", PASSWORD).status == 200
            left = stopped_in_the_middle(context, visitor, "csv", stopped)
            killed = stopped_in_the_middle(context, visitor, "jsonl", stopped)
            server.process.kill()
            os.kill(killed.runner_pid, signal.SIGKILL)
            os.kill(left.runner_pid, signal.SIGCONT)
        server = house.serve(module=server_module)
        with server.process:
            visitor.base = server.url
            page = visitor.get("/exports").text
            assert "failed: interrupted" in page, "the session outlived the gateway as well"
            refused = visitor.get(f"/exports/{killed.id}/file")
            assert refused.status == 409
            server.wait_until(lambda: job_of(context, left.id).state != "running")
            done = job_of(context, left.id)
            assert (done.state, done.attempt) == ("done", left.attempt), "nobody began it anew"
            holds(visitor, done, nanos)
            assert "was restarted" in visitor.post(f"/export/retry/{killed.id}", {}).text
            server.wait_until(lambda: not job_of(context, killed.id).is_going_on)
            retried = job_of(context, killed.id)
            assert retried.attempt != killed.attempt
            holds(visitor, retried, nanos)
            assert server.stop() == 0


def holds(visitor: Visitor, job: ExportJob, nanos: int) -> None:
    """The file is whole: its digest and its sums are the job's, and those of what was posted."""
    assert (job.state, job.num_rows, job.cost_nanos) == ("done", NUM_ROWS, nanos), job.reason
    got = visitor.get(f"/exports/{job.id}/file")
    assert got.status == 200
    assert hashlib.sha256(got.body).hexdigest() == job.sha256
    rows = (
        list(csv.DictReader(io.StringIO(got.text)))
        if job.format == "csv"
        else [json.loads(line) for line in got.text.splitlines()]
    )
    assert len({row["request_id"] for row in rows}) == len(rows) == NUM_ROWS
    assert sum(int(row["cost_nanos"]) for row in rows) == nanos
