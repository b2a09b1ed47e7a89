"""The first page as people see it: a load and an eviction as they happen, nothing jumps, keys."""

from collections.abc import Iterator
from typing import Any

import pytest

from engine.protocol import WorkerStatus
from gateway.dispatch.decisions import Move
from registry.accounts import tenants
from tests.admin.browser import Browser, Visit
from tests.admin.fleet_handler import (
    FleetHandler,
    eviction,
    fleet,
    group,
    model,
    queue,
    status,
    swap,
    telling,
)
from tests.admin.site import PASSWORD, Site

NAMES = ("alpha", "beta", "org/gamma-7b-instruct-with-a-long-name")
_WATCH_SHIFTS = """
window.shifted = 0;
new PerformanceObserver((list) => {
  for (const each of list.getEntries()) window.shifted += each.value;
}).observe({type: "layout-shift", buffered: false});
"""


@pytest.fixture(scope="module")
def handler(site: Site) -> Iterator[FleetHandler]:
    for name in NAMES:
        site.add_model(name)
    with telling(site, FleetHandler(None)) as found:
        yield found


def say(site: Site, handler: FleetHandler, worker: WorkerStatus, **fields: Any) -> None:
    """The worker's status as every page has it."""
    site.kit.dispatcher.statuses = [worker]
    handler.fleet = fleet(site.operator.clock(), worker, **fields)


def open_overview(visit: Visit) -> None:
    visit.sign_in("ann", PASSWORD)
    visit.page.wait_for_url("**/overview")
    visit.page.wait_for_selector(".live.on")


def test_a_load_and_an_eviction_are_seen_as_they_happen(
    site: Site, browser: Browser, handler: FleetHandler
) -> None:
    before = status(model("alpha"), model("beta"))
    say(site, handler, before)
    with browser.open(site.url) as one, browser.open(site.url) as other:
        open_overview(one)
        other.sign_in("ann", PASSWORD)
        other.go("/models")
        other.page.wait_for_selector(".live.on")
        one.page.wait_for_selector(".strip a[aria-label^='beta: resident']", state="attached")
        one.page.evaluate(_WATCH_SHIFTS)
        gone, come = "[data-part='state:beta']", f"[data-part='state:{NAMES[2]}']"
        assert "resident" in other.page.inner_text(gone)

        now_at = site.operator.clock()
        moves = [
            Move(now_at - 600, "worker-0", "alpha", "loading", "resident"),
            Move(now_at - 600, "worker-0", "beta", "loading", "resident"),
            Move(now_at - 1, "worker-0", "beta", "resident", "warm"),
            Move(now_at - 1, "worker-0", NAMES[2], "cold", "loading"),
        ]
        told: dict[str, Any] = {
            "moves": moves,
            "swaps": [swap(now_at - 1, "beta", "evict", f"room for {NAMES[2]}")],
            "evictions": [eviction(now_at - 1, "beta", NAMES[2])],
        }
        loading = status(model("alpha"), model("beta", "warm"), model(NAMES[2], "loading"))
        say(site, handler, loading, **told)
        one.page.wait_for_selector("[data-part=evicted] td >> text=/^evicted$/")
        one.page.wait_for_selector("[data-part=hour] >> text=loading, loads: 0, evictions: 0")
        one.page.wait_for_selector(".strip a[aria-label^='beta']", state="detached")
        other.page.wait_for_selector(f"{gone} >> text=warm")
        other.page.wait_for_selector(f"{come} >> text=loading")

        told["moves"] = [*moves, Move(now_at, "worker-0", NAMES[2], "loading", "resident")]
        told["swaps"] = [swap(now_at, NAMES[2], "load"), *told["swaps"]]
        say(site, handler, status(model("alpha"), model("beta", "warm"), model(NAMES[2])), **told)
        one.page.wait_for_selector(
            f".strip a[aria-label^='{NAMES[2]}: resident']", state="attached"
        )
        one.page.wait_for_selector("[data-part=swaps] >> text=from host memory")
        other.page.wait_for_selector(f"{come} >> text=resident")
        assert one.page.evaluate("window.shifted") < 0.02, "the page stays where it is"
        one.check_clean()
        other.check_clean()


def test_the_page_is_accessible_and_fits_at_every_width(
    site: Site, browser: Browser, handler: FleetHandler
) -> None:
    now_at = site.operator.clock()
    tenant = site.write(tenants.create_tenant, "acme", now_at=now_at)
    rows = [model("alpha", running=3), model("beta"), model(NAMES[2])]
    moves = [
        Move(now_at - 3300 + n * 150, "worker-0", name, was, now)  # type: ignore[arg-type]
        for n in range(20)
        for name, was, now in (
            (NAMES[n % 3], "cold" if n < 3 else "warm", "resident"),
            (NAMES[(n + 1) % 3], "resident", "warm"),
        )
    ]
    say(
        site,
        handler,
        status(*rows),
        moves=moves,
        since_at=now_at - 3300,
        waiting=[group(tenant.id, "beta"), group(tenant.id, NAMES[2], 1)],
        evictions=[eviction(now_at - 9, "beta", NAMES[2], 3), eviction(now_at - 60, "beta", "x")],
        swaps=[swap(now_at - n, NAMES[n % 3], ("load", "evict")[n % 2]) for n in range(10)],
        dispatcher=queue(4, 3, beta=0.2),
    )
    with browser.open(site.url) as visit:
        open_overview(visit)
        visit.page.wait_for_selector("[data-part=waiting] >> text=acme")
        visit.check_accessible()
        visit.shoot("overview")
        visit.page.click("summary:has-text('Show as a table')")
        visit.check_accessible()
        visit.shoot("overview-table")
        visit.page.set_viewport_size({"width": 320, "height": 640})
        visit.check_layout()
        visit.check_clean()


def test_a_part_of_the_picture_is_read_by_keyboard_while_it_changes(
    site: Site, browser: Browser, handler: FleetHandler
) -> None:
    say(site, handler, status(model("alpha", running=1), model("beta")))
    with browser.open(site.url) as visit:
        open_overview(visit)
        page = visit.page
        page.wait_for_selector(".strip a[aria-label*='running requests: 1']", state="attached")
        page.focus(".strip a[aria-label^='alpha']")
        page.wait_for_selector("[data-told] >> text=alpha: resident since")
        say(site, handler, status(model("alpha", running=2), model("beta")))
        page.wait_for_selector("[data-told] >> text=running requests: 2")
        held = "document.activeElement.getAttribute('aria-label')"
        assert page.evaluate(held).startswith("alpha")
        page.keyboard.press("Tab")
        page.wait_for_selector("[data-told] >> text=beta: resident since")
        page.keyboard.press("Enter")
        page.wait_for_url("**/models/beta")
        visit.check_clean()


def test_a_hundred_models_fit(site: Site, browser: Browser, handler: FleetHandler) -> None:
    rows = [model(f"org/model-{n:03}-instruct") for n in range(100)]
    pages = {f"{row.model_id}/weights": 1 + n % 4 for n, row in enumerate(rows)} | {"free": 6}
    say(site, handler, status(*rows, pages=pages))
    with browser.open(site.url) as visit:
        open_overview(visit)
        visit.page.wait_for_selector("text=and 76 more on worker-0")
        visit.check_accessible()
        visit.shoot("overview-hundred")
        visit.check_clean()


def test_it_says_so_when_nobody_is_there(
    site: Site, browser: Browser, handler: FleetHandler
) -> None:
    say(site, handler, status(model("alpha")))
    with browser.open(site.url) as visit:
        open_overview(visit)
        site.kit.dispatcher.statuses = []
        handler.fleet = fleet(site.operator.clock(), lost={"worker-0": site.operator.clock()})
        visit.page.wait_for_selector("text=worker-0 stopped at")
        handler.fleet = None
        visit.page.wait_for_selector("text=The dispatcher does not answer")
        visit.check_accessible()
        visit.shoot("overview-away")
        say(site, handler, status(model("alpha")))
        visit.page.wait_for_selector(".strip a[aria-label^='alpha']", state="attached")
        visit.check_clean()


def test_without_scripts_it_is_a_page(site: Site, browser: Browser, handler: FleetHandler) -> None:
    say(site, handler, status(model("alpha")))
    with browser.open(site.url, scripts=False) as visit:
        visit.sign_in("ann", PASSWORD)
        table = "[data-part=tables] >> text=idle models evicted"
        for _ in range(20):  # what pages share is some seconds old
            if visit.page.locator(table).count():
                break
            visit.page.wait_for_timeout(500)
            visit.go("/overview")
        visit.page.click("summary:has-text('Show as a table')")
        visit.page.wait_for_selector(table)
        assert visit.page.locator("[data-part=arenas] .strip").count() == 1
