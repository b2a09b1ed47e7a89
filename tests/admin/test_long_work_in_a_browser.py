"""Exports, registrations and what is done to a model, as people see and do it, with a browser."""

import csv
from datetime import UTC, datetime
from pathlib import Path

import pytest

from admin.billing import export_folders
from admin.exporting import export_runner
from admin.registration import registrar
from registry.models import catalog, registrations, revisions
from registry.models.catalog import PackFacts
from registry.money import export_jobs
from tests.admin.browser import Browser
from tests.admin.ledger_kit import add_owners, post
from tests.admin.site import MIB, PASSWORD, Site, worker_status
from tests.admin.test_exports import page_nanos

NO_ROOM = "no disk space left for exports: remove some, then retry"
FACTS = PackFacts("rev-2", "pack-2", "llama", "bfloat16", 64 * MIB, 2048, 32_000)


@pytest.fixture(scope="module", autouse=True)
def _filled(site: Site) -> None:
    """Postings, and a registration in every state."""
    now_at = site.operator.clock()
    for name in ("tiny", "done"):
        site.add_model(name)
    (owner,) = add_owners(site.operator, "a tenant with a long name & sons", key_name="first")
    with site.operator.writing() as session:
        going = catalog.add_model(
            session, "org/a-model-with-quite-a-long-name", "org/a-model-with-quite-a-long-name",
            registrar_host="elsewhere", registrar_pid=1, now_at=now_at + 600.0,
        )  # fmt: skip
        registrations.progress(session, going.registration, "download", 3 << 30, 5 << 30,
                               now_at=now_at + 600.0, bytes_per_s=41.5e6)  # fmt: skip
        for name, code, reason in (
            ("gated", "hub_denied", "the hub does not give org/gated (status 403): accept its "
             "licence on the hub, or set HF_TOKEN (setting hub_token) to a token that may"),
            ("stopped", "cancelled", "cancelled by admin:ann"),
        ):  # fmt: skip
            model = catalog.add_model(session, name, f"org/{name}", now_at=now_at - 3600.0)
            catalog.fail(session, model.registration, code, reason, now_at=now_at)
    rows = [
        owner.posting(f"r{n:05}", posted_at=now_at, cost_nanos=1_000_001 + n) for n in range(6_000)
    ]
    post(site.operator, rows)
    site.kit.dispatcher.statuses = [worker_status()]


def test_an_export_is_asked_for_followed_and_taken_and_sums_to_the_page(
    site: Site, browser: Browser, tmp_path: Path
) -> None:
    """It survives a reload and a sign-out."""
    with browser.open(site.url) as visit:
        page = visit.page
        visit.sign_in("ann", PASSWORD)
        visit.go("/exports")
        visit.check_accessible()
        visit.shoot("exports-empty")
        visit.go("/usage")
        total = page_nanos(page.content())
        page.click("button:has-text('CSV')")
        page.wait_for_selector("text=was requested.")
        page.reload()
        page.click(".side button[aria-label='Sign out']")
        page.wait_for_selector("text=Sign in")
        visit.sign_in("ann", PASSWORD)
        visit.go("/exports")
        page.wait_for_selector("td.work >> text=done")
        assert page_nanos(page.content()) == total
        with page.expect_download() as coming:
            page.click("a:has-text('Download')")
        path = tmp_path / coming.value.suggested_filename
        coming.value.save_as(path)
        assert path.name.startswith("usage-")
        assert path.suffix == ".csv"
        with path.open(newline="") as stream:
            assert sum(int(row["cost_nanos"]) for row in csv.DictReader(stream)) == total > 0
        visit.check_clean()


def test_exports_in_every_state_are_clean_accessible_and_fit(
    site: Site, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_folders, "start_runner", lambda settings: None)
    ann = site.visitor("ann")
    for number, name in enumerate(("focus", "parquet", "csv", "jsonl", "csv")):
        day = site.operator.clock()
        sent = {"from": datetime.fromtimestamp(day, UTC).date().isoformat()}
        ann.post("/export/ask", {**sent, "to": sent["from"], "format": name, "once": str(number)})
    context, later = site.operator, site.operator.clock() + 600.0
    with context.writing() as session:
        for state in ("failed", "cancelled", "running"):
            job = export_jobs.claim(session, 9, "elsewhere", 1, now_at=later)
            assert job is not None
            if state == "failed":
                told_at = {"keep_s": 9e4, "now_at": later}
                export_jobs.fail(session, job.attempt, "disk_full", NO_ROOM, **told_at)
            elif state == "cancelled":
                export_jobs.cancel(session, job.id, now_at=later)
            else:
                told = export_jobs.Progress(2_400, 1 << 20, 9, 0.4, 0.02)
                export_jobs.progress(session, job.attempt, told, now_at=later)
    with browser.open(site.url) as visit:
        visit.sign_in("ann", PASSWORD)
        visit.go("/exports")
        visit.page.wait_for_selector("text=/2,400 of about .* 30 s left/")
        visit.check_accessible()
        visit.shoot("exports")
        # Its progress is seen, and its end too, without loading the page by hand.
        assert job is not None
        visit.page.wait_for_selector(".live.on")
        with context.writing() as session:
            told = export_jobs.Progress(3_600, 2 << 20, 9, 0.6, 0.02)
            export_jobs.progress(session, job.attempt, told, now_at=later)
        visit.page.wait_for_selector("text=/3,600 of about .* 20 s left/")
        visit.page.click("tr:has-text('failed') >> button:has-text('Retry')")
        visit.page.wait_for_selector("text=The export was restarted.")
        visit.page.click("tr:has-text('running') >> button:has-text('Cancel')")
        visit.page.wait_for_selector("text=The export was cancelled.")
        assert export_runner.work_off(context) >= 1
        visit.page.wait_for_selector("tr:has-text('JSONL') >> text=done")
        visit.check_clean()


def test_registrations_are_clean_accessible_and_fit(site: Site, browser: Browser) -> None:
    with browser.open(site.url) as visit:
        page = visit.page
        visit.sign_in("ann", PASSWORD)
        visit.go("/registrations")
        page.wait_for_selector("text=/41.5 MB.s; .* left/")
        visit.check_accessible()
        visit.shoot("registrations")
        page.select_option("select[name=state]", "failed")
        page.wait_for_url("**state=failed**")
        page.wait_for_selector("text=accept its licence on the hub")
        assert not page.query_selector("table[aria-label=Registrations] >> text=tiny")
        visit.check_clean()


def test_what_is_done_to_a_model(
    site: Site, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pin and unpin, a revision and back, retry and cancel; tests/e2e/ loads and unloads."""
    monkeypatch.setattr(registrar, "run_detached", lambda context, model: None)
    now_at = site.operator.clock()
    with site.operator.writing() as session:
        update = revisions.begin_update(session, "done", "/models/done", dtype="auto",
                                        now_at=now_at)  # fmt: skip
        assert revisions.finish(session, update.registration, FACTS, keep=3, now_at=now_at)
    with browser.open(site.url) as visit:
        page = visit.page
        visit.sign_in("ann", PASSWORD)
        visit.go("/models/done")
        page.click("button:has-text('Pin')")
        page.wait_for_selector("text=done was pinned and is never evicted.")
        page.click("button:has-text('Unpin')")
        page.wait_for_selector("text=done was unpinned.")

        assert page.inner_text("tr:has-text('served') code") == "rev-2"
        (site.operator.packs_dir / "done").mkdir(parents=True)
        page.click("a:has-text('Roll back')")
        page.wait_for_selector("text=/Revision rev-done is served again/")
        page.click("button:has-text('Roll back')")
        page.wait_for_selector("tr:has-text('served') >> text=rev-done")
        visit.shoot("model-revisions")

        visit.go("/registrations")
        page.click("tr:has-text('stopped') >> button:has-text('Retry')")
        page.wait_for_selector("[data-part='job:stopped']")
        page.click("tr:has([data-part='job:stopped']) >> a:has-text('Cancel')")
        page.click("button:has-text('Cancel registration')")
        page.wait_for_selector("text=The registration of stopped was cancelled.")
        visit.check_clean()


def test_two_operators_retry_and_cancel_one_registration(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(
        registrar, "run_detached", lambda context, model: begun.append(model.registration)
    )
    ann, bob = site.visitor("ann"), site.visitor("ann")
    assert "is being registered again" in ann.post("/model/do/retry/gated", {}).text
    again = bob.post("/model/do/retry/gated", {})
    assert again.status == 409
    assert "only a failed registration" in again.text
    assert len(begun) == 1, "one process for one registration"
    assert "was cancelled" in bob.post("/model/do/cancel/gated", {}).text
    late = ann.post("/model/do/cancel/gated", {})
    assert late.status == 409
    assert "no registration to cancel" in late.text
