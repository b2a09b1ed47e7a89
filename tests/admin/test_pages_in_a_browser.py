"""Every page as people see it: clean of violations, accessible, in both widths and themes."""

import pytest

from engine.protocol import ModelStatus
from registry.models import catalog
from tests.admin.browser import Browser
from tests.admin.site import MIB, PASSWORD, Site, worker_status

PAGES = {
    "models": "/models",
    "models-filtered": "/models?q=nothing-is-called-that",
    "model": "/models/tiny",
    "model-tokens": "/models/tiny?show=tokens",
    "model-failed": "/models/broken",
    "model-confirm": "/model/confirm/unload/tiny",
    "register": "/register",
    "account": "/account",
    "search": "/search?q=tiny",
    "users": "/users",
    "user": "/users/ann",
    "user-add": "/user/add",
    "user-remove": "/user/remove/ann",
    "sessions": "/sessions",
    "audit": "/audit",
    "health": "/health",
}


@pytest.fixture(scope="module", autouse=True)
def _filled(site: Site) -> None:
    """Models in every state."""
    site.add_model("tiny")
    site.add_model("org/qwen-2.5-0.5b-instruct-with-a-long-name", weight_bytes=988 * MIB)
    site.add_model("bge-small", task="embed", dim=384, family="bert")
    with site.operator.writing() as session:
        broken = catalog.add_model(session, "broken", "/models/broken", now_at=1_700_000_000.0)
        reason = "the folder has no tokenizer.json: a model needs one to be hosted"
        catalog.fail(session, broken.registration, "no_tokenizer", reason, now_at=1_700_000_001.0)
    rows = [
        ModelStatus("tiny", "resident", 64 * MIB, 3 * MIB, 2, 1, 0.21),
        ModelStatus("bge-small", "warm", 64 * MIB, 0, 0, 0, 0.4),
    ]
    site.kit.dispatcher.statuses = [worker_status(*rows)]


def test_every_page_is_clean_accessible_and_fits(site: Site, browser: Browser) -> None:
    with browser.open(site.url) as visit:
        visit.go("/sign-in")
        visit.check_accessible()
        visit.shoot("sign-in")
        visit.sign_in("ann", PASSWORD)
        for name, path in PAGES.items():
            visit.go(path)
            visit.check_accessible()
            visit.shoot(name)
            visit.check_clean()


def test_the_palette_finds_by_keyboard(site: Site, browser: Browser) -> None:
    with browser.open(site.url) as visit:
        visit.sign_in("ann", PASSWORD)
        visit.page.keyboard.press("Control+k")
        visit.type_into("dialog input", "qwen")
        visit.page.wait_for_selector("#palette-0 >> text=qwen")
        visit.check_accessible()
        visit.shoot("palette")
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_url("**/models/org%2Fqwen*")
        visit.check_clean()


def test_pages_are_used_by_keyboard_alone(site: Site, browser: Browser) -> None:
    with browser.open(site.url) as visit:
        visit.go("/sign-in")
        visit.type_into("#f-name", "ann")
        visit.page.keyboard.press("Tab")
        visit.page.keyboard.type(PASSWORD)
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_url("**/overview")
        visit.go("/models")
        visit.page.keyboard.press("Tab")
        assert visit.page.evaluate("document.activeElement.className") == "skip"
        visit.page.keyboard.press("Enter")
        assert visit.page.evaluate("document.activeElement.id") == "main"
        visit.page.keyboard.press("/")
        visit.type_into("[name=q]", "bge")
        visit.page.keyboard.press("Enter")
        visit.page.wait_for_url("**/models?q=bge")
        seen = set()
        for _ in range(60):
            visit.page.keyboard.press("Tab")
            seen.add(visit.page.evaluate("document.activeElement.textContent.trim()"))
        assert {"Models", "Register a model", "bge-small", "Clear"} <= seen
        visit.check_clean()


def test_the_theme_is_switched_and_stays(site: Site, browser: Browser) -> None:
    with browser.open(site.url) as visit:
        visit.sign_in("ann", PASSWORD)
        ground = "getComputedStyle(document.body).backgroundColor"
        light = visit.page.evaluate(ground)
        visit.page.click(".side [data-theme-switch]")
        dark = visit.page.evaluate(ground)
        assert dark != light
        visit.go("/account")
        assert visit.page.evaluate(ground) == dark


def test_what_a_worker_says_is_seen_without_loading_the_page_anew(
    site: Site, browser: Browser
) -> None:
    with browser.open(site.url) as visit:
        visit.sign_in("ann", PASSWORD)
        visit.go("/models/tiny")
        visit.page.wait_for_selector("[data-part=state] >> text=resident")
        visit.page.wait_for_selector(".live.on")
        row = ModelStatus("tiny", "draining", 64 * MIB, 0, 1, 0, 0.21)
        before = site.kit.dispatcher.statuses
        try:
            site.kit.dispatcher.statuses = [worker_status(row)]
            visit.page.wait_for_selector("[data-part=state] >> text=draining")
        finally:
            site.kit.dispatcher.statuses = before
        visit.check_clean()


def test_without_scripts_the_pages_work(site: Site, browser: Browser) -> None:
    with browser.open(site.url, scripts=False) as visit:
        visit.sign_in("ann", PASSWORD)
        visit.go("/models")
        visit.page.fill("input[name=q]", "tiny")
        visit.page.click("text=Filter")
        visit.page.wait_for_url("**q=tiny**")
        visit.page.click("text=Clear")
        visit.page.click("table >> text=tiny")
        visit.page.click("button:has-text('Pin')")
        visit.page.wait_for_selector("text=tiny was pinned and is never evicted.")
        visit.page.click("button:has-text('Unpin')")
        visit.page.click("text=Remove")
        visit.page.wait_for_selector("text=Remove tiny?")
        visit.page.click("text=Go back")
        visit.page.wait_for_url("**/models/tiny")
