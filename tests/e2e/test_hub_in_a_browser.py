"""Registering from a hub by the pages: a look, a slow download, a kill, a cut, refusals."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from admin.context.operator_context import open_context
from bench.servers import Server
from gateway.settings.settings import Settings
from registry.models import catalog
from tests.admin.browser import NO_BROWSER, Browser, Visit, chromium_path, running_browser
from tests.e2e.conftest import DEVICE_BUDGET, Prepared
from tests.e2e.server import serving
from tests.engine.hub_server import Faults, HubServer, hub_server

PASSWORD = "the operator's password"
WEIGHTS = "model.safetensors"
TOO_MUCH = 1 << 41

pytestmark = pytest.mark.skipif(chromium_path() is None, reason=NO_BROWSER)


@pytest.fixture(scope="module")
def hub(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """Some repositories: one that can be hosted, others that cannot."""
    sources = tmp_path_factory.mktemp("sources")
    whole = prepared.sources["sherlock"]
    changes: dict[str, dict[str, object]] = {
        "org/unknown": {"model_type": "nonsense", "architectures": ["NonsenseForCausalLM"]},
        "org/vast": {},
    }
    with hub_server() as server:
        server.add("org/sherlock", whole)
        for repo, change in changes.items():
            folder = sources / repo.replace("/", "--")
            shutil.copytree(whole, folder)
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | change))
            if repo == "org/vast":
                (folder / WEIGHTS).unlink()
            server.add(repo, folder)
        yield server


@pytest.fixture(scope="module")
def hubbed(
    prepared: Prepared, hub: HubServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Browser]]:
    """A server whose hub that is."""
    settings = {
        "POLYHOST_ADMIN_PASSWORD": PASSWORD,
        "POLYHOST_HUB_ENDPOINT": hub.url,
        "POLYHOST_HUB_TIMEOUT_S": "2",
    }
    data_dir = prepared.copy_to(tmp_path_factory.mktemp("hubbed"))
    with (
        serving(data_dir, "--device-budget", DEVICE_BUDGET, **settings) as server,
        running_browser(chromium_path() or "") as browser,
    ):
        yield server, browser


@pytest.fixture
def visit(hubbed: tuple[Server, Browser], hub: HubServer) -> Iterator[tuple[Visit, Server]]:
    """An operator signed in, and a hub without faults."""
    server, browser = hubbed
    hub.faults = Faults()
    with browser.open(server.url) as visit:
        visit.page.set_default_timeout(60_000)
        visit.sign_in("admin", PASSWORD)
        yield visit, server


def check(visit: Visit, source: str, name: str = "hubbed") -> None:
    visit.go("/register")
    visit.page.fill("#f-name", name)
    visit.page.fill("#f-source", source)
    visit.page.click("button:has-text('Check')")


def kill_registrar(data_dir: Path, name: str) -> None:
    with open_context(Settings(data_dir=str(data_dir)), "tests") as context:
        with context.reading() as session:
            model = catalog.find_model(session, name)
        assert model is not None
        assert model.registrar_pid not in (0, os.getpid())
        os.kill(model.registrar_pid, signal.SIGKILL)


def test_a_slow_download_is_followed_cancelled_killed_cut_and_gone_on_with(
    visit: tuple[Visit, Server], hub: HubServer
) -> None:
    seen, server = visit
    page = seen.page
    # What is loaded is what would leave.
    for name in ("shakespeare", "python"):
        seen.go(f"/models/{name}")
        page.wait_for_selector(".live.on")
        page.click("a:text-is('Load')")
        page.click("main button:text-is('Load')")
        page.wait_for_selector("[data-part=state] >> text=resident")
    check(seen, "org/sherlock")
    page.wait_for_selector("#preflight >> text=qwen3")
    preflight = page.inner_text("#preflight")
    for part in ("Download", "2.9 MiB", "Commit c0ffee", "Memory", "of 18.0 MiB are free"):
        assert part in preflight, preflight
    seen.shoot("register-hub-checked")

    hub.faults.pace_s = 0.1
    page.click("button:has-text('Register')")
    page.wait_for_selector("text=hubbed is being registered.")
    seen.go("/registrations")
    row = "[data-part='job:hubbed']"
    page.wait_for_selector(f"{row} >> text=/download/")
    page.wait_for_selector(f"{row} >> text=/MB.s; .* left/")
    seen.check_accessible()
    seen.shoot("registrations-going-on")

    page.click("a:has-text('Cancel')")
    page.click("button:has-text('Cancel registration')")
    page.wait_for_selector("text=The registration of hubbed was cancelled.")
    seen.go("/registrations")
    page.wait_for_selector("text=failed: cancelled")

    # Killed in the middle, the page says so, and a retry fetches only what is missing.
    page.click("button:has-text('Retry')")
    page.wait_for_selector(f"{row} >> text=/MB.s/")
    before = hub.sent[WEIGHTS]
    kill_registrar(server.data_dir, "hubbed")
    page.wait_for_selector("text=failed: interrupted")
    seen.shoot("registrations-failed")
    hub.faults.pace_s = 0.0
    hub.faults.cuts[WEIGHTS] = [300_000]
    hub.asked.clear()
    page.click("button:has-text('Retry')")
    page.wait_for_selector("tr:has-text('hubbed') >> text=done")
    ranges = [asked for path, asked in hub.asked if path.endswith(WEIGHTS) and "/lfs/" in path]
    assert len(ranges) == 2, "cut once"
    assert all(asked.startswith("bytes=") for asked in ranges), "neither began anew"
    assert hub.sent[WEIGHTS] - before < len(hub.repos["org/sherlock"][WEIGHTS])
    seen.shoot("registrations-done")
    seen.check_clean()


def test_each_refusal_has_its_reason_and_what_to_do(
    visit: tuple[Visit, Server], hub: HubServer
) -> None:
    seen, _ = visit
    hub.faults.status["/api/models/org/gated"] = (403, 9, "GatedRepo")
    vast = {"type": "file", "path": WEIGHTS, "oid": "1" * 40, "size": TOO_MUCH,
            "lfs": {"oid": "a" * 64, "size": TOO_MUCH, "pointerSize": 134}}  # fmt: skip
    refusals = {
        "org/gated": ("hub_denied", "accept its licence on the hub"),
        "org/unknown": ("unknown_family", "nonsense"),
        "org/vast": ("disk_full", "free disk space"),
    }
    for repo, (code, advice) in refusals.items():
        hub.faults.entries = [vast] if repo == "org/vast" else []
        check(seen, repo, "refused")
        told = seen.page.inner_text("#preflight .notice.bad")
        assert f"This model cannot be registered: {code}." in told
        assert advice in told, told
        assert not seen.page.query_selector("button:has-text('Register')")
    seen.shoot("register-hub-refused")
    seen.check_clean()
