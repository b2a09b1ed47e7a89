"""Checks, plans, alerts and what a load evicts, as people see and use them, with a browser."""

import time
from dataclasses import replace

import msgspec
import pytest

from admin.operations import prices
from admin.registration import preflight
from admin.registration.preflight import Preflight
from admin.registration.register_process import RegisterEvent
from registry.money.prices import PriceRecord
from tests.admin.browser import Browser
from tests.admin.fleet_handler import PAGE, model, status
from tests.admin.ledger_kit import Owner, add_owners, post
from tests.admin.site import PASSWORD, Site
from tests.admin.test_register_page import FOUND, SEEN

DAY_S = 86_400.0
PAGES = (
    "/model/confirm/load/large",
    "/plans",
    "/plans/gold",
    "/limits",
    "/limits/model/large",
    "/corrections?request=chatcmpl-1",
    "/decisions",
    "/audit",
)
"""`python -m bench.lived_in DATADIR --shoot` takes their pictures, with data that lives."""


@pytest.fixture(scope="module")
def owner(site: Site) -> Owner:
    """A tenant with a plan and a request; models on a worker, and one that does not fit."""
    context = site.operator
    for name in ("idle", "busy"):
        site.add_model(name)
    site.add_model("large", weight_bytes=190 * PAGE)
    rows = (model("busy", running=2), model("idle"))
    site.kit.dispatcher.statuses = [status(*rows)]
    (owner,) = add_owners(context, "acme")
    post(context, [owner.posting("chatcmpl-1", cost_nanos=4_200_000, posted_at=context.clock())])
    prices.create_plan(context, "gold", 1250)
    prices.set_terms(context, "acme", "gold", 0)
    own = PriceRecord("large", 0.0, 100, 10, 400)
    prices.set_plan_price(context, "gold", "large", own, context.clock() + DAY_S)
    return owner


@pytest.fixture
def slow_look(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A look at a model that goes on until it is given up, or at once where the source says so."""
    seen: list[str] = []

    def look(
        context: object, source: str, dtype: str, revision: str, is_gone: object, report: object
    ) -> Preflight:
        assert callable(is_gone)
        assert callable(report)
        report("resolve")
        while source == "/slow" and not is_gone():
            time.sleep(0.02)
        seen.append(source)
        return Preflight(source, RegisterEvent("preflight", source, weight_bytes=4 * PAGE))

    monkeypatch.setattr(preflight, "look", look)
    return seen


def test_a_check_tells_and_takes_no_page_hostage(
    site: Site, browser: Browser, owner: Owner, slow_look: list[str]
) -> None:
    with browser.open(site.url) as visit:
        page = visit.page
        visit.sign_in("ann", PASSWORD)
        visit.go("/register")
        page.fill("#f-name", "idle")
        page.fill("#f-source", "/slow")
        page.click("button:has-text('Check')")
        page.wait_for_selector("#f-name-help >> text=already exists")
        assert page.evaluate("document.activeElement.id") == "f-name"
        page.fill("#f-name", "fresh")
        page.click("button:has-text('Check')")
        page.wait_for_selector("[data-check-says] >> text=asking the hub for the commit")
        visit.check_accessible()
        page.fill("#f-source", "/quick")
        page.wait_for_selector("text=A field was changed during the check")
        page.click("button:has-text('Check')")
        page.wait_for_selector("#preflight >> text=It fits beside the loaded models")
        assert slow_look == ["/slow", "/quick"]
        assert page.is_visible("button:has-text('Register')")
        visit.check_accessible()
        visit.check_clean()


def test_the_facts_of_a_check_fit_and_its_dtypes_can_be_chosen(
    site: Site, browser: Browser, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(context: object, source: str, dtype: str, *_: object, **__: object) -> Preflight:
        found = msgspec.structs.replace(FOUND, dtype="bfloat16" if dtype == "auto" else dtype)
        return replace(SEEN, found=found)

    monkeypatch.setattr(preflight, "look", look)
    with browser.open(site.url) as visit:
        page = visit.page
        visit.sign_in("ann", PASSWORD)
        visit.go("/register")
        page.fill("#f-name", "fresh")
        page.fill("#f-source", "acme/m")
        page.click("button:has-text('Check')")
        page.wait_for_selector("#preflight >> text=Gemma3ForCausalLM")
        assert page.is_checked("input[name=dtype][value=auto]")
        visit.check_accessible()
        visit.shoot("register-facts")
        page.check("input[name=dtype][value=int4]")
        page.click("button:has-text('Check again')")
        page.wait_for_selector("input[name=dtype][value=bfloat16]")
        assert page.is_checked("input[name=dtype][value=int4]")
        visit.check_clean()


def test_every_page_is_clean_accessible_and_fits(
    site: Site, browser: Browser, owner: Owner
) -> None:
    with browser.open(site.url) as visit:
        page = visit.page
        visit.sign_in("ann", PASSWORD)
        visit.go("/alerts")
        page.fill("#f-owner", "acme")
        page.fill("#f-url", "https://example.com/hook")
        page.click("text=Add the alert")
        page.wait_for_selector("text=Copy the secret now")
        visit.check_accessible()
        page.click("text=Done")
        page.wait_for_selector("td >> text=acme")
        visit.shoot("alerts")
        for path in (*PAGES, f"/tenants/{owner.tenant.id}/models"):
            visit.go(path)
            visit.check_accessible()
            visit.check_layout()
        visit.check_clean()


def test_what_was_typed_elsewhere_on_the_page_stays(
    site: Site, browser: Browser, owner: Owner
) -> None:
    with browser.open(site.url) as visit:
        page = visit.page
        visit.sign_in("ann", PASSWORD)
        visit.go(f"/tenants/{owner.tenant.id}")
        page.fill("#share #f-weight", "7")
        page.fill("#f-requests_per_minute", "60")
        page.click("text=Set limits")
        page.wait_for_selector("text=The limits were changed.")
        assert page.input_value("#share #f-weight") == "7"
        page.click("#share button:has-text('Save')")
        page.wait_for_selector("text=The change applies to the next requests")
        page.wait_for_selector(".state-line >> text=weight 7")
        page.keyboard.press("Control+k")
        page.keyboard.type("theme")
        page.wait_for_selector("#palette-0 >> text=Switch theme")
        page.keyboard.press("Enter")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        visit.check_clean()
