"""The operator's first page on a real server of several gateway processes: a load, an eviction and
the end of a worker, each seen as it happens."""

import os
import re
import signal

import openai
import pytest

from tests.admin.browser import NO_BROWSER, chromium_path, running_browser
from tests.e2e.conftest import DEVICE_BUDGET, Prepared
from tests.e2e.server import child_pids, serving

PASSWORD = "the operator's password"
NAMES = ("shakespeare", "sherlock", "python")


@pytest.mark.skipif(chromium_path() is None, reason=NO_BROWSER)
def test_loads_and_evictions_are_seen_as_they_happen(
    prepared: Prepared, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data_dir = prepared.copy_to(tmp_path_factory.mktemp("overview"))
    arguments = ("--device-budget", DEVICE_BUDGET, "--gateway-processes", "2")
    with (
        serving(data_dir, *arguments, POLYHOST_ADMIN_PASSWORD=PASSWORD) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=prepared.key) as client,
        running_browser(chromium_path() or "") as browser,
        browser.open(server.url) as one,
        browser.open(server.url) as other,
    ):
        server.wait_ready()
        for visit, path in ((one, "/overview"), (other, "/models")):
            visit.page.set_default_timeout(60_000)
            visit.sign_in("admin", PASSWORD)
            visit.go(path)
            visit.page.wait_for_selector(".live.on")

        def ask(model: str) -> None:
            client.completions.create(model=model, prompt="Once", max_tokens=4)

        def on_device(model: str) -> str:
            return f".strip a[aria-label^='{model}: resident']"

        for model in NAMES[:2]:
            ask(model)
            one.page.wait_for_selector(on_device(model), state="attached")
            other.page.wait_for_selector(f"[data-part='state:{model}'] >> text=resident")

        # The third has no room: one of the two has to go, and both pages say so.
        ask(NAMES[2])
        one.page.wait_for_selector(on_device(NAMES[2]), state="attached")
        one.page.wait_for_selector("[data-part=evicted] >> text=/^evicted$|evicted after/")
        one.page.wait_for_selector(f"[data-part=evicted] >> text={NAMES[2]}")
        one.page.wait_for_selector("[data-part=swaps] >> text=eviction")
        other.page.wait_for_selector(f"[data-part='state:{NAMES[2]}'] >> text=resident")
        other.page.wait_for_function(
            "all => all.filter((name) => document.querySelector(`[data-part='state:${name}']`)"
            ".textContent.includes('resident')).length === 2",
            arg=list(NAMES),
        )
        one.page.wait_for_selector(
            "[data-part=figures] >> text=/[1-9][0-9]* requests in the last 5 min/"
        )
        told = one.page.inner_text("[data-part=tables]")
        assert one.page.locator(".strip a").count() == 2, told
        one.check_accessible()
        one.shoot("overview-real")

        # Who has died is gone from the picture, and back with nothing on it.
        (worker,) = child_pids(server, "engine.worker.main")
        os.kill(worker, signal.SIGKILL)
        one.page.wait_for_selector(on_device(NAMES[2]), state="detached")
        server.wait_until(lambda: len(child_pids(server, "engine.worker.main")) == 1)
        ask(NAMES[0])
        one.page.wait_for_selector(on_device(NAMES[0]), state="attached")
        hour = one.page.inner_text("[data-part=hour]")
        assert re.search(r"loads: 2, evictions: 1", hour), hour
        for visit in (one, other):
            visit.check_clean()
