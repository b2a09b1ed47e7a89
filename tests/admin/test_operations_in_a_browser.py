"""Playground and the other pages of operations as people see them."""

import pytest

from registry.accounts import api_keys, tenants
from registry.money import ledger, rollups
from registry.money.ledger import Posting
from tests.admin.browser import Browser
from tests.admin.site import PASSWORD, Site
from tests.gateway.edge_kit import Running, key_record

TEXT = "The game is afoot!"


@pytest.fixture(scope="module", autouse=True)
def _filled(site: Site) -> None:
    site.add_model("tiny")
    with site.operator.writing() as session:
        now_at = site.operator.clock()
        tenant = tenants.create_tenant(session, "acme", now_at=now_at)
        record, _ = api_keys.create_key(session, tenant.id, "first", now_at=now_at)
    with site.operator.writing() as session:
        crowd = tenants.create_tenant(session, "crowd", 3.0, now_at=now_at)
        rows = [
            ("a", tenant.id, 8.0, 0.01, "finished"),
            ("b", crowd.id, 3.0, 4.2, "finished"),
            ("c", crowd.id, 1.0, 0.2, "finished"),
            ("d", crowd.id, 0.0, 0.0, "cache_hit"),
        ]
        postings = [
            Posting(
                f"chatcmpl-{name}", tenant_id, record.id, "tiny", "rev", "chat", outcome,
                12, 0, 30, 1000, service_s, queue_s, 0.5, 1.5, now_at - 60,
            )
            for name, tenant_id, service_s, queue_s, outcome in rows
        ]  # fmt: skip
        ledger.post_many(session, postings)
        rollups.roll(session, rollups.newest_seq(session))
    known = key_record(key_id=record.id, tenant_id=tenant.id)
    site.kit.directory.replace(2, [known], [site.kit.model])

    def script(running: Running) -> None:
        running.say(site.kit.tokenizer.encode(TEXT).ids)
        running.end("stop")

    site.kit.dispatcher.script = script


def test_a_talk_is_streamed_on_two_sides(site: Site, browser: Browser) -> None:
    with browser.open(site.url) as visit:
        visit.expected = ("422",)
        visit.sign_in("ann", PASSWORD)
        visit.go("/playground")
        visit.check_accessible()
        visit.shoot("playground")
        page = visit.page
        page.fill("#f-max_tokens", "8")  # the model of tests has little room
        page.fill("#f-prompt", "What is afoot?")
        page.click("[data-send]")
        assert page.evaluate("document.activeElement.id") == "f-key", "nobody's key is taken"
        key = page.get_attribute("#f-key-list option", "value")
        page.fill("#f-key", "no-such-key")
        page.fill("#f-beside", "")
        page.click("[data-send]")
        page.wait_for_selector(".talk .notice.bad button:has-text('Try again')")
        assert page.input_value("#f-prompt") == "What is afoot?", "it is not lost"
        assert key
        page.fill("#f-key", key)
        page.click(".notice button:has-text('Try again')")
        page.wait_for_selector(f".talk .turn >> text={TEXT}")
        page.wait_for_selector("[data-send]:enabled")
        page.click("[data-anew]")
        page.fill("#f-beside", "not-there")
        page.fill("#f-prompt", "What is afoot?")
        page.keyboard.press("Control+Enter")
        page.wait_for_selector(f".talk:first-child .turn >> text={TEXT}")
        page.wait_for_selector(".talk:nth-child(2) .notice.bad")
        page.wait_for_selector("[data-send]:enabled")
        page.fill("#f-beside", "")
        page.fill("#f-prompt", "And now?")
        page.click("[data-send]")
        page.wait_for_selector("[data-send]:enabled")
        assert page.locator(".talk").count() == 1
        visit.check_accessible()
        visit.shoot("playground-talk")
        visit.check_clean()


def test_without_scripts_a_prompt_is_answered(site: Site, browser: Browser) -> None:
    with browser.open(site.url, scripts=False) as visit:
        visit.sign_in("ann", PASSWORD)
        visit.go("/playground")
        visit.page.fill("#f-max_tokens", "8")
        assert visit.page.input_value("#f-key") == ""
        key = visit.page.get_attribute("#f-key-list option", "value")
        visit.page.fill("#f-key", key or "")
        visit.page.fill("#f-prompt", "What is afoot?")
        visit.page.click("[data-send]")
        visit.page.wait_for_selector(f".turn >> text={TEXT}")


def test_shares_and_queues_follow_the_server(site: Site, browser: Browser) -> None:
    with browser.open(site.url) as visit:
        visit.sign_in("ann", PASSWORD)
        visit.go("/fairness")
        visit.page.wait_for_selector(".live.on")
        visit.page.wait_for_selector("text=crowd")
        visit.check_accessible()
        visit.shoot("fairness")
        visit.check_clean()


def test_cached_answers_are_shown(site: Site, browser: Browser) -> None:
    with browser.open(site.url) as visit:
        visit.sign_in("ann", PASSWORD)
        for name, path in {
            "cache": "/cache",
            "cache-confirm": "/cache/confirm?tenant=acme",
        }.items():
            visit.go(path)
            visit.check_accessible()
            visit.shoot(name)
            visit.check_clean()
