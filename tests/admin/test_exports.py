"""Exports in the background: made, followed, cancelled, killed, retried, taken by whoever may."""

import csv
import hashlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from admin.billing import export_file, export_folders, export_parquet
from admin.exporting import export_runner
from admin.operations import export_jobs as verbs
from admin.operations import usage
from admin.rendering.templating import size
from admin.web.forms import day_text
from registry.accounts import tenants
from registry.audit import latest
from registry.errors import AlreadyExists, IllegalTransition, NotFound, RegistryError
from registry.money import export_jobs, ledger
from registry.money.export_jobs import ExportJob
from registry.session import appending
from tests.admin.ledger_kit import DAY_S, POSTING, add_owners, post
from tests.admin.site import Site

PATIENCE_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def _used(site: Site) -> None:
    site.add_model("tiny")
    now_at = site.operator.clock()
    owners = add_owners(site.operator, "acme", "other")
    rows = [
        owners[n % 2].posting(
            f"r{n:06}",
            cost_nanos=1001 + n,
            posted_at=now_at - (n % 3) * DAY_S,
        )
        for n in range(12_000)
    ]
    post(site.operator, rows, 11_000)
    for name, role, of in (("vera", "viewer", ""), ("tom", "owner", "acme"),
                               ("olga", "viewer", "other")):  # fmt: skip
        site.add_user(name, role, of)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started: the test makes exports itself, or looks at them as they wait."""
    monkeypatch.setattr(export_folders, "start_runner", lambda settings: None)


@pytest.fixture(autouse=True)
def _none_left(site: Site) -> Iterator[None]:
    yield
    with site.operator.writing() as session:
        for job in export_jobs.jobs(session):
            if job.is_going_on:
                export_jobs.cancel(session, job.id, now_at=site.operator.clock())
            export_jobs.remove(session, job.id, now_at=site.operator.clock())
    verbs.tidy(site.operator)


def fields(site: Site, format_name: str, **more: str) -> dict[str, str]:
    today = site.operator.clock()
    span = {"from": day_text(today - 6 * DAY_S), "to": day_text(today)}
    return {**span, "format": format_name, "once": os.urandom(6).hex(), **more}


def ask(site: Site, format_name: str = "csv", tenant: str = "") -> ExportJob:
    """Asked for in person, with all rights."""
    now_at = site.operator.clock()
    scope = usage.scope_of(site.operator, now_at // DAY_S * DAY_S - 6 * DAY_S,
                           now_at + DAY_S, tenant or None)  # fmt: skip
    return verbs.ask_export(site.operator, format_name, scope, "exp_" + os.urandom(6).hex())


def now(site: Site, job_id: str) -> ExportJob:
    return verbs.get_export(site.operator, job_id)


def only_job(site: Site) -> ExportJob:
    (job,) = verbs.list_exports(site.operator).jobs
    return job


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to that"
        time.sleep(0.05)


def page_nanos(page: str) -> int:
    return int(re.findall(r'data-nanos="(-?\d+)"', page)[-1])


def test_every_format_is_made_and_sums_to_what_the_page_says(site: Site) -> None:
    """By the real process, asked for by the form, taken by the link."""
    ann = site.visitor("ann")
    total = page_nanos(ann.get("/usage").text)
    for format_name in ("csv", "jsonl", "parquet", "focus"):
        assert "was requested" in ann.post("/export/ask", fields(site, format_name)).text
    wait_until(lambda: all(job.state == "done" for job in verbs.list_exports(site.operator).jobs))
    page = ann.get("/exports").text
    assert page.count(">done<") == 4
    for job in verbs.list_exports(site.operator).jobs:
        assert job.cost_nanos == total, job.format
        answer = ann.get(f"/exports/{job.id}/file")
        assert answer.status == 200
        assert job.file_name in answer.headers["content-disposition"]
        assert hashlib.sha256(answer.body).hexdigest() == job.sha256
        assert len(answer.body) == job.size_bytes == int(answer.headers["content-length"])
        if job.format == "csv":
            rows = list(csv.DictReader(io.StringIO(answer.text)))
            assert sum(int(row["cost_nanos"]) for row in rows) == total
            assert len(rows) == job.num_rows == 12_000
        if job.format == "jsonl":
            assert sum(json.loads(line)["cost_nanos"] for line in answer.text.splitlines()) == total
        if job.format == "parquet":
            _, parquet = export_parquet.require_pyarrow()
            table = parquet.read_table(io.BytesIO(answer.body))
            assert sum(table["cost_nanos"].to_pylist()) == total
        if job.format == "focus":
            assert answer.text.startswith("BilledCost,")
    with site.operator.reading() as session:
        actions = [entry.action for entry in latest(session, 20)]
    assert actions.count("export.download") == 4


def test_issued_invoices_come_as_an_archive(site: Site, held: None) -> None:
    ann = site.visitor("ann")
    refused = ann.post("/export/ask", fields(site, "invoices"))
    assert refused.status == 422
    assert "no invoice was issued" in refused.text
    old = replace(POSTING, request_id="old", posted_at=86_400.0)
    old = replace(old, tenant_id=site.read(tenants.get_tenant, "acme").id)
    with appending(site.operator.engine, "test") as session:
        ledger.insert_postings(session, [old])
    issued = ann.post("/invoice/issue", {"tenant": "acme", "month": "1970-01", "details": ""})
    assert "was issued" in issued.text
    span = {"from": "1970-01-01", "to": "1970-01-31"}
    ann.post("/export/ask", fields(site, "invoices", tenant="acme") | span)
    assert export_runner.work_off(site.operator) == 1
    job = only_job(site)
    assert (job.state, job.num_rows, job.total_rows) == ("done", 1, 1)
    archive = zipfile.ZipFile(io.BytesIO(ann.get(f"/exports/{job.id}/file").body))
    pdf, told = (archive.read(name) for name in sorted(archive.namelist(), reverse=True))
    assert pdf.startswith(b"%PDF")
    assert json.loads(told)["net_nanos"] == POSTING.cost_nanos
    assert site.visitor("olga").get(f"/exports/{job.id}/file").status == 403


def test_a_tenants_user_sees_and_takes_that_tenants_exports_alone(site: Site, held: None) -> None:
    ann, tom, olga, vera = (site.visitor(name) for name in ("ann", "tom", "olga", "vera"))
    ann.post("/export/ask", fields(site, "csv"))
    ann.post("/export/ask", fields(site, "jsonl", tenant="acme"))
    assert tom.post("/export/ask", fields(site, "csv", tenant="other")).status == 403
    assert "was requested" in tom.post("/export/ask", fields(site, "csv")).text
    assert export_runner.work_off(site.operator) == 3
    mine, acme, everything = verbs.list_exports(site.operator).jobs
    assert mine.tenant_id == acme.tenant_id != everything.tenant_id == ""
    assert [tom.get("/exports").text.count(f"/exports/{one.id}/file")
            for one in (mine, acme, everything)] == [1, 1, 0]  # fmt: skip
    assert "/file" not in olga.get("/exports").text
    rows = list(csv.DictReader(io.StringIO(tom.get(f"/exports/{mine.id}/file").text)))
    assert {row["tenant_id"] for row in rows} == {mine.tenant_id}
    for who, job, status in (
        (tom, acme, 200), (tom, everything, 403), (olga, mine, 403), (olga, everything, 403),
        (vera, everything, 200), (ann, mine, 200),
    ):  # fmt: skip
        assert who.get(f"/exports/{job.id}/file").status == status
    unknown = f"/exports/exp_{'a' * 16}/file"
    assert tom.get(unknown).status == 403, "as another's"
    assert ann.get(unknown).status == 404
    # Who may only see changes nothing of others'.
    for who in (vera, tom):
        assert who.post(f"/export/remove/{everything.id}", {}).status == 403
    assert tom.post(f"/export/remove/{acme.id}", {}).status == 403, "another asked for it"
    assert ann.post(f"/export/remove/{acme.id}", {}, csrf="00" * 64).status == 403
    assert "was removed" in tom.post(f"/export/remove/{mine.id}", {}).text
    assert ann.get(f"/exports/{mine.id}/file").status == 404
    assert not export_folders.folder_of(site.operator.data_dir, mine.id).exists()


def test_a_tenants_user_is_told_no_machines_and_no_operators(site: Site, held: None) -> None:
    ann, tom, vera = (site.visitor(name) for name in ("ann", "tom", "vera"))
    ann.post("/export/ask", fields(site, "jsonl"))
    ann.post("/export/ask", fields(site, "csv", tenant="acme"))
    assert export_runner.work_off(site.operator) == 2
    job, _ = verbs.list_exports(site.operator).jobs
    assert (job.tenant_name, job.state) == ("acme", "done")
    whole_bytes = verbs.list_exports(site.operator).used_bytes
    assert whole_bytes > 2 * job.size_bytes
    for who, knows in ((tom, False), (vera, True), (ann, True)):
        page = who.get("/exports").text
        assert (">by ann<" in page) == knows
        assert (size(whole_bytes) in page) == knows
        assert size(job.size_bytes) in page
    with site.operator.writing() as session:
        row = session.get(export_jobs.ExportJobRow, job.id)
        assert row is not None
        row.runner_host = "gpu-7.internal"
    shutil.rmtree(export_folders.folder_of(site.operator.data_dir, job.id))
    for who, said in ((tom, "it is on another one"), (ann, "it is on gpu-7.internal")):
        answer = who.get(f"/exports/{job.id}/file")
        assert answer.status == 404
        assert said in answer.text
        assert ("gpu-7" in answer.text) == (who is ann)
        assert "gpu-7" not in who.get("/exports").text
    with site.operator.writing() as session:
        row = session.get(export_jobs.ExportJobRow, job.id)
        assert row is not None
        row.runner_host = socket.gethostname()
    assert "it was deleted; export it again" in tom.get(f"/exports/{job.id}/file").text


def test_a_form_that_is_sent_twice_makes_one_export(site: Site, held: None) -> None:
    ann, form = site.visitor("ann"), fields(site, "csv")
    ann.post("/export/ask", form)
    assert "This form was sent already" in ann.post("/export/ask", form).text
    assert only_job(site).state == "waiting"
    assert ann.post("/export/ask", fields(site, "exe")).status == 404
    assert ann.post("/export/ask", {"format": "csv"}).status == 422


def test_two_operators_press_the_same_button(site: Site, held: None) -> None:
    ann, bob = site.visitor("ann"), site.visitor("ann")
    ann.post("/export/ask", fields(site, "csv"))
    job = only_job(site)
    assert "was cancelled" in ann.post(f"/export/cancel/{job.id}", {}).text
    assert "cannot be cancelled" in bob.post(f"/export/cancel/{job.id}", {}).text
    assert "nothing to retry" in bob.post(f"/export/retry/{job.id}", {}).text
    assert export_runner.work_off(site.operator) == 0
    with pytest.raises(RegistryError, match="cancelled"):
        verbs.open_export(site.operator, job.id)


def test_killed_in_the_middle_it_says_so_offers_no_half_and_goes_on(
    site: Site, held: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ask(site)
    part = export_folders.file_of(site.operator.data_dir, job)
    part = part.with_name(part.name + ".part")
    child = os.fork()
    if not child:  # dies as by kill -9 while it writes its second batch
        beats = []

        def watch(self: export_runner.Beat, num_rows: int, cost_nanos: int, token: str) -> None:
            beats.append(num_rows)
            if len(beats) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        export_runner.Beat.watch = watch  # type: ignore[method-assign]
        site.operator.engine.dispose(close=False)
        export_runner.work_off(site.operator)
        os._exit(1)
    os.waitpid(child, 0)
    assert part.stat().st_size > 0
    assert site.read(export_jobs.get, job.id).state == "running"
    ann = site.visitor("ann")
    assert "failed: interrupted" in ann.get("/exports").text
    assert ann.get(f"/exports/{job.id}/file").status == 409
    assert "was restarted" in ann.post(f"/export/retry/{job.id}", {}).text
    looked: list[int] = []
    kept = export_runner.Beat.watch

    def watched(self: export_runner.Beat, num_rows: int, nanos: int, token: str) -> None:
        looked.append(num_rows)
        kept(self, num_rows, nanos, token)

    monkeypatch.setattr(export_runner.Beat, "watch", watched)
    assert export_runner.work_off(site.operator) == 1
    done = now(site, job.id)
    assert (done.state, done.num_rows) == ("done", 12_000)
    whole = ask(site)
    export_runner.work_off(site.operator)
    assert now(site, whole.id).sha256 == done.sha256, "byte for byte"


def test_cancelled_while_it_is_made_it_lets_go(
    site: Site, held: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ask(site)
    kept = export_runner.Beat.watch

    def cancelled(self: export_runner.Beat, num_rows: int, nanos: int, token: str) -> None:
        if now(site, job.id).state == "running":
            verbs.cancel_export(site.operator, job.id)
        wait_until(self._lost.is_set)
        kept(self, num_rows, nanos, token)

    monkeypatch.setattr(export_runner.Beat, "watch", cancelled)
    assert export_runner.work_off(site.operator) == 1
    assert now(site, job.id).state == "cancelled"
    assert not export_folders.folder_of(site.operator.data_dir, job.id).exists()


def test_no_more_run_wait_or_lie_there_than_may(site: Site, held: None) -> None:
    settings = site.operator.settings
    first, _ = ask(site), ask(site)
    with site.operator.writing() as session:
        taken = [
            export_jobs.claim(session, 1, "here", 1, now_at=site.operator.clock()) for _ in range(2)
        ]
    assert [one is not None for one in taken] == [True, False], "one at a time"
    small = replace(site.operator, settings=replace(settings, max_exports_per_user=2))
    scope = usage.scope_of(site.operator, 0.0, DAY_S)
    with pytest.raises(RegistryError, match="the maximum for one user"):
        verbs.ask_export(small, "csv", scope, "exp_third")
    small = replace(site.operator, settings=replace(settings, max_exports=2))
    with pytest.raises(RegistryError, match="remove some"):
        verbs.ask_export(small, "csv", scope, "exp_third")
    with pytest.raises(AlreadyExists):
        verbs.ask_export(site.operator, "csv", scope, first.id)


@pytest.mark.parametrize(
    "bound", [{"exports_quota_bytes": 1000}, {"exports_min_free_bytes": 2**60}]
)
def test_a_disk_that_is_full_is_told_and_nothing_stays(
    site: Site, held: None, bound: dict[str, Any]
) -> None:
    job = ask(site)
    small = replace(site.operator, settings=replace(site.operator.settings, **bound))
    assert export_runner.work_off(small) == 1
    failed = now(site, job.id)
    assert (failed.state, failed.reason_code) == ("failed", "disk_full")
    assert "remove some" in site.visitor("ann").get("/exports").text
    assert not export_folders.folder_of(site.operator.data_dir, job.id).exists()
    verbs.retry_export(site.operator, job.id)
    assert export_runner.work_off(site.operator) == 1
    assert now(site, job.id).state == "done"


def test_two_that_are_made_side_by_side_share_the_room(site: Site, held: None) -> None:
    job, other = ask(site), ask(site)
    bound = replace(site.operator.settings, exports_quota_bytes=100_000)
    small = replace(site.operator, settings=bound)
    job = site.write(export_jobs.claim, 2, "here", 1, now_at=site.operator.clock()) or job
    folders = [export_folders.folder_of(site.operator.data_dir, one.id) for one in (job, other)]
    part = folders[0] / "file.part"
    for folder in folders:
        folder.mkdir(parents=True)
    part.write_bytes(b"x" * 60_000)
    beat = export_runner.Beat(small, job, part, lambda rows, token: 0.5)
    beat.watch(1, 1, "")
    (folders[1] / "file.part").write_bytes(b"x" * 60_000)
    assert beat._write()
    with pytest.raises(export_runner.NoRoom):
        beat.watch(2, 2, "")


def test_an_archive_has_one_writer(site: Site, held: None) -> None:
    """One that was stopped, and thought dead, and wakes up again."""
    job = replace(ask(site), format="invoices", asked={"numbers": ["1"]})
    path = export_folders.file_of(site.operator.data_dir, job)
    path.parent.mkdir(parents=True)
    part = path.with_name(path.name + export_file.PART_SUFFIX)
    with export_file.alone(part), pytest.raises(RegistryError, match="another export"):
        export_runner._written(site.operator, job)


def test_asking_again_and_again_costs_no_process_each_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = site.operator.settings
    monkeypatch.setattr(export_folders, "RUNNER", ("sleep", "60"))
    made: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    try:
        for _ in range(20):
            export_folders.start_runner(settings)
        assert len(made) <= settings.max_exports_running + 1
        assert made
    finally:
        for process in made:
            process.kill()
            process.wait(30)
    wait_until(lambda: not any(t.name == export_folders.WATCHER for t in threading.enumerate()))
    export_folders.start_runner(settings)
    assert made[-1].poll() is None
    made[-1].kill()


def test_what_waits_for_another_machine_is_left_to_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    job, other = ask(site), ask(site)
    wait_until(lambda: all(now(site, one.id).state == "done" for one in (job, other)))
    monkeypatch.setattr(export_folders, "start_runner", started.append)
    mine = ask(site)
    with site.operator.writing() as session:
        for one, state in ((job, "waiting"), (other, "running")):
            row = session.get(export_jobs.ExportJobRow, one.id)
            assert row is not None
            row.state, row.runner_host, row.heartbeat_at = state, "elsewhere", mine.created_at
    started.clear()
    late = replace(site.operator, clock=lambda: mine.created_at + verbs.NUDGE_S + 1)
    verbs.list_exports(late)
    assert len(started) == 1, "what runs elsewhere does not make mine"
    assert now(site, job.id).heartbeat_at == mine.created_at, "for that machine to take up"


def test_what_is_over_goes_and_strays_go(site: Site, held: None) -> None:
    job = ask(site)
    export_runner.work_off(site.operator)
    stray = export_folders.folder_of(site.operator.data_dir, "exp_stray")
    stray.mkdir()
    late = now(site, job.id).expires_at or 0.0
    verbs.tidy(site.operator)
    assert not stray.exists()
    assert now(site, job.id).state == "done"
    verbs.tidy(replace(site.operator, clock=lambda: late))
    with pytest.raises(NotFound):
        now(site, job.id)
    assert not export_folders.folder_of(site.operator.data_dir, job.id).exists()


def test_what_nobody_takes_up_is_taken_up_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(export_folders, "start_runner", started.append)
    job = ask(site)
    assert len(started) == 1
    late = replace(site.operator, clock=lambda: job.created_at + verbs.NUDGE_S + 1)
    for _ in range(3):
        verbs.list_exports(late)
    assert len(started) == 2, "once, however many look"


def test_states_are_a_table(site: Site, held: None) -> None:
    job = ask(site)
    context = site.operator
    for wrong in (verbs.retry_export, verbs.remove_export):
        with pytest.raises(IllegalTransition):
            wrong(context, job.id)
    export_runner.work_off(context)
    for wrong in (verbs.retry_export, verbs.cancel_export):
        with pytest.raises(IllegalTransition):
            wrong(context, job.id)
    with appending(context.engine, "late") as session:
        told = export_jobs.Progress(1)
        assert not export_jobs.progress(session, job.attempt or "none", told, now_at=0.0)
    assert site.visitor("ann").post(f"/export/explode/{job.id}", {}).status == 404


def test_a_files_name_says_whose_usage_it_is(site: Site) -> None:
    tenant = site.write(tenants.create_tenant, "Ä/../acme & sons", now_at=site.operator.clock())
    scope = usage.scope_of(site.operator, 0.0, DAY_S, tenant=tenant.id)
    job = verbs.ask_export(site.operator, "csv", scope, "exp-named")
    assert job.file_name == "usage-_.._acme_sons-1970-01-01-1970-01-01.csv"
