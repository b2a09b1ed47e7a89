"""The operator's pages on a real server: what an operator does first, in a browser, end to end."""

import re

import pytest

from tests.admin.browser import NO_BROWSER, chromium_path, running_browser
from tests.e2e.conftest import DEVICE_BUDGET, Prepared
from tests.e2e.folders import REFUSED
from tests.e2e.server import serving, usage_rows

PASSWORD = "the operator's password"


@pytest.mark.skipif(chromium_path() is None, reason=NO_BROWSER)
def test_an_operator_registers_loads_asks_and_unloads(
    prepared: Prepared, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data_dir = prepared.copy_to(tmp_path_factory.mktemp("admin"))
    refused = next(iter(REFUSED))
    with (
        serving(
            data_dir, "--device-budget", DEVICE_BUDGET, POLYHOST_ADMIN_PASSWORD=PASSWORD
        ) as server,
        running_browser(chromium_path() or "") as browser,
        browser.open(server.url) as visit,
    ):
        page = visit.page
        page.set_default_timeout(60_000)
        assert "/admin" in server.process.read_log()
        visit.sign_in("admin", PASSWORD)

        # A folder that cannot be hosted is refused before anything is done, with the reason.
        visit.go("/register")
        page.fill("#f-name", "nope")
        page.fill("#f-source", str(prepared.sources[refused]))
        page.click("button:has-text('Check')")
        page.wait_for_selector("text=This model cannot be registered")
        visit.shoot("register-refused")
        visit.expected = ("422",)

        # One that can: what it takes, whether it fits, then its progress to `ready`.
        visit.go("/register")
        page.fill("#f-name", "fourth")
        page.fill("#f-source", str(prepared.sources["sherlock"]))
        page.click("button:has-text('Check')")
        page.wait_for_selector("#preflight >> text=qwen3")
        page.wait_for_selector("#preflight >> text=are free")
        visit.shoot("register-checked")
        page.click("button:has-text('Register')")
        page.wait_for_selector("text=fourth is being registered.")
        page.reload()  # the work goes on, and the page finds it
        page.wait_for_selector("text=Requests by hour")
        visit.shoot("model-registered")

        # Loaded and unloaded by hand, and seen without loading the page anew.
        page.wait_for_selector(".live.on")
        page.click("a:text-is('Load')")
        page.click("main button:text-is('Load')")
        page.wait_for_selector("[data-part=state] >> text=resident")

        # One real request, billed to the key's tenant.
        page.fill("#f-prompt", "Tell me about the case.")
        page.fill("#f-key", page.get_attribute("#f-key-list option", "value") or "")
        page.click("button:has-text('Send')")
        page.wait_for_selector(".answer-text")
        visit.shoot("model-asked")
        told = page.inner_text(".answer .help")
        found = re.search(r"chatcmpl-[0-9a-f]+", told)
        assert found is not None, told
        server.wait_until(server.has_posted)
        rows = {row["request_id"]: row for row in usage_rows(data_dir)}
        assert rows[found.group()]["model"] == "fourth"

        page.click("a:has-text('Unload')")
        page.wait_for_selector("text=Its memory is freed.")
        page.click("button:has-text('Unload')")
        page.wait_for_selector("[data-part=state] >> text=/warm|cold/")

        # Rolled out of service: requests for it are refused from then on.
        page.click("a:has-text('Remove')")
        page.click("button:has-text('Remove')")
        page.wait_for_selector("text=fourth was removed.")
        visit.check_clean()
