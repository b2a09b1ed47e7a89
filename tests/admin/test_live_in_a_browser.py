"""What changes by itself: it never takes a selection or a typed text, and says when all is not well
on every page."""

from collections.abc import Iterator

import pytest

from registry.models import catalog, revisions
from registry.models.catalog import PackFacts
from tests.admin.browser import Browser
from tests.admin.fleet_handler import FleetHandler, fleet, model, queue, status, telling
from tests.admin.site import MIB, PASSWORD, Site

MARKED = "String(getSelection())"
MARK = """(selector) => {
  const range = document.createRange();
  range.selectNodeContents(document.querySelector(selector));
  getSelection().removeAllRanges();
  getSelection().addRange(range);
}"""


@pytest.fixture(scope="module")
def handler(site: Site) -> Iterator[FleetHandler]:
    site.add_model("tiny")
    with telling(site, FleetHandler(None)) as found:
        say(site, found, 2)
        yield found


def say(site: Site, handler: FleetHandler, num_waiting: int) -> None:
    site.kit.dispatcher.statuses = [status(model("tiny"))]
    told = queue(num_waiting, 1)
    handler.fleet = fleet(site.operator.clock(), *site.kit.dispatcher.statuses, dispatcher=told)


def test_a_selection_stays_while_figures_change(
    site: Site, browser: Browser, handler: FleetHandler
) -> None:
    with browser.open(site.url) as visit:
        page = visit.page
        visit.sign_in("ann", PASSWORD)
        figure = ".figure:has(dt:text('Waiting')) dd >> nth=0"
        page.wait_for_selector(".live.on")
        page.wait_for_selector(figure + " >> text=2")
        page.evaluate(MARK, "[data-part=figures] .figure:nth-child(2) dt")
        say(site, handler, 3)
        page.wait_for_timeout(2500)
        assert page.evaluate(MARKED) == "Tokens per second"
        assert page.inner_text(figure) == "2", "the part with the selection waits"
        page.evaluate("getSelection().removeAllRanges()")
        page.wait_for_selector(figure + " >> text=3")
        page.evaluate(MARK, "h1")
        say(site, handler, 4)
        page.wait_for_selector(figure + " >> text=4")
        assert page.evaluate(MARKED) == "Overview"
        visit.check_clean()


def test_a_typed_prompt_outlives_a_new_revision(
    site: Site, browser: Browser, handler: FleetHandler
) -> None:
    del handler
    facts = PackFacts("rev-2", "tiny-2", "llama", "bfloat16", MIB, 2048, 32000)
    with browser.open(site.url) as visit:
        page = visit.page
        visit.sign_in("ann", PASSWORD)
        visit.go("/models/tiny")
        page.wait_for_selector(".live.on")
        page.evaluate(
            """() => {
              const field = document.createElement("textarea");
              document.querySelector("main").append(field);
              field.value = "half a prompt";
            }"""
        )
        now_at = site.operator.clock()
        with site.operator.writing() as session:
            job = revisions.begin_update(session, "tiny", "/x", dtype="auto", now_at=now_at)
            revisions.finish(session, job.registration, facts, keep=2, now_at=now_at)
            catalog.set_pinned(session, "tiny", True, now_at=now_at)
        page.wait_for_selector("text=This page has changed: reload it when you are done")
        assert page.input_value("main textarea >> nth=-1") == "half a prompt"
        page.wait_for_selector("[data-part=state] .tag >> text=pinned")
        visit.check_clean()


def test_escape_closes(site: Site, browser: Browser) -> None:
    with browser.open(site.url) as visit:
        page = visit.page
        visit.sign_in("ann", PASSWORD)
        page.keyboard.press("Control+k")
        visit.type_into("dialog input", "sherl")
        page.keyboard.press("Escape")
        assert not page.evaluate("document.querySelector('dialog').open")
        page.set_viewport_size({"width": 390, "height": 844})
        page.click("[aria-label=Navigation]")
        page.wait_for_selector(".menu-body nav")
        page.keyboard.press("Escape")
        page.wait_for_selector(".menu-body nav", state="hidden")
        assert page.evaluate("document.activeElement.ariaLabel") == "Navigation"


def test_every_page_says_that_no_worker_is_there(
    site: Site, browser: Browser, handler: FleetHandler
) -> None:
    with browser.open(site.url) as visit:
        page = visit.page
        visit.sign_in("ann", PASSWORD)
        visit.go("/models")
        page.wait_for_selector(".live.on")
        assert not page.locator(".banner .notice").count()
        site.kit.dispatcher.statuses = []
        handler.fleet = fleet(site.operator.clock(), lost={"worker-0": 1_800_000_000.0})
        page.wait_for_selector(".banner .tag >> text=no worker")
        assert "icon-down" in str(page.get_attribute("link[rel=icon]", "href"))
        page.reload()
        assert "icon-down" in str(page.get_attribute("link[rel=icon]", "href"))
        visit.check_accessible()
        visit.go("/health")
        page.wait_for_selector("[data-part=workers] tr:has-text('worker-0') >> text=08:00:00 UTC")
        visit.shoot("health-lost")
        visit.go("/audit")
        page.wait_for_selector(".banner >> text=No worker is connected since 08:00:00 UTC")
        say(site, handler, 0)
        page.wait_for_selector(".banner .notice", state="detached")
        assert "icon-down" not in str(page.get_attribute("link[rel=icon]", "href"))
        visit.check_clean()


def test_figures_of_before_are_dimmed(site: Site, browser: Browser, handler: FleetHandler) -> None:
    del handler
    with browser.open(site.url) as visit:
        page = visit.page
        visit.sign_in("ann", PASSWORD)
        page.wait_for_selector(".live.on")
        site.kit.dispatcher.stopping = True  # streams end
        page.wait_for_selector(":root.stale")
        assert page.evaluate("+getComputedStyle(document.querySelector('.figure dd')).opacity") < 1
        site.kit.dispatcher.stopping = False
        page.wait_for_selector(":root:not(.stale)")
